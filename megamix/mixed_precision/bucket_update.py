"""The update, bucket by bucket: this rank's part of each, span by span."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from megamix.clock import Clock
from megamix.mixed_precision.flat_layout import GroupSpan
from megamix.mixed_precision.observer import GRADIENT, StepObserver
from megamix.mixed_precision.update_slice import Kernel, StepScalars

if TYPE_CHECKING:
    from megamix.mixed_precision.bucket import Bucket


class BucketUpdate:
    """Moves each element by itself. An optimizer that takes more at once has one of its own."""

    def __init__(self, kernel: Kernel, clock: Clock, observers: Sequence[StepObserver]):
        self._kernel = kernel
        self._clock = clock
        self._observers = observers

    def in_turn(self, buckets: Iterable[Bucket], step: StepScalars) -> Iterator[Bucket]:
        """Update this rank's part of the buckets; yield each one, in this order, when it is done."""
        for bucket in buckets:
            self._begin(bucket)
            with self._clock.span("update"):
                for span in self._cut(bucket, bucket.spans):
                    self._kernel(bucket.slice(span), step)
            yield bucket

    def _begin(self, bucket: Bucket) -> None:
        bucket.take_params()
        for observer in self._observers:
            observer.on_use(GRADIENT, bucket, bucket.grad_sum)

    def _cut(self, bucket: Bucket, spans: Iterable[GroupSpan]) -> Iterable[GroupSpan]:
        for observer in self._observers:
            spans = observer.cut(bucket, spans)
        return spans
