"""What an engine holds and what each stage needs on top, in bytes, from the layout alone: before there is an engine.

Here and not where memory is planned, for the numbers are those of the stages' own buffers. A few scalars (counters,
loss scale, learning rate of the step) are left out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch

from megamix import tuned
from megamix.mixed_precision.flat_layout import ROW, FlatLayout

_FP32 = 4
_FP64 = 8
_INT64 = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What decides an engine's memory beside its layout."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    sum_dtype: torch.dtype  # of buckets with several owners
    num_states: int
    num_updates: int  # entries of the learning rate's table
    on_gpu: bool
    compiled: bool  # the update


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Holds the bytes of one rank: first what lives between steps, then what a stage has beside it while it runs."""

    half_params: int
    half_grads: int
    master: int
    optimizer_states: int
    exchange: int  # where the other ranks' parts of a bucket arrive
    tables: int  # borders of the pieces, learning rates

    # When the engine is built: masters and states, the half parameters that are there by then, those of the model's own
    # FP32 weights that have not gone yet, and one bucket's values in FP32.
    filling: int
    fp32_bucket: int  # the values of the largest bucket, when full weights are asked for
    trial: int  # of the compiler, when the engine is built
    reduce: int
    statistics: int
    update: int


def engine_memory(layout: FlatLayout, facts: EngineFacts) -> EngineMemory:
    """Count for the rank with the most pieces: all ranks hold the same, but for the tables."""
    half, grad = facts.dtype.itemsize, facts.grad_dtype.itemsize
    shard_numels = [bucket.shard_numel for bucket in layout.buckets]
    owned, largest_shard = sum(shard_numels), max(shard_numels)
    # A scratch buffer for each set of owners that exchanges anything, as large as its largest bucket.
    scratch: dict[int, int] = {}
    if not facts.on_gpu or facts.sum_dtype != facts.grad_dtype:
        for bucket in layout.buckets:
            if bucket.num_shards > 1:
                scratch[bucket.axis] = max(scratch.get(bucket.axis, 0), bucket.padded_numel)
    rounds = scratch and facts.sum_dtype != torch.float32
    by_torch, copies = not facts.compiled, 1 if facts.sum_dtype == torch.float32 else 2
    borders = max(pieces_by_shard(layout)) + len(layout.buckets)
    rows = 2 * _FP32 * owned // ROW + 2 * _FP64 * largest_shard // ROW
    trial = tuned.TRIAL * (half + facts.sum_dtype.itemsize + _FP32 * (1 + facts.num_states))
    return EngineMemory(
        half_params=layout.padded_numel * half,
        half_grads=layout.padded_numel * grad,
        master=owned * _FP32,
        optimizer_states=owned * _FP32 * facts.num_states,
        exchange=sum(scratch.values()) * grad,
        tables=_INT64 * borders + _FP32 * facts.num_updates,
        filling=owned * _FP32 * (1 + facts.num_states) + _filling(layout, facts.dtype),
        fp32_bucket=_FP32 * layout.largest_bucket,
        trial=0 if by_torch else trial,
        reduce=_FP32 * min(tuned.SUM_PIECE, largest_shard) if rounds else 0,
        # Of a chunk: its squares, and its FP32 copy unless it is FP32.
        statistics=rows + by_torch * copies * _FP32 * min(tuned.STATS_PIECE, largest_shard),
        update=by_torch * _FP32 * min(tuned.UPDATE_PIECE, largest_shard),
    )


def _filling(layout: FlatLayout, dtype: torch.dtype) -> int:
    waiting = _FP32 * sum(slot.spec.numel for bucket in layout.buckets for slot in bucket.slots)
    most = filled = 0
    for bucket in layout.buckets:
        # FP32 parameters take the bucket's values over as they are.
        half = bucket.padded_numel * (dtype.itemsize if dtype != torch.float32 else 0)
        most = max(most, filled + waiting + _FP32 * bucket.padded_numel + half)
        filled += bucket.padded_numel * dtype.itemsize
        waiting -= _FP32 * sum(slot.spec.numel for slot in bucket.slots)
    return most


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
