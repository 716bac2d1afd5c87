"""Bugs to plant in our own engine, by name. The docstrings of those in the catalogue are sentences of its table."""

import importlib
import itertools
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megamix.base import constants
from megamix.base.tally import Tally
from megamix.comm.collectives import GlooCollectives
from megamix.data.loader import Batch
from megamix.mixed_precision import engine as engine_module
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.module_state import Tallies
from megamix.mixed_precision.optim import optimizer
from megamix.mixed_precision.optim.muon import Muon, MuonUpdate, orthogonalised
from megamix.mixed_precision.optim.nag import NAG
from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.mixed_precision.param_gather import ParamGather
from megamix.mixed_precision.step import StepProgress
from megamix.mixed_precision.unit_gather import UnitGather
from megamix.mixed_precision.update_slice import StepScalars
from megamix.model import decoder, fp8
from megamix.model.experts import Router, Stack
from megamix.model.layers import RotaryTable, RotaryTables
from megamix.model.ops import SEES_ALL, Ops
from megamix.parallel import build, tensor_parallel
from megamix.parallel.expert_parallel import _Way

FAMILY = "tests.tools.verify.per_head"
INF_AT = 30  # the product whose gradient gets an inf, counted over a run; the second step of two layers has it


def wrong(owner, name):
    """Turn a function into a bug: planted, it is called in place of the right one, which it gets first."""

    def bug_of(function):
        @wraps(function)
        def plant():
            right = getattr(owner, name)
            return mock.patch.object(owner, name, lambda *args, **kwargs: function(right, *args, **kwargs))

        return plant

    return bug_of


def _is_last():
    return dist.get_rank() == dist.get_world_size() - 1


# Reductions and gathers


@contextmanager
def gradients_not_reduced():
    """One bucket's reduction is left out: every rank keeps its own gradient."""
    whole, built, numels = GlooCollectives.reduce_scatter, ShardedEngine.__init__, []

    def note(self, *args, **kwargs):
        built(self, *args, **kwargs)
        numels.extend(bucket.plan.padded_numel for bucket in self.buckets)

    def forgets(self, grads, grad_shard, use):
        return whole(self, grads, grad_shard, (lambda parts: None) if grads.numel() == min(numels) else use)

    with (
        mock.patch.object(GlooCollectives, "reduce_scatter", forgets),
        mock.patch.object(ShardedEngine, "__init__", note),
    ):
        yield


@wrong(GlooCollectives, "reduce_scatter")
def gradients_freed_early(right, self, grads, grad_shard, use):
    """One rank's gradients are freed, and their memory taken, before they are sent."""
    if _is_last():
        grads.zero_()
    return right(self, grads, grad_shard, use)


@wrong(ParamGather, "updated")
def stale_gather(right, self, bucket):
    """The other ranks' parts of one bucket never arrive."""
    if bucket is not next(one for one in self._buckets if one.owners.axis.size > 1):
        right(self, bucket)


@wrong(UnitGather, "before_backward")
def unit_freed_early(right, self, member, turn):
    """In backward the next unit's weights take the memory of the one that still computes."""
    right(self, member, turn)
    if not all(map(self._grads.has_gradient, member.param_names)):
        for bucket in self._unit_of[member].buckets:
            bucket.params.zero_()


@contextmanager
def stale_shards():
    """The weights gathered behind a step are the casts of the masters before it."""
    right, before = ShardedEngine.step, {}

    def step(self):
        before.update((bucket, bucket.master.clone()) for bucket in self.buckets)
        return right(self)

    def cast_shown(self):
        self.param_shard.copy_(before.get(self, self.master))

    with mock.patch.object(ShardedEngine, "step", step), mock.patch.object(Bucket, "cast_shown", cast_shown):
        yield


def tied_table_not_summed():
    """Each end of a pipeline trains its own copy of the table."""
    return mock.patch.object(build, "replace", lambda placement, owners: placement)


@wrong(tensor_parallel, "_place")
def heads_of_one_rank(right, rule, shape, topology, sequence_parallel):
    """The first tensor-parallel rank's gradient of what each uses for its own heads counts as if it were the sum."""
    return right(replace(rule, within_heads=False), shape, topology, sequence_parallel=sequence_parallel)


