"""Small configurations to verify, and bugs to plant in them."""

import itertools
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megamix.comm.collectives import GlooCollectives
from megamix.config import config_from_dict
from megamix.data.loader import Batch
from megamix.mixed_precision import engine as engine_module
from megamix.mixed_precision import group_scalars
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.nag import NAG
from megamix.mixed_precision.optimizers import Optimizer
from megamix.mixed_precision.param_gather import ParamGather
from megamix.mixed_precision.step import StepProgress
from megamix.mixed_precision.unit_gather import UnitGather
from megamix.mixed_precision.unseen_writes import UnseenWrites
from megamix.model import decoder
from megamix.model.layers import RotaryTable, RotaryTables
from megamix.model.ops import SEES_ALL, Ops
from megamix.parallel import build, tensor_parallel
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.layouts.observe import observe
from tests.tools.verify.expert_bugs import EXPERT_BUGS
from tests.tools.verify.fp8_bugs import FP8_BUGS
from tests.tools.verify.muon_bugs import FAMILY, MUON_BUGS

FAMILIES = {
    "llama": {"num_kv_heads": 4},
    "gpt": {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "bias": True},
    "per_head": {"family": "per_head", "num_kv_heads": 4},
}
EXPERTS = {
    "num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "dense_layers": 1,
    "balance_loss": 0.1, "z_loss": 0.01,
}  # fmt: skip
UPDATES, OVERFLOW_AT = 2, 1


def make_config(
    layout,
    *,
    family="llama",
    dtype="fp16",
    tied=True,
    accumulation=2,
    schedule="1f1b",
    sequence_parallel=False,
    loss_scale=None,
    packing="none",
    shard="states",
    cp_method="gather",
    model=None,
    average=None,
    **optimizer,
):
    """Return a small job.

    `accumulation`: micro-batches a step; with stages pp_size, or twice that for more than one. `loss_scale`: None for
    2**10 in FP16, and none elsewhere.
    """
    place = parse_layout(f"{layout}{'sp' * sequence_parallel}-{shard}")
    stages = place.size("pp")
    if stages > 1:
        accumulation = stages * min(accumulation, 2)
    fixed = loss_scale or (2.0**10 if dtype == "fp16" else None)
    scale = {"rule": "static", "init_scale": fixed} if fixed else {"rule": "off"}
    tree = {
        "model": {
            "vocab_size": 72, "seq_len": 8, "hidden_size": 32, "num_layers": max(2, 2 * stages), "num_heads": 8,
            "tie_embeddings": tied,
            **FAMILIES[family], **(model or {}),
        },
        "data": {"train": "none", "packing": packing},
        "optimizer": {"lr": 1e-2, "compile": False, **optimizer},
        "precision": {"dtype": dtype, "loss_scale": scale},
        "parallelism": {
            "bucket_size": 4000,
            **({"pp_size": stages, "pp_schedule": schedule} if stages > 1 else {}),
        },
        "training": {
            "steps": 10, "micro_batch_size": 2, "global_batch_size": 64,
            **({} if average is None else {"average": {"decay": average}}),
        },
        "checkpoint": {"folder": "none"},
        "plugins": [FAMILY] if family == "per_head" else [],
    }  # fmt: skip
    return place.apply(config_from_dict(tree), accumulation).with_keys(parallelism={"cp_method": cp_method})


def observe_case(config):
    return observe(config, UPDATES, OVERFLOW_AT)


def observe_bugs(cases, overflow_at=None):
    return [observe_bug(*case, overflow_at) for case in cases]


def observe_bug(config, bug, overflow_at=None):
    """Return the steps of `observe` with a bug planted on every rank, or with none.

    The engine does not look at its half parameters itself: `verify` must see their damage.
    """
    with BUGS[bug]() if bug else nullcontext(), mock.patch.object(UnseenWrites, "look", lambda *_: None):
        return observe(config, UPDATES, overflow_at)


@contextmanager
def gradients_not_reduced():
    """One bucket's reduction is left out: every rank keeps its own gradient."""
    whole = GlooCollectives.reduce_scatter

    def forgets(self, grads, grad_shard, use):
        small = grads.numel() == min_numel[0]
        return whole(self, grads, grad_shard, (lambda parts: None) if small else use)

    min_numel = [0]
    built = ShardedEngine.__init__

    def note(self, *args, **kwargs):
        built(self, *args, **kwargs)
        min_numel[0] = min(bucket.plan.padded_numel for bucket in self.buckets)

    with (
        mock.patch.object(GlooCollectives, "reduce_scatter", forgets),
        mock.patch.object(ShardedEngine, "__init__", note),
    ):
        yield


