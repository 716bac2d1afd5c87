"""Bytes that an engine holds and that each stage needs on top, added up from its buckets before any engine exists.

The numbers are those of the stages' own buffers. A few scalars (counters, loss scale, learning rate of the step) are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megamix.base import constants
from megamix.mixed_precision.bucket import BucketBytes
from megamix.mixed_precision.flat_layout import ROW, BucketPlan
from megamix.mixed_precision.settings import Precision
from megamix.mixed_precision.update_slice import UpdateGroup

FP32 = torch.float32.itemsize
AVERAGED = "FP32 average of the weights"
HELD = {  # field of BucketBytes by category
    "half parameters": "params",
    "half gradients": "grads",
    "FP32 sums of micro-batches": "total",
    "FP32 masters": "master",
    AVERAGED: "average",
    "optimizer states": "states",
}


class Filling(NamedTuple):
    """Bytes of temporary buffers while backward fills one bucket."""

    bucket: BucketPlan
    params: int  # half parameters of the root, of the unit that computes, and of the next unit in backward
    grads: int  # from a bucket's first gradient to its sum; the bucket before this one travels meanwhile
    waiting: int  # small gradients until this bucket is complete
    sums: int  # sums, with the scratch in which other ranks' parts arrive


class EngineMemory:
    """Bytes of one rank. All ranks hold the same, but for the tables and for states that not all parameters have."""

    def __init__(
        self, buckets: Sequence[BucketBytes], precision: Precision, groups: Sequence[UpdateGroup],
        grad_accum_steps: int, *, on_gpu: bool, compiled: bool,
    ):  # fmt: skip
        """Prepare the count. `compiled`: whether the update is compiled."""
        self.buckets = buckets
        self.passing = [bucket.temporary() for bucket in buckets]  # temporary buffers of each bucket
        self.largest_shard = max(bucket.plan.shard_numel for bucket in buckets)  # elements
        self.on_gpu = on_gpu
        self.compiled = compiled
        self._precision = precision
        self._groups = groups
        self._owner_adds = buckets[0].total > 0
        self._grads_stay = grad_accum_steps > 1 and not self._owner_adds  # until the last micro-batch; else sums stay
        self._sum_dtype = precision.sum_dtype(max(bucket.plan.num_shards for bucket in buckets))

    # Memory between steps.

    def held(self) -> dict[str, int]:
        """Return the bytes held between steps, by category."""
        both = [*zip(self.buckets, self.passing, strict=True)]
        return {name: sum(getattr(all, of) - getattr(now, of) for all, now in both) for name, of in HELD.items()}

    def tables(self, num_updates: int) -> int:
        """Return the bytes of the tables of the pieces' borders and places, and of a learning rate for each update.

        A rank that owned a piece of each parameter would have as many; others have some bytes less.
        """
        pieces = sum(len(bucket.plan.slots) for bucket in self.buckets)
        return torch.int64.itemsize * (pieces + len(self.buckets)) + FP32 * (pieces + num_updates)

    # Temporary memory.

    def fillings(self) -> list[Filling]:
        """Return the temporary bytes of each bucket, in the order in which backward fills the buckets."""
        units = {0: 0}
        for bucket in self.passing:
            units[bucket.plan.unit] = units.get(bucket.plan.unit, 0) + bucket.params
        order = [unit for unit in units if unit]
        found, computing = [], list[int]()
        for number, bucket in enumerate(self.passing):
            if bucket.plan.unit:
                first = order.index(bucket.plan.unit)
                computing = order[first : first + 2]
            params = sum(units[unit] for unit in (0, *computing))
            before = self.passing[:number]
            travelling = before[-1:]
            filled = [*travelling, *self.passing[number:]] if self._grads_stay else [*travelling, bucket]
            grads = sum(one.grads for one in filled)
            sums = self._scratch(self.buckets[:number]) + sum(one.total for one in self.passing)
            sums += sum(one.rank_sum for one in (travelling if self._owner_adds else before))
            numels = [slot.spec.numel for slot in bucket.plan.slots]
            waiting = self._precision.dtype.itemsize * sum(numel for numel in numels if numel < constants.SMALL_GRAD)
            found.append(Filling(bucket.plan, params, grads, waiting, sums))
        return found

    def accumulated(self) -> int:
        """Return the bytes that earlier micro-batches leave for the last one: gradients, or their sums and scratch."""
        if self._owner_adds:
            return sum(bucket.total for bucket in self.passing) + self._scratch(self.buckets)
        return sum(bucket.grads for bucket in self.passing) if self._grads_stay else 0

    def sums(self) -> int:
        """Return the bytes of sums and scratch, which last until a step ends."""
        return self._scratch(self.buckets) + sum(bucket.total or bucket.rank_sum for bucket in self.passing)

    # Memory of a stage, beside the above.

    def building(self) -> int:
        """Return the maximum while the engine is built, beside the bytes that it holds by then.

        It is the largest of three: a trial run of the compiled update; a bucket's weights with the casts of a rank's
        own masters; a bucket's gradients.
        """
        half = self._precision.dtype.itemsize
        grad = FP32 if self._owner_adds else self._sum_dtype.itemsize
        states = max(group.state_bytes for group in self._groups)
        trial = constants.TRIAL * (half + grad + FP32 + states) if self.compiled else 0
        weights = max(bucket.params for bucket in self.passing)
        casts = half * self.largest_shard if weights and half < FP32 else 0
        return max(trial, weights + casts, *(bucket.grads for bucket in self.passing))

    def reduce(self) -> int:
        """Return the bytes of the chunk in which a sum is in FP32 before it is rounded."""
        is_rounded = self._scratch(self.buckets) and self._sum_dtype != torch.float32
        return FP32 * min(constants.SUM_CHUNK, self.largest_shard) if is_rounded else 0

    def statistics(self) -> int:
        """Return the maximum while the last bucket's sum ends, and while sums are read.

        With temporary half parameters it includes their comparison with the masters.
        """
        last = self.passing[-1]
        of_root = [bucket for bucket in self.passing if bucket.plan.unit == 0]
        left = sum(bucket.params for bucket in of_root)
        if left:
            left += self._compared(max(bucket.plan.shard_numel for bucket in of_root))
        reads_while_it_sums = self._precision.sum_dtype(last.plan.num_shards) != self._precision.own_grad_dtype
        landing = max(left, self.reduce(), self._squares(last.plan) if reads_while_it_sums else 0)
        landing += last.grads + (last.rank_sum if self._owner_adds else 0)
        rows = (2 * FP32 * sum(bucket.plan.shard_numel for bucket in self.buckets)) // ROW
        rows += 2 * torch.float64.itemsize * self.largest_shard // ROW
        compared = 0 if last.params else self._compared(self.largest_shard)
        return self.sums() + rows + max(landing, compared, *(self._squares(bucket.plan) for bucket in self.buckets))

    def update(self) -> int:
        """Return the bytes of an update that is not compiled: FP32 copies of one chunk's gradient and half states."""
        if self.compiled:
            return 0
        halves = [sum(dtype != torch.float32 for _, dtype in group.states) for group in self._groups]
        return (
            (1 + max(halves)) * FP32 * constants.chunk(constants.UPDATE_CHUNK, self.largest_shard, on_gpu=self.on_gpu)
        )

    # Parts of the above.

    def _compared(self, shard_numel: int) -> int:
        """Return the bytes of a comparison of half parameters and masters, chunk by chunk.

        A chunk takes the masters' casts, and two bytes per element for the bits that differ.
        """
        half = self._precision.dtype.itemsize
        chunk = min(constants.HASH_CHUNK_GPU if self.on_gpu else constants.HASH_CHUNK, shard_numel)
        return chunk * (2 + (half if half < FP32 else 0))

    def _scratch(self, buckets: Sequence[BucketBytes]) -> int:
        """Return the bytes of the scratch in which parts of sums arrive.

        Each set of owners that exchanges anything takes as much as its largest bucket.
        """
        if self.on_gpu and self._sum_dtype == self._precision.own_grad_dtype:
            return 0
        largest = dict[int, int]()
        for bucket in buckets:
            if bucket.plan.num_shards > 1:
                largest[bucket.plan.axis] = max(largest.get(bucket.plan.axis, 0), bucket.grads)
        return (2 if self.on_gpu else 1) * sum(largest.values())

    def _squares(self, bucket: BucketPlan) -> int:
        """Return the bytes of statistics that are not compiled: one chunk's FP32 copy, which becomes its squares."""
        if self.compiled:
            return 0
        return FP32 * constants.chunk(constants.STATS_CHUNK, bucket.shard_numel, on_gpu=self.on_gpu)
