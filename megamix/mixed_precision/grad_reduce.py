"""Reduce-scatter: each bucket's gradients go to their owners while backward still fills the next buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megamix import tuned
from megamix.clock import Clock
from megamix.comm.collectives import Collectives, MakeCollectives, Pending, sum_in_rank_order
from megamix.comm.topology import Axis
from megamix.mixed_precision.flat_layout import FlatLayout
from megamix.mixed_precision.settings import Precision


def connect_axes(
    layout: FlatLayout, axes: Sequence[Axis], precision: Precision, device: torch.device, make: MakeCollectives
) -> list[Collectives]:
    """Return the collectives of each axis of owners, with scratch for the largest of its buckets."""
    found = []
    for number, axis in enumerate(axes):
        largest = max((bucket.padded_numel for bucket in layout.buckets if bucket.axis == number), default=0)
        exchanges = precision.sum_dtype(axis.size) != precision.own_grad_dtype
        found.append(make(axis, largest, precision.own_grad_dtype, device, exchanges=exchanges))
    return found


def make_grad_shards(
    half_grads: Sequence[Tensor], collectives: Sequence[Collectives], precision: Precision
) -> list[Tensor]:
    """Return where each bucket's sum over its owners will lie: views into the gradient buffers, no memory is added.

    A sum in the gradients' own dtype overwrites the rank's part of its bucket. An FP32 sum of half gradients takes the
    start of the bucket, all of which has been sent by then: 4 bytes for each element of a share of a bucket with 2
    bytes an element, so it has at least 2 owners.
    Shapes: half_grads (padded_numel,) -> `sum_dtype` (shard_numel,).
    """
    shards = []
    for flat, among in zip(half_grads, collectives, strict=True):
        sum_dtype, start = precision.sum_dtype(among.axis.size), flat.numel() // among.axis.size
        shards.append(among.own_part(flat) if sum_dtype == flat.dtype else flat.view(sum_dtype)[:start])
    return shards


class GradReduce:
    """Launches the buckets' reductions strictly in bucket order 0, 1, 2, ...

    Ranks may fill equal buckets in different orders (one misses a parameter that another has). Collectives are
    matched by order of issue, so a bucket that is full before its predecessor waits for it.
    """

    def __init__(
        self, half_grads: list[Tensor], grad_shards: list[Tensor], row_stats: Callable[[Tensor], Tensor],
        collectives: Sequence[Collectives], overlap: bool, clock: Clock,
    ):  # fmt: skip
        self._half_grads, self.grad_shards, self._row_stats = half_grads, grad_shards, row_stats
        self._collectives, self._overlap, self._clock = collectives, overlap, clock
        self._full = [False] * len(half_grads)
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
            half_grads, grad_shard = self._half_grads[bucket], self.grad_shards[bucket]
            # A backend with one scratch buffer finishes the previous bucket first: that is waiting, too.
            with self._clock.span("exposed_reduce_scatter"):
                use = None if grad_shard.dtype == half_grads.dtype else partial(self._sum, bucket)
                self._pending.append(self._collectives[bucket].reduce_scatter(half_grads, grad_shard, use))
                self._clock.watch("reduce_scatter", bucket, self._pending[-1])
                if not self._overlap:
                    self._pending[-1].wait()

    def wait(self, bucket: int) -> Tensor:
        """Return this rank's part of a bucket, summed over the ranks: `sum_dtype` (shard_numel,)."""
        with self._clock.span("exposed_reduce_scatter"):
            self._pending[bucket].wait()
        return self.grad_shards[bucket]

    def rows(self, bucket: int) -> Tensor:
        """Return the `row_stats` of a part that `wait` has given: FP32 (2, rows)."""
        rows = self._rows.get(bucket)
        return self._row_stats(self.grad_shards[bucket]) if rows is None else rows

    def reset(self) -> None:
        """Expect the next step's buckets: the step has used all sums, or its backward has failed.

        What a failed backward has launched is finished first: left alone, its sum would be written by a later wait,
        over the gradients of the next attempt.
        """
        for pending in self._pending:
            pending.wait()
        self._full = [False] * len(self._full)
        self._pending.clear()
        self._rows.clear()

    def _sum(self, bucket: int, parts: Tensor) -> None:
        """Sum half parts into the FP32 shard, and take the statistics of each piece while it is in cache, instead of in
        a pass of their own.
        """
        grad_shard = self.grad_shards[bucket]
        size = tuned.piece(tuned.SUMMED_PIECE, grad_shard.numel(), on_gpu=not grad_shard.is_cpu)
        rows = []
        for piece, piece_parts in zip(torch.split(grad_shard, size), torch.split(parts, size, dim=1), strict=True):
            sum_in_rank_order(piece_parts, piece)
            rows.append(self._row_stats(piece))
        self._rows[bucket] = torch.cat(rows, dim=1)