def _squares_times(factor):
    """Plant a factor into the squares that each piece of a parameter adds to the norm."""
    right = engine_module.stats_by_piece

    def wrong(buckets, row_stats, counts):
        squares, peaks = right(buckets, row_stats, counts)
        pieces = [piece for bucket in buckets for piece in bucket.pieces]
        factors = torch.tensor([factor(piece.spec) for piece in pieces], dtype=squares.dtype)
        return torch.stack([squares * factors, peaks])

    return mock.patch.object(engine_module, "stats_by_piece", wrong)


def norm_counted_per_rank():
    """Every rank's squares count as often as there are ranks, as if a replicated norm had no 1 / copies."""
    return _squares_times(lambda spec: dist.get_world_size())


def norm_leaves_out():
    return _squares_times(lambda spec: float(spec.name != "embedding.weight"))


def norm_counts_replicated():
    return _squares_times(lambda spec: 1.0 + (spec.shape == spec.full_shape))


def norm_of_one_rank():
    """The other ranks' sums never arrive."""
    return _squares_times(lambda spec: float(dist.get_rank() == 0))


def heads_of_one_rank():
    """The first tensor-parallel rank's gradient of what each uses for its own heads counts as if it were the sum."""
    right = tensor_parallel._place

    def wrong(rule, shape, topology, sequence_parallel):
        return right(replace(rule, within_heads=False), shape, topology, sequence_parallel=sequence_parallel)

    return mock.patch.object(tensor_parallel, "_place", wrong)


def positions_of_one_rank():
    """The first tensor-parallel rank's gradient of replicated parameters counts as if it were that of all positions."""
    right = tensor_parallel._place

    def wrong(rule, shape, topology, sequence_parallel):
        return right(rule, shape, topology, sequence_parallel=False)

    return mock.patch.object(tensor_parallel, "_place", wrong)


@contextmanager
def tables_in_half():
    """Buffers are rounded too, as by a cast of the whole module."""
    right = RotaryTable._fill

    def wrong(self, device):
        right(self, device)
        for table in (self.cos, self.sin):
            table.copy_(table.half())

    with mock.patch.object(RotaryTable, "_fill", wrong):
        yield


@contextmanager
def table_moves_on_skipped():
    right = ShardedEngine.step

    def wrong(self):
        result = right(self)
        self.module.rotary.cos.add_(result.found_inf * float(dist.get_rank() == 1))
        return result

    with mock.patch.object(ShardedEngine, "step", wrong):
        yield


def _groups(change):
    right = Optimizer.group_of
    return mock.patch.object(Optimizer, "group_of", lambda *args: change(right(*args)))


def decay_on_all():
    return _groups(lambda group: group._replace(weight_decay=(0.1,)))


def frozen_moves():
    """A group's factor of the learning rate, zero, is lost."""
    return _groups(lambda group: group._replace(lr_factor=1.0))


def betas_of_the_first_group():
    """All groups have the optimizer's betas."""
    return _groups(lambda group: group._replace(betas=((0.9,), (0.95,))))


@contextmanager
def momentum_one_update_early():
    """Every update has the momentum of the one after it."""
    right = group_scalars.entry
    with mock.patch.object(group_scalars, "entry", lambda table, update: right(table, update + 1)):
        yield


def decay_by_the_other_rule():
    """Decay is coupled where it should be decoupled, or the reverse."""
    right = NAG.equation

    def wrong(self, *args):
        return right(replace(self, decoupled_weight_decay=not self.decoupled_weight_decay), *args)

    return mock.patch.multiple(NAG, equation=wrong, library_update_=Optimizer.library_update_)  # not torch's kernel


def recomputed_elsewhere():
    """Backward recomputes a block as if the positions were turned by one."""

    def wrong(block, x, rotary, *context, **settings):
        calls = itertools.count()

        def forward(x):
            turned = RotaryTables(rotary.cos.roll(1, -2), rotary.sin.roll(1, -2))
            tables = rotary if next(calls) == 0 else turned
            return block(x, tables, *context)

        return checkpoint(forward, x, **settings)

    return mock.patch.object(decoder, "checkpoint", wrong)


@contextmanager
def _loss_times(factor):
    """Plant a factor into the loss that the plain loop and a pipeline's last stage back-propagate."""
    right = StepProgress.scaled

    def scaled(self, loss, weight, *, counts):
        return right(self, loss, weight, counts=counts) * factor(self)

    with mock.patch.object(StepProgress, "scaled", scaled):
        yield


