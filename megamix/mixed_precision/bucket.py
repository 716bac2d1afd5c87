"""What the engine shows of a bucket: where its parameters lie, and this rank's share of the truth."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megamix.comm.collectives import Collectives
from megamix.mixed_precision.flat_layout import BucketPlan, Piece, Run
from megamix.mixed_precision.optimizers import States


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Neighbouring parameters in one flat buffer: the unit of one reduce-scatter, one update and one all-gather."""

    plan: BucketPlan
    owners: Collectives  # among the ranks that each own a shard of it
    spans: tuple[Run, ...]  # of this rank's shard, one for each optimizer group in it
    pieces: tuple[Piece, ...]  # the parts of parameters in this rank's shard
    named_params: dict[str, nn.Parameter]  # the module's own, views into `params`
    params: Tensor  # half (padded_numel,)
    param_shard: Tensor  # this rank's part of it, (shard_numel,)
    grads: Tensor  # gradient dtype (padded_numel,)
    grad_sum: Tensor  # what the update reads: (shard_numel,)
    master: Tensor  # FP32 (shard_numel,)
    states: list[States]  # of each span
