"""The experts that routers choose: kept on every rank, and replayed by the reference.

Rounding alone routes a token whose scores are almost equal. So the reference replays the ranks' choices, and the
choices are judged by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megamix.model.experts import Router


class Choice(NamedTuple):
    """What a router chose in one forward."""

    x: Tensor  # its input (B, T, hidden_size)
    ranking: Tensor  # each expert's score and bias, FP32 (B, T, experts)
    experts: Tensor  # INT64 (B, T, top_k)


Choices = dict[str, Tensor]  # INT64 (B, T, top_k) of a micro-batch, by router


def routers(model: nn.Module) -> dict[str, Router]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


class WatchedRouter:
    """Keeps what a router chooses in each forward of a step, not in what backward repeats of it. It chooses what it is
    told to. Nothing waits for the device.
    """

    def __init__(self, router: Router) -> None:
        self.told: Tensor | None = None  # INT64 (B, T, top_k); None: it chooses by itself
        self._kept = list[Choice]()
        self._router, self._choose, self._x = router, router.choose, torch.empty(0)
        # The compiler would trace the list.
        self._keep: Callable[[Tensor, Tensor], None] = torch.compiler.disable(self._note)  # type: ignore[no-untyped-call]  # untyped in torch
        router.choose = self._chosen  # type: ignore[method-assign]  # for this router alone
        router.register_forward_pre_hook(self._before)

    def take(self) -> list[Choice]:
        """Return each micro-batch's choice since the last call, on the CPU."""
        kept, self._kept = self._kept, []
        return [Choice(*(x.to("cpu", copy=True) for x in choice)) for choice in kept]

    def score(self, x: Tensor) -> Tensor:
        """Return the scores of an input, FP64. Shapes: x (B, T, hidden_size) -> (B, T, experts)."""
        self.told = None
        self._router(x.to(self._router.weight))
        return self.take()[-1].ranking.double()

    def _before(self, router: nn.Module, inputs: tuple[Tensor]) -> None:
        self._x = inputs[0]

    def _chosen(self, ranking: Tensor) -> Tensor:
        experts = self._choose(ranking) if self.told is None else self.told
        self._keep(ranking, experts)
        return experts

    def _note(self, ranking: Tensor, experts: Tensor) -> None:
        in_backward = torch._C._current_graph_task_id() >= 0
        if torch.is_grad_enabled() and not in_backward:
            self._kept.append(Choice(*(x.detach().clone() for x in (self._x, ranking, experts))))


def watched_routers(model: nn.Module) -> dict[str, WatchedRouter]:
    return {name: WatchedRouter(router) for name, router in routers(model).items()}