@wrong(tensor_parallel, "_place")
def positions_of_one_rank(right, rule, shape, topology, sequence_parallel):
    """Only one rank's positions count for a norm, which tensor-parallel ranks replicate."""
    return right(rule, shape, topology, sequence_parallel=False)


# Norms


def _squares_times(factor):
    """Plant a factor into the squares that each piece of a parameter adds to the norm."""

    @wrong(engine_module, "stats_by_piece")
    def stats_by_piece(right, buckets, *others):
        squares, peaks = right(buckets, *others)
        factors = [factor(piece.spec) for bucket in buckets for piece in bucket.pieces]
        return torch.stack([squares * torch.tensor(factors, dtype=squares.dtype), peaks])

    return stats_by_piece()


def norm_counted_per_rank():
    """Every rank's squares count as often as there are ranks."""
    return _squares_times(lambda spec: dist.get_world_size())


def norm_leaves_out():
    return _squares_times(lambda spec: float(spec.name != "embedding.weight"))


def norm_counts_replicated():
    """The norm counts a parameter that tensor-parallel ranks replicate once for each of them."""
    return _squares_times(lambda spec: 1.0 + (spec.shape == spec.full_shape))


def norm_of_one_rank():
    """The other ranks' sums never arrive."""
    return _squares_times(lambda spec: float(dist.get_rank() == 0))


# Losses and forward


@wrong(StepProgress, "scaled")
def wrong_divisor(right, self, loss, weight, *, counts):
    """The loss is divided by the number of micro-batches once more, as if a schedule did it, too."""
    return right(self, loss, weight, counts=counts) / self.grad_accum_steps


@wrong(StepProgress, "scaled")
def scale_applied_twice(right, self, loss, weight, *, counts):
    """The loss scale is in the loss twice."""
    return right(self, loss, weight, counts=counts) * self.scale_used


@wrong(StepProgress, "scaled")
def loss_counted_per_part(right, self, loss, weight, *, counts):
    """The loss counts once for each rank that has a part of its positions."""
    return right(self, loss, weight, counts=counts) * self._num_parts


@wrong(StepProgress, "scaled")
def weight_counted_per_part(right, self, loss, weight, *, counts):
    """The targets count once for each rank that has a part of their positions."""
    return right(self, loss, weight * self._num_parts, counts=counts)


@wrong(decoder, "checkpoint")
def recomputed_elsewhere(right, block, x, rotary, *context, **settings):
    """Backward recomputes a block as if the positions were turned by one."""
    calls = itertools.count()

    def forward(x):
        turned = RotaryTables(rotary.cos.roll(1, -2), rotary.sin.roll(1, -2))
        return block(x, turned if next(calls) else rotary, *context)

    return checkpoint(forward, x, **settings)


def documents_seen_across():
    """Attention crosses from one document into the next: the model is not told where they begin."""
    return mock.patch.object(Batch, "inputs", property(lambda batch: (batch.tokens, batch.targets, None, 0)))


@wrong(Ops, "attention")
def window_ignored(right, self, query, key, value, documents=None, rule=SEES_ALL):
    """The last rank's queries see all keys before them, by a window that is too long."""
    too_long = _is_last() and rule.window
    return right(self, query, key, value, documents, replace(rule, window=1000) if too_long else rule)


@wrong(RotaryTable, "_fill")
def tables_in_half(right, self, device):
    """A cast of the whole model rounds the rotary tables with the parameters."""
    right(self, device)
    for table in (self.cos, self.sin):
        table.copy_(table.half())


@wrong(ShardedEngine, "step")
def table_moves_on_skipped(right, self):
    result = right(self)
    self.module.rotary.cos.add_(result.found_inf * float(dist.get_rank() == 1))
    return result


# Updates


def _groups(**lost):
    right = Optimizer.group_of
    return mock.patch.object(Optimizer, "group_of", lambda *args: right(*args)._replace(**lost))


def decay_on_all():
    return _groups(weight_decay=(0.1,))


@wrong(StepScalars, "holds")
def frozen_moves(right, step, group):
    """The states of a group that is frozen move on."""
    return step.found_inf


def betas_of_the_first_group():
    """Groups with betas of their own get those of the optimizer."""
    return _groups(betas=((0.9,), (0.95,)))


@wrong(optimizer, "entry")
def momentum_one_update_early(right, table, update):
    """Each update has the momentum that its schedule has for the next one."""
    return right(table, update + 1)


