"""What an engine holds and what each stage needs on top, in bytes, from the layout alone: before there is an engine.

The numbers are those of the stages' own buffers. A few scalars (counters, loss scale, learning rate of the step) are
left out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megamix import tuned
from megamix.mixed_precision.flat_layout import ROW, BucketPlan, FlatLayout
from megamix.mixed_precision.settings import Precision, Sharding
from megamix.mixed_precision.update_slice import UpdateGroup

_FP32 = 4
_FP64 = 8
_INT64 = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Holds the bytes of one rank: first what lives between steps, then what a stage has beside it while it runs."""

    held: dict[str, int]  # by category
    tables: int  # borders and places of the pieces, learning rates

    # What comes and goes.
    passing_params: list[int]  # half parameters while backward fills each bucket
    passing_grads: list[int]  # gradients then, with their sums and the scratch in which parts of these arrive
    left_params: int  # when backward has ended, and what compares them with the masters
    left_grads: int  # with their sum, where it is added to others
    accumulated: int  # of micro-batches before the last one: gradients, or their sums and scratch
    sums: int  # and scratch: there until a step ends

    fp32_bucket: int  # the values of the largest bucket, when full weights are asked for
    building: int  # while the engine is built, beside what it has by then
    reduce: int
    landing: int  # while the last bucket's sum ends
    statistics: int
    rows: int  # beside both
    update: int
    updated_params: list[int]  # of each bucket, beside that, while it is updated


