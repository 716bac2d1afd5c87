"""Reduce-scatter: each bucket's gradients go to their owners while backward still fills the next buckets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.clock import Clock
from megamix.comm.collectives import Collectives, MakeCollectives, Pending
from megamix.comm.topology import Axis, num_on_machine
from megamix.mixed_precision import settings
from megamix.mixed_precision.flat_buffers import FlatBuffers
from megamix.mixed_precision.flat_layout import BucketPlan, FlatLayout
from megamix.mixed_precision.settings import Precision, Sharding

log = logging.getLogger("megamix")

_LOADED = 2.0  # times a ring's bytes


def connect_axes(
    axes: Sequence[Axis], precision: Precision, device: torch.device, make: MakeCollectives
) -> list[Collectives]:
    """Return the collectives of each axis of owners. The log says where these load the network between machines far
    more than the library's own would.
    """
    for axis in axes:
        exchanges = precision.sum_dtype(axis.size) != precision.own_grad_dtype
        # In an exchange each rank of a machine sends a part to each rank elsewhere; a ring's sum leaves it once.
        here, size = num_on_machine(axis), axis.size
        load = here * (size - here) / max(1, size - 1)
        if exchanges and device.type == "cuda" and load >= _LOADED and axis.ranks[axis.rank] == 0:
            log.warning(
                'reduce_dtype "half_fp32_sum" on %d machines: each sends about %.1f times the bytes that "half" would. '
                'If steps wait for reduce_scatter, write reduce_dtype = "half"',
                size // here, load,
            )  # fmt: skip
    return [make(axis, device) for axis in axes]


def require_equal_buckets(by_axis: Sequence[Collectives], device: torch.device, buckets: Sequence[BucketPlan]) -> None:
    """Raises: ValueError on every rank if owners of the same buckets have other ones, or in another order."""
    for number, own in enumerate(by_axis):
        settings.require_equal(own, device, [bucket for bucket in buckets if bucket.axis == number])


class Sums(NamedTuple):
    """Where gradients are summed: (shard_numel,) of each bucket. If gradients come and go, so do these: from their
    reduction to the end of the step.
    """

    over_ranks: FlatBuffers  # `sum_dtype`
    over_micro_batches: FlatBuffers  # FP32, of what the owner adds up; none where each rank adds, and sends them once

    @property
    def of_step(self) -> list[Tensor]:
        return self.over_micro_batches.flat or self.over_ranks.flat


def make_sums(
    half_grads: FlatBuffers, among: Sequence[Collectives], precision: Precision, sharding: Sharding, micro_batches: int
) -> Sums:
    sums, totals = type(half_grads)(), type(half_grads)()
    for bucket, (flat, own) in enumerate(zip(half_grads.flat, among, strict=True)):
        sums.add_sum(flat, own, precision.sum_dtype(own.axis.size))
        if sharding.accumulate == "owner" and micro_batches > 1:
            totals.add(sums.flat[bucket].numel(), torch.float32, flat.device)
            totals.free(bucket)
    return Sums(sums, totals)


class RowStats(NamedTuple):
    """How a machine takes the `row_stats` of a shard, FP32 (2, rows): in one read of it, or while it is summed."""

    of_shard: Callable[[Tensor], Tensor]
    # From the owners' half parts (ranks, shard_numel) and the FP32 shard (shard_numel,) that takes their sum in rank
    # order.
    of_sum: Callable[[Tensor, Tensor], Tensor]


class GradReduce:
    """Launches the buckets' reductions strictly in bucket order 0, 1, 2, ...

    Ranks may fill equal buckets in different orders (one misses a parameter that another has). Collectives are
    matched by order of issue, so a bucket that is full before its predecessor waits for it.
    """

    def __init__(
        self, layout: FlatLayout, half_grads: FlatBuffers, sums: Sums, row_stats: RowStats,
        collectives: Sequence[Collectives], overlap: bool, clock: Clock,
    ):  # fmt: skip
        self._buckets, self._half_grads, self._row_stats = layout.buckets, half_grads, row_stats
        self._sums, self._totals = sums
        self.grad_shards = sums.of_step  # until its `reset`
        self._is_first = True  # of the step's micro-batches
        self._collectives, self._overlap, self._clock = collectives, overlap, clock
        self._full = [False] * len(self.grad_shards)
        self._pending: list[Pending] = []
        self._rows: dict[int, Tensor] = {}  # statistics that were taken while their sum was made

    def launch(self, full: int | None = None) -> None:
        """Start the reduction of every bucket whose turn it is. `full`: a bucket whose gradients are all in place on
        this rank now, told from within backward; None: backward is over, so every bucket's are.
        """
        if full is None:
            self._full = [True] * len(self._full)
        else:
            self._full[full] = True
            if not self._overlap:
                return
        while len(self._pending) < len(self._full) and self._full[len(self._pending)]:
            bucket = len(self._pending)
            half_grads, own_sum = self._half_grads.flat[bucket], self._sums.flat[bucket]
            self._sums.take(bucket)
            # A backend whose scratch buffers are all in use finishes an earlier bucket first: that is waiting, too.
            with self._clock.span("exposed_reduce_scatter"):
                use = None if own_sum.dtype == half_grads.dtype else partial(self._sum, bucket)
                pending = self._collectives[bucket].reduce_scatter(half_grads, own_sum, use)
                pending.what = (
                    f"while the gradients of {self._buckets[bucket].name} were summed: every rank must call backward "
                    "as often, and end all of it or none"
                )
                self._clock.watch("reduce_scatter", bucket, pending)
                self._pending.append(Pending(then=partial(self._add, bucket, pending)) if self.takes_each else pending)
                if not self._overlap:
                    self.wait(bucket)
                elif bucket:
                    self._half_grads.free_behind(bucket - 1, self._pending[bucket - 1])

    def wait(self, bucket: int) -> Tensor:
        """Return this rank's part of a bucket, summed over ranks and micro-batches: as its `grad_shards`."""
        with self._clock.span("exposed_reduce_scatter"):
            self._pending[bucket].wait()
            self._half_grads.free(bucket)
        return self.grad_shards[bucket]

    def rows(self, bucket: int) -> Tensor:
        """Return the `row_stats` of a part that `wait` has given: FP32 (2, rows)."""
        rows = None if self.takes_each else self._rows.get(bucket)
        return self._row_stats.of_shard(self.grad_shards[bucket]) if rows is None else rows

    @property
    def takes_each(self) -> bool:
        """Whether every micro-batch's gradients are reduced by themselves."""
        return bool(self._totals.flat)

    def end_micro_batch(self, ends: bool) -> None:
        """Start what is left: backward is over. `ends`: the step, too; else the next micro-batch's buckets come."""
        self.launch()
        if not ends:
            self._land()
            self._is_first = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Free the step's sums behind whoever uses them, and if that fails, too: the next step would take them for its
        own.
        """
        try:
            yield
        finally:
            self.reset()

    def reset(self) -> None:
        """Expect the next step's buckets, and free the sums: the step has used them, or its backward has failed.

        What a failed backward has launched is finished first: left alone, its sum would be written by a later wait,
        over the gradients of the next attempt.
        """
        self._land()
        self._is_first = True
        self._rows.clear()
        for buffers in (self._sums, self._totals):
            for bucket in range(len(buffers.flat)):
                buffers.free(bucket)
        for among in {*self._collectives}:
            among.release()

    def _land(self) -> None:
        for pending in self._pending:
            pending.wait()
        for bucket in range(len(self._full)):
            self._half_grads.free(bucket)
        self._full = [False] * len(self._full)
        self._pending.clear()

    def _sum(self, bucket: int, parts: Tensor) -> None:
        self._rows[bucket] = self._row_stats.of_sum(parts, self._sums.flat[bucket])

    def _add(self, bucket: int, pending: Pending) -> None:
        pending.wait()
        total, own_sum = self._totals.flat[bucket], self._sums.flat[bucket]
        self._totals.take(bucket)
        _ = total.copy_(own_sum) if self._is_first else total.add_(own_sum)
        self._sums.free(bucket)
