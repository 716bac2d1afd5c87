"""Reduce-scatter: each bucket's gradients go to their owners while backward still fills the next buckets."""

from __future__ import annotations

from torch import Tensor

from megamix.clock import Clock
from megamix.comm.collectives import Collectives, Pending


class GradReduce:
    """Launches the buckets' reductions strictly in bucket order 0, 1, 2, ...

    Ranks may fill equal buckets in different orders (one misses a parameter that another has). Collectives are
    matched by order of issue, so a bucket that is full before its predecessor waits for it.
    """

    def __init__(self, half_grads: list[Tensor], collectives: Collectives, overlap: bool, clock: Clock):
        self._half_grads, self._collectives, self._overlap, self._clock = half_grads, collectives, overlap, clock
        size, rank = collectives.topology.dp_size, collectives.topology.dp_rank
        # Views at this rank's place in the gradient buffers: the sum overwrites the rank's own part, no memory is
        # added.
        self.grad_shards = [flat.view(size, -1)[rank] for flat in half_grads]
        self._full = [False] * len(half_grads)
        self._pending: list[Pending] = []

    def bucket_full(self, bucket: int) -> None:
        """All gradients of `bucket` are in place on this rank (called from within backward)."""
        self._full[bucket] = True
        if self._overlap:
            while len(self._pending) < len(self._full) and self._full[len(self._pending)]:
                self._launch()

    def launch_rest(self) -> None:
        """Backward is over: launch what was not full, still in order."""
        while len(self._pending) < len(self._full):
            self._launch()
            if not self._overlap:
                with self._clock.span("exposed_reduce_scatter"):
                    self._pending[-1].wait()

    def wait(self, bucket: int) -> Tensor:
        """This rank's part of a bucket, summed over the ranks: gradient dtype (padded_numel / dp_size,)."""
        with self._clock.span("exposed_reduce_scatter"):
            self._pending[bucket].wait()
        return self.grad_shards[bucket]

    def reset(self) -> None:
        """The step has used all sums, or its backward has failed: expect the next step's.

        What a failed backward has launched is finished first: left alone, its sum would be written by a later wait,
        over the gradients of the next attempt.
        """
        for pending in self._pending:
            pending.wait()
        self._full = [False] * len(self._full)
        self._pending.clear()

    def _launch(self) -> None:
        bucket = len(self._pending)
        with self._clock.span(
            "exposed_reduce_scatter"
        ):  # a backend with one scratch buffer finishes the previous bucket first
            self._pending.append(self._collectives.reduce_scatter(self._half_grads[bucket], self.grad_shards[bucket]))
