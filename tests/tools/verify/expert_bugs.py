"""Bugs in routers and experts to plant on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from megamix.beside.tally import Tally
from megamix.mixed_precision.tallies import Tallies
from megamix.model.experts import Router, Routes, Stack
from megamix.model.ops import Ops


class _LargerGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.1 * grad


def _stacks(change: Callable[[Tensor], Tensor]) -> object:
    def forward(self: Stack, rows: Tensor, counts: Tensor) -> Tensor:
        return self.ops.grouped_linear(rows, change(self.weight), counts)

    return mock.patch.object(Stack, "forward", forward)


def expert_gradients_larger() -> object:
    """As with ranks that divide experts and divide a loss otherwise than they."""
    return _stacks(_LargerGradient.apply)


def experts_permuted() -> object:
    """Each expert's tokens get to the next one."""
    return _stacks(lambda weight: weight.roll(1, 0))


def router_in_half() -> object:
    """The router's products are of the model's dtype."""
    return mock.patch.object(Ops, "scores", lambda ops, x, weight: F.linear(x, weight).float())


def worst_experts_chosen() -> object:
    return mock.patch.object(Router, "choose", lambda self, ranking: (-ranking).topk(self.experts.top_k, -1).indices)


def choice_by_rounded_scores() -> object:
    """Scores are rounded to half on the way to the choice: this is less than a model in half rounds anyway."""
    right = Router.choose
    return mock.patch.object(Router, "choose", lambda router, ranking: right(router, ranking.bfloat16()))


def biased_weights() -> object:
    """The bias is in the factors of the experts' outputs, too."""
    right = Router.forward

    def forward(self: Router, x: Tensor) -> Routes:
        routes = right(self, x)
        biased = self.ops.scores(x, self.weight).softmax(-1) + self.balance.value
        weights = biased.flatten(0, 1).gather(-1, routes.experts)
        return routes._replace(weights=weights / weights.sum(-1, keepdim=True))

    return mock.patch.object(Router, "forward", forward)


def counted_in_recompute() -> object:
    """Backward, which runs a block again, counts its tokens again."""
    return mock.patch.object(Tally, "add", lambda tally, counts: tally._counts.add_(counts.detach()))


def bias_moves_on_skipped() -> object:
    right = Tallies.move
    return mock.patch.object(Tallies, "move", lambda self, counts, skipped: right(self, counts, ~skipped & skipped))


@contextmanager
def bias_of_own_counts() -> Iterator[None]:
    """Each rank moves the bias by the counts of its own tokens."""
    take, move, own = Tallies.take, Tallies.move, dict[Tallies, Tensor]()

    def keeps(self: Tallies) -> Any:
        own[self] = self._counts.clone()
        return take(self)

    def moves(self: Tallies, counts: Any, skipped: Tensor) -> None:
        move(self, dict(zip(counts, self._split(own[self]), strict=True)), skipped)

    with mock.patch.object(Tallies, "take", keeps), mock.patch.object(Tallies, "move", moves):
        yield


EXPERT_BUGS: dict[str, Callable[[], object]] = {
    bug.__name__: bug
    for bug in (
        expert_gradients_larger,
        experts_permuted,
        router_in_half,
        worst_experts_chosen,
        choice_by_rounded_scores,
        biased_weights,
        counted_in_recompute,
        bias_moves_on_skipped,
        bias_of_own_counts,
    )
}
