"""The experts that routers choose: kept on every rank, and replayed by the reference.

Rounding alone routes a token whose scores are almost equal. So the reference replays the ranks' choices, and the
choices are judged by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megamix.model.experts import Router
from megamix.tools.verify.core.verdict import Tensors


class Choice(NamedTuple):
    """What a router chose in one forward."""

    x: Tensor  # its input (B, T, hidden_size)
    ranking: Tensor  # each expert's score and bias, FP32 (B, T, experts)
    experts: Tensor  # INT64 (B, T, top_k)


Choices = dict[str, Tensor]  # INT64 (B, T, top_k) of a micro-batch, by router


def routers(model: nn.Module) -> dict[str, Router]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


class KeptChoices:
    """Keeps what the routers of a rank choose in each forward of a step, not in what backward repeats of it."""

    def __init__(self, model: nn.Module) -> None:
        self._keepers = {name: _Keeper(router) for name, router in routers(model).items()}

    def forget(self) -> None:
        for keeper in self._keepers.values():
            keeper.kept.clear()

    def take(self) -> dict[str, list[Choice]]:
        """Return each micro-batch's choice since the last call, by router, on the CPU."""
        taken = {
            name: [Choice(*(x.to("cpu", copy=True) for x in choice)) for choice in keeper.kept]
            for name, keeper in self._keepers.items()
        }
        self.forget()
        return taken


class _Keeper:
    """Looks on as a router chooses. Nothing waits for the device."""

    def __init__(self, router: Router) -> None:
        self.kept: list[Choice] = []
        self._choose, self._x = router.choose, torch.empty(0)
        # The compiler would trace the list.
        self._keep: Callable[[Tensor, Tensor], None] = torch.compiler.disable(self._note)  # type: ignore[no-untyped-call]  # untyped in torch
        router.choose = self._chosen  # type: ignore[method-assign]  # for this router alone
        router.register_forward_pre_hook(self._before)

    def _before(self, router: nn.Module, inputs: tuple[Tensor]) -> None:
        self._x = inputs[0]

    def _chosen(self, ranking: Tensor) -> Tensor:
        experts = self._choose(ranking)
        self._keep(ranking, experts)
        return experts

    def _note(self, ranking: Tensor, experts: Tensor) -> None:
        in_backward = torch._C._current_graph_task_id() >= 0
        if torch.is_grad_enabled() and not in_backward:
            self.kept.append(Choice(*(x.detach().clone() for x in (self._x, ranking, experts))))


class Replays:
    """The choices of a reference's model. Its routers choose by themselves until they are told."""

    def __init__(self, model: nn.Module) -> None:
        self._routers, self._rankings, self._choices = routers(model), Tensors(), Choices()
        for name, router in self._routers.items():
            router.choose = partial(self._chosen, name, router.choose)  # type: ignore[method-assign]  # for this one alone

    def _chosen(self, name: str, choose: Callable[[Tensor], Tensor], ranking: Tensor) -> Tensor:
        self._rankings[name] = ranking
        return self._choices[name] if name in self._choices else choose(ranking)

    def set(self, choices: Choices, device: torch.device) -> None:
        """Replay these choices in each forward, and in what backward repeats of it."""
        self._choices = {name: experts.to(device) for name, experts in choices.items()}

    def rankings(self) -> Tensors:
        """Return the scores of the last forward, FP64 (B, T, experts) by router."""
        return {name: ranking.to("cpu", torch.float64) for name, ranking in self._rankings.items()}

    @torch.no_grad()
    def score(self, name: str, x: Tensor) -> Tensor:
        """Return a router's scores of an input, FP64. Shapes: x (B, T, hidden_size) -> (B, T, experts)."""
        weight = self._routers[name].weight
        self._choices = {}
        self._routers[name](x.to(weight))
        return self.rankings()[name]