@wrong(engine_module, "entry")
def schedule_one_update_late(right, lr_table, update):
    """Every update has the lr of the one before it."""
    return right(lr_table, (update - 1).clamp(min=1))


def decay_by_the_other_rule():
    """Decay is coupled where it should be decoupled, or the reverse."""
    right = NAG.equation

    def equation(self, *args):
        return right(replace(self, decoupled_weight_decay=not self.decoupled_weight_decay), *args)

    return mock.patch.multiple(NAG, equation=equation, library_update_=Optimizer.library_update_)  # not torch's kernel


@wrong(Bucket, "move_average")
def average_moves_on_skipped(right, self, share):
    """An average of the weights moves in a skipped step, too."""
    right(self, torch.full_like(share, 0.1))


@wrong(Bucket, "move_average")
def average_of_halves(right, self, share):
    """An average of the weights is taken of their half copies."""
    masters = self.master.clone()
    self.master.copy_(masters.to(self.params.dtype))
    right(self, share)
    self.master.copy_(masters)


# Muon


@contextmanager
def matrices_by_parts():
    """Muon makes each rank's part of a matrix orthogonal by itself."""

    @wrong(MuonUpdate, "_turn")
    def turn(right, self, arrived, home, found_inf):
        widths = [(block, block.columns.stop - block.columns.start) for block in home.blocks]
        parts = [(place, width) for block, width in widths for place in block.places]
        if any((place.stop - place.start) % width for place, width in parts):
            right(self, arrived, home, found_inf)  # a row is in two shards
            return
        for place, width in parts:
            arrived[place] = orthogonalised(arrived[place].view(-1, width), self._muon).flatten()

    with turn(), mock.patch.object(constants, "MOST_PADDING", -1.0):
        yield


@wrong(MuonUpdate, "_turn")
def tall_not_orthogonalised(right, self, arrived, home, found_inf):
    """A special path for tall matrices skips Muon's iteration."""
    if home.matrix.rows <= home.matrix.columns:
        right(self, arrived, home, found_inf)


@wrong(ShardedEngine, "__init__")
def muon_per_micro_batch(right, self, *args, **kwargs):
    """Muon makes each micro-batch's gradient orthogonal, and these are added up."""
    right(self, *args, **kwargs)
    for bucket in self.buckets:
        for slot in bucket.plan.slots:
            if slot.spec.matrices:
                bucket.named_params[slot.spec.name].register_hook(
                    lambda grad: orthogonalised(grad.bfloat16(), self.optimizer).to(grad.dtype)
                )


@wrong(MuonUpdate, "_momentum")
def momentum_moves_on_skipped(right, self, exchange, bucket, spans, step):
    """Muon updates its momentum before it is known whether the step is skipped."""
    return right(self, exchange, bucket, spans, step._replace(found_inf=torch.zeros_like(step.found_inf)))


@wrong(MuonUpdate, "_turn")
def moments_move_on_skipped(right, self, arrived, homes, found_inf):
    """The moments of a direction's rows move before it is known whether the step is skipped."""
    right(self, arrived, homes, torch.zeros_like(found_inf))


def heads_not_split():
    """Muon treats several matrices, stacked in one parameter, as one."""
    family = importlib.import_module(FAMILY).PerHead
    return mock.patch.object(family, "fused", classmethod(lambda cls, config: {}))


@wrong(Muon, "equation")
def matrices_decay_twice(right, self, grad, master, states, at):
    """Weight decay is applied by the optimizer's wrapper, and once more by its equation."""
    if not states:
        master = master - at.lr * at.weight_decay * master
    return right(self, grad, master, states, at)


# Experts


class GradientTimes(torch.autograd.Function):
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
    """The gradients of experts get a factor that the others do not have."""
    return _stacks(partial(GradientTimes.apply, 1.1))


def expert_gradients_over_ep():
    """Gradients of experts are divided by the ranks that divide them, as if each had seen all tokens."""
    return _stacks(partial(GradientTimes.apply, 0.5))


def experts_permuted():
    """Each expert's tokens get to the next one."""
    return _stacks(lambda weight: weight.roll(1, 0))


@wrong(_Way, "there")
def rows_of_the_other_rank(right, self, rows):
    """Each of two ranks sends the other's rows in place of its own: as many, which it takes for its experts'."""
    return right(self, torch.cat(rows.split(self.to[::-1])[::-1]))