def wrong_divisor():
    """The loss is divided by its micro-batches once more, as if a schedule did it, too."""
    return _loss_times(lambda step: 1 / step.grad_accum_steps)


def scale_applied_twice():
    return _loss_times(lambda step: step.scale_used)


@contextmanager
def stale_gather():
    """The other ranks' parts of one bucket never arrive."""
    right = ParamGather.updated

    def updated(self, bucket):
        shared = [one for one in self._buckets if one.owners.axis.size > 1]
        if bucket is not shared[0]:
            right(self, bucket)

    with mock.patch.object(ParamGather, "updated", updated):
        yield


@contextmanager
def unit_freed_early():
    """In backward a unit's weights go as soon as it begins to compute."""
    right = UnitGather.before_backward

    def before_backward(self, member, turn):
        right(self, member, turn)
        if not all(map(self._grads.has_gradient, member.param_names)):
            for bucket in self._unit_of[member].buckets:
                bucket.params.zero_()

    with mock.patch.object(UnitGather, "before_backward", before_backward):
        yield


@contextmanager
def stale_shards():
    """The gathered weights behind a step are the casts of the masters before it."""
    right = ShardedEngine.step
    before = {}

    def step(self):
        before.update((bucket, bucket.master.clone()) for bucket in self.buckets)
        return right(self)

    def cast_shown(self):
        self.param_shard.copy_(before.get(self, self.master))

    with mock.patch.object(ShardedEngine, "step", step), mock.patch.object(Bucket, "cast_shown", cast_shown):
        yield


@contextmanager
def gradients_freed_early():
    """The last rank's gradients are freed, and their memory taken, before they are sent."""
    right = GlooCollectives.reduce_scatter

    def reduce_scatter(self, grads, grad_shard, use):
        if dist.get_rank() == dist.get_world_size() - 1:
            grads.zero_()
        return right(self, grads, grad_shard, use)

    with mock.patch.object(GlooCollectives, "reduce_scatter", reduce_scatter):
        yield


@contextmanager
def average_moves_on_skipped():
    """The average of the weights moves in every step, skipped or not."""
    right = Bucket.move_average

    def wrong(self, share):
        right(self, torch.full_like(share, 0.1))

    with mock.patch.object(Bucket, "move_average", wrong):
        yield


@contextmanager
def average_of_halves():
    """The average is of the half weights."""
    right = Bucket.move_average

    def wrong(self, share):
        masters = self.master.clone()
        self.master.copy_(masters.to(self.params.dtype))
        right(self, share)
        self.master.copy_(masters)

    with mock.patch.object(Bucket, "move_average", wrong):
        yield


def tied_table_not_summed():
    """Each end of a pipeline trains its own copy of the table."""
    return mock.patch.object(build, "replace", lambda placement, owners: placement)


BUGS = {
    bug.__name__: bug
    for bug in (
        gradients_not_reduced,
        norm_counted_per_rank,
        norm_leaves_out,
        norm_counts_replicated,
        norm_of_one_rank,
        heads_of_one_rank,
        positions_of_one_rank,
        tables_in_half,
        table_moves_on_skipped,
        decay_on_all,
        frozen_moves,
        betas_of_the_first_group,
        momentum_one_update_early,
        decay_by_the_other_rule,
        recomputed_elsewhere,
        wrong_divisor,
        stale_gather,
        scale_applied_twice,
        unit_freed_early,
        stale_shards,
        gradients_freed_early,
        tied_table_not_summed,
        average_moves_on_skipped,
        average_of_halves,
    )
}


@contextmanager
def schedule_one_update_late():
    """Every update has the lr of the one before it."""
    right = engine_module.entry

    def late(lr_table, update):
        return right(lr_table, (update - 1).clamp(min=1))

    with mock.patch.object(engine_module, "entry", late):
        yield


@contextmanager
def documents_seen_across():
    """Attention crosses from one document into the next: the model is not told where they begin."""
    with mock.patch.object(Batch, "inputs", property(lambda batch: (batch.tokens, batch.targets, None, 0))):
        yield


def window_ignored():
    """The last rank's queries see all keys before them, by a window that is too long."""
    right = Ops.attention

    def wrong(self, query, key, value, documents=None, rule=SEES_ALL):
        last = dist.get_rank() == dist.get_world_size() - 1
        return right(self, query, key, value, documents, replace(rule, window=1000) if last and rule.window else rule)

    return mock.patch.object(Ops, "attention", wrong)


BUGS |= {bug.__name__: bug for bug in (schedule_one_update_late, documents_seen_across, window_ignored)}
BUGS |= MUON_BUGS | EXPERT_BUGS | FP8_BUGS
