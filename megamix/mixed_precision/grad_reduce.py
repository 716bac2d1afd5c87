"""Reduce-scatter: each bucket's gradients go to their owners while backward still fills the next buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megamix.clock import Clock
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.observer import StepObserver
from megamix.mixed_precision.row_stats import RowStats


class GradReduce:
    """Launches the buckets' sums strictly in the order of the buckets.

    Ranks may fill equal buckets in different orders (one misses a parameter that another has). Collectives are
    matched by order of issue, so a bucket that is full before its predecessor waits for it.
    """

    def __init__(
        self, buckets: Sequence[Bucket], row_stats: RowStats, overlap: bool, clock: Clock,
        observers: Sequence[StepObserver],
    ):  # fmt: skip
        self._buckets = buckets
        self._row_stats = row_stats
        self._overlap = overlap
        self._clock = clock
        self._observers = observers
        self._queue = deque(buckets)  # those whose sum is not launched yet
        self._travelling: Bucket | None = None  # the last one whose was

    @property
    def takes_each(self) -> bool:
        """Whether every micro-batch's gradients are reduced by themselves."""
        return self._buckets[0].total is not None

    def launch(self, *, all_are_full: bool = False) -> None:
        """Start the sum of every bucket whose turn it is: from within backward of those that are full, behind it of all
        that are left.
        """
        while self._queue and (all_are_full or (self._overlap and self._queue[0].missing == 0)):
            bucket = self._queue.popleft()
            # A backend whose scratch buffers are all in use finishes an earlier bucket first: that is waiting, too.
            with self._clock.span("exposed_reduce_scatter"):
                pending = bucket.launch_sum(self._row_stats)
                for observer in self._observers:
                    observer.on_transfer("reduce_scatter", bucket, pending)
                if not self._overlap:
                    self.wait(bucket)
                elif self._travelling is not None and bucket.storage.grads_pass:
                    self._travelling.wait_for_sum()  # two have memory at a time
            self._travelling = bucket

    def wait(self, bucket: Bucket) -> None:
        """Return once a bucket's `grad_sum` is the sum over ranks and micro-batches, on this rank's part."""
        with self._clock.span("exposed_reduce_scatter"):
            bucket.wait_for_sum()

    @contextmanager
    def freed_after(self) -> Iterator[None]:
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
        self.expect_sums()
        for bucket in self._buckets:
            bucket.discard_sum()
        for owners in {bucket.owners for bucket in self._buckets}:
            owners.release()

    def expect_sums(self) -> None:
        """Let the next micro-batch's buckets come: what was begun ends."""
        for bucket in self._buckets:
            bucket.expect_sum()
        self._queue = deque(self._buckets)
        self._travelling = None