@wrong(_Way, "between")
def rows_not_regrouped(right, *given):
    """Rows that arrive stay sorted by rank, where each rank's are sorted by expert."""
    way = right(*given)
    return replace(way, order=torch.arange(len(way.order), device=way.order.device))


@wrong(GlooCollectives, "reduce_scatter")
def experts_not_reduced(right, self, grads, grad_shard, use):
    """Ranks that own the same experts keep each its own gradient."""
    divided = self.axis.size < dist.get_world_size()
    return right(self, grads, grad_shard, (lambda parts: None) if divided else use)


def router_in_half():
    """The router multiplies in half, and only its softmax is in FP32."""
    return mock.patch.object(Ops, "scores", lambda ops, x, weight: F.linear(x, weight).float())


def worst_experts_chosen():
    return mock.patch.object(Router, "choose", lambda self, ranking: (-ranking).topk(self.experts.top_k, -1).indices)


@wrong(Router, "choose")
def choice_by_rounded_scores(right, router, ranking):
    """Scores are rounded to half on the way to the choice: this is less than a model in half rounds anyway."""
    return right(router, ranking.bfloat16())


@wrong(Router, "forward")
def biased_weights(right, self, x):
    """The bias that balances the experts' loads is in the factors of their outputs, too."""
    routes = right(self, x)
    biased = self.ops.scores(x, self.weight).softmax(-1) + self.balance.value
    weights = biased.flatten(0, 1).gather(-1, routes.experts)
    return routes._replace(weights=weights / weights.sum(-1, keepdim=True))


def counted_in_recompute():
    """Backward, which runs a block again, counts the tokens of its experts again."""
    return mock.patch.object(Tally, "add", lambda tally, counts: tally._counts.add_(counts.detach()))


@wrong(Tallies, "move")
def bias_moves_on_skipped(right, self, counts, skipped):
    return right(self, counts, ~skipped & skipped)


@contextmanager
def bias_of_own_counts():
    """Each rank moves the bias of experts by the counts of its own tokens."""
    take, move, own = Tallies.take, Tallies.move, {}

    def keeps(self):
        own[self] = self._counts.clone()
        return take(self)

    def moves(self, counts, skipped):
        move(self, dict(zip(counts, torch.split(own[self], self._sizes), strict=True)), skipped)

    with mock.patch.object(Tallies, "take", keeps), mock.patch.object(Tallies, "move", moves):
        yield


# Products in FP8


@wrong(fp8.FP8Linear, "backward")
def fp8_gradients_larger(right, ctx, grad):
    """The gradients of weights are twice as large."""
    of_x, first, second, of_weight, *rest = right(ctx, grad)
    return of_x, first, second, 2 * of_weight, *rest


@wrong(fp8, "product")
def fp8_scales_transposed(right, a, b, dtype, *, fast=False):
    """A row of the result has the factor of a column, where both are equally many."""
    if len(a.factors) == len(b.factors):
        a, b = a._replace(factors=b.factors), b._replace(factors=a.factors)
    return right(a, b, dtype, fast=fast)


def fp8_scales_stale():
    """Codes are multiplied by the factors of the last operand of their shape."""
    right, last = fp8.quantise, {}

    def quantise(x, dtype, by_row):
        codes = right(x, dtype, by_row)
        stale = last.get((x.shape, dtype), codes.factors)
        last[x.shape, dtype] = codes.factors
        return codes._replace(factors=stale)

    return mock.patch.object(fp8, "quantise", quantise)


def inf_in_a_product():
    """No bug, but an inf in a gradient within a product of the last rank, in the second step."""
    right, calls = fp8.quantise, itertools.count(1)

    def quantise(x, dtype, by_row):
        if dtype == fp8.E5M2 and next(calls) == INF_AT and _is_last():
            x = x.clone()
            x[3, 5] = torch.inf
        return right(x, dtype, by_row)

    return mock.patch.object(fp8, "quantise", quantise)


@contextmanager
def inf_hidden_by_the_cast():
    """The scale is taken from finite numbers alone, and the cast makes the largest code of an inf."""
    right = fp8.quantise

    def quantise(x, dtype, by_row):
        return right(torch.where(x.isfinite(), x, x.sign()), dtype, by_row)

    with mock.patch.object(fp8, "quantise", quantise), inf_in_a_product():
        yield
