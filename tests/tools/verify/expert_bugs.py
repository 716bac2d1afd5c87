"""Bugs in routers and experts to plant on ranks."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F

from megamix.beside.tally import Tally
from megamix.comm.collectives import GlooCollectives
from megamix.mixed_precision.tallies import Tallies
from megamix.model.experts import Router, Stack
from megamix.model.ops import Ops
from megamix.parallel.expert_parallel import _Way


class _GradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, factor, x):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.factor * grad


def _stacks(change):
    def forward(self, rows, groups):
        return self.ops.grouped_linear(rows, change(self.weight), groups)

    return mock.patch.object(Stack, "forward", forward)


def expert_gradients_larger():
    return _stacks(partial(_GradientTimes.apply, 1.1))


def expert_gradients_over_ep():
    """Gradients of experts are divided by the ranks that divide them, as if each had seen all tokens."""
    return _stacks(partial(_GradientTimes.apply, 0.5))


def rows_of_the_other_rank():
    """Each of two ranks sends the other's rows in place of its own: as many, which it takes for its experts'."""
    right = _Way.there

    def there(self, rows):
        return right(self, torch.cat(rows.split(self.to[::-1])[::-1]))

    return mock.patch.object(_Way, "there", there)


def rows_not_regrouped():
    """Rows that arrive stay sorted by rank, where each rank's are sorted by expert."""
    right = _Way.between

    def between(*given):
        way = right(*given)
        return replace(way, order=torch.arange(len(way.order), device=way.order.device))

    return mock.patch.object(_Way, "between", between)


@contextmanager
def experts_not_reduced():
    """Ranks that own the same experts keep each its own gradient."""
    whole = GlooCollectives.reduce_scatter

    def forgets(self, grads, grad_shard, use):
        divided = self.axis.size < dist.get_world_size()
        return whole(self, grads, grad_shard, (lambda parts: None) if divided else use)

    with mock.patch.object(GlooCollectives, "reduce_scatter", forgets):
        yield


def experts_permuted():
    """Each expert's tokens get to the next one."""
    return _stacks(lambda weight: weight.roll(1, 0))


def router_in_half():
    """The router's products are of the model's dtype."""
    return mock.patch.object(Ops, "scores", lambda ops, x, weight: F.linear(x, weight).float())


def worst_experts_chosen():
    return mock.patch.object(Router, "choose", lambda self, ranking: (-ranking).topk(self.experts.top_k, -1).indices)


def choice_by_rounded_scores():
    """Scores are rounded to half on the way to the choice: this is less than a model in half rounds anyway."""
    right = Router.choose
    return mock.patch.object(Router, "choose", lambda router, ranking: right(router, ranking.bfloat16()))


def biased_weights():
    """The bias is in the factors of the experts' outputs, too."""
    right = Router.forward

    def forward(self, x):
        routes = right(self, x)
        biased = self.ops.scores(x, self.weight).softmax(-1) + self.balance.value
        weights = biased.flatten(0, 1).gather(-1, routes.experts)
        return routes._replace(weights=weights / weights.sum(-1, keepdim=True))

    return mock.patch.object(Router, "forward", forward)


def counted_in_recompute():
    """Backward, which runs a block again, counts its tokens again."""
    return mock.patch.object(Tally, "add", lambda tally, counts: tally._counts.add_(counts.detach()))


def bias_moves_on_skipped():
    right = Tallies.move
    return mock.patch.object(Tallies, "move", lambda self, counts, skipped: right(self, counts, ~skipped & skipped))


@contextmanager
def bias_of_own_counts():
    """Each rank moves the bias by the counts of its own tokens."""
    take, move, own = Tallies.take, Tallies.move, {}

    def keeps(self):
        own[self] = self._counts.clone()
        return take(self)

    def moves(self, counts, skipped):
        move(self, dict(zip(counts, torch.split(own[self], self._sizes), strict=True)), skipped)

    with mock.patch.object(Tallies, "take", keeps), mock.patch.object(Tallies, "move", moves):
        yield


EXPERT_BUGS = {
    bug.__name__: bug
    for bug in (
        expert_gradients_larger,
        expert_gradients_over_ep,
        rows_of_the_other_rank,
        rows_not_regrouped,
        experts_not_reduced,
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