def engine_memory(
    layout: FlatLayout, precision: Precision, sharding: Sharding, groups: Sequence[UpdateGroup], *,
    grad_accum_steps: int, num_updates: int, on_gpu: bool, compiled: bool, shards: Sequence[int] | None = None,
) -> EngineMemory:  # fmt: skip
    """Count for the rank with the most pieces: all ranks hold the same, but for the tables and for states that not all
    parameters have. Of these the most are counted, or those of a rank's own shards, by axis. `num_updates`: entries of
    the learning rate's table; `compiled`: the update is.
    """
    half, grad = precision.dtype.itemsize, precision.own_grad_dtype
    sum_dtype = precision.sum_dtype(max(bucket.num_shards for bucket in layout.buckets))
    shard_numels = [bucket.shard_numel for bucket in layout.buckets]
    owned, largest_shard = sum(shard_numels), max(shard_numels)
    arrivals = 0 if on_gpu and sum_dtype == grad else 1 + on_gpu
    scratch = [
        arrivals * grad.itemsize * _largest_by_owners(layout.buckets[:end]) for end in range(len(layout.buckets) + 1)
    ]
    rounds = arrivals and scratch[-1] and sum_dtype != torch.float32
    adds = sharding.accumulate == "owner" and grad_accum_steps > 1
    grad_of_update = torch.float32 if adds else sum_dtype
    by_torch = not compiled
    pieces = max(pieces_by_shard(layout))
    # In a few steps: of a piece the masters' casts, and two bytes an element for the bits that differ.
    compared = min(tuned.HASH_PIECE_GPU if on_gpu else tuned.HASH_PIECE, largest_shard) * (2 + half * (half < _FP32))
    by_group = [sum(dtype.itemsize for _, dtype in group.states) for group in groups]
    state_bytes = layout.state_bytes(by_group, shards)
    trial = 0 if by_torch else tuned.TRIAL * (half + grad_of_update.itemsize + _FP32 + max(by_group))
    piece = partial(tuned.piece, numel=largest_shard, on_gpu=on_gpu)
    grads_pass, params_pass = sharding.shard != "states", sharding.shard == "parameters"
    all_grads, totals = layout.padded_numel * grad.itemsize, adds * owned * _FP32
    # Those of several micro-batches stay until the last one, or their sums do, and what arrives for these.
    kept = all_grads if grads_pass and grad_accum_steps > 1 and not adds else 0
    root = sum(bucket.padded_numel for bucket in layout.buckets if bucket.unit == 0)
    sums = [
        grads_pass * bucket.shard_numel * precision.sum_dtype(bucket.num_shards).itemsize for bucket in layout.buckets
    ]
    # Of the largest: its weights, as they come with the casts of a rank's own, or its gradients.
    of_bucket = max(
        params_pass * half * (layout.largest_bucket + (half < _FP32) * largest_shard),
        grads_pass * grad.itemsize * layout.largest_bucket,
    )
    accumulated = kept + adds * (grads_pass * totals + scratch[-1])
    passing_grads = []
    for number, passing in enumerate(layout.passing_grads(grad.itemsize)):  # the bucket before it travels
        travels = max(0, number - 1)
        left = all_grads - grad.itemsize * sum(bucket.padded_numel for bucket in layout.buckets[:travels])
        summed = grads_pass * totals + sum(sums[travels:number]) if adds else sum(sums[:number])
        passing_grads.append(max(accumulated, (left if kept else grads_pass * passing) + summed + scratch[number]))
    reduce = _FP32 * min(tuned.SUM_PIECE, largest_shard) if rounds else 0
    # Of a piece: its squares, and its FP32 copy unless it is FP32.
    statistics = [
        by_torch * (1 if adds or precision.sum_dtype(bucket.num_shards) == torch.float32 else 2)
        * _FP32 * tuned.piece(tuned.STATS_PIECE, bucket.shard_numel, on_gpu=on_gpu)
        for bucket in layout.buckets
    ]  # fmt: skip
    # Of a piece: its gradient and its half states, in FP32.
    wide = 1 + max(sum(dtype != torch.float32 for _, dtype in group.states) for group in groups)
    return EngineMemory(
        held={
            "half parameters": 0 if params_pass else layout.padded_numel * half,
            "half gradients": 0 if grads_pass else all_grads,
            "FP32 sums of micro-batches": 0 if grads_pass else totals,
            "FP32 masters": owned * _FP32,
            "optimizer states": state_bytes,
        },
        tables=_INT64 * (pieces + len(layout.buckets)) + _FP32 * (pieces + num_updates),
        passing_params=layout.passing_params(params_pass * half),
        passing_grads=passing_grads,
        left_params=params_pass * (root * half + compared),
        left_grads=grads_pass * layout.buckets[-1].padded_numel * grad.itemsize + adds * sums[-1],
        accumulated=accumulated,
        sums=scratch[-1] + (grads_pass * totals or sum(sums)),
        fp32_bucket=_FP32 * layout.largest_bucket,
        building=max(trial, of_bucket),
        reduce=reduce,
        landing=max(reduce, statistics[-1] if precision.sum_dtype(layout.buckets[-1].num_shards) != grad else 0),
        statistics=max(*statistics, compared),
        rows=2 * _FP32 * owned // ROW + 2 * _FP64 * largest_shard // ROW,
        update=by_torch * wide * _FP32 * piece(tuned.UPDATE_PIECE),
        updated_params=[params_pass * half * bucket.padded_numel for bucket in layout.buckets],
    )


def _largest_by_owners(buckets: Sequence[BucketPlan]) -> int:
    """Return the elements of the largest bucket of each set of owners that exchanges anything, added up."""
    largest: dict[int, int] = {}
    for bucket in buckets:
        if bucket.num_shards > 1:
            largest[bucket.axis] = max(largest.get(bucket.axis, 0), bucket.padded_numel)
    return sum(largest.values())


def pieces_by_shard(layout: FlatLayout) -> list[int]:
    """Return how many parts of parameters the owners of the first, second, ... shards have: all that differs between
    the memory of ranks with equal layouts.
    """
    counts = [0] * max(bucket.num_shards for bucket in layout.buckets)
    for bucket in layout.buckets:
        starts = [slot.start for slot in bucket.slots]
        for shard in range(bucket.num_shards):
            first = bisect_right(starts, shard * bucket.shard_numel) - 1
            counts[shard] += bisect_left(starts, (shard + 1) * bucket.shard_numel) - first
    return counts
