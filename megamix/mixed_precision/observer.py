"""The base class of everything that looks into an engine's steps: `with engine.observe(observer):`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from megamix.comm.collectives import Pending
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.flat_layout import GroupSpan

# Values that an update uses: "gradient": the sum over ranks and micro-batches, loss scale included; "direction's
# input": the matrices that Muon makes orthogonal; "direction": the result, along which the masters of matrices move.
# The last two are zero outside of matrices.
Used = Literal["gradient", "direction's input", "direction"]
GRADIENT: Used = "gradient"
SOURCE: Used = "direction's input"
DIRECTION: Used = "direction"

TransferKind = Literal["reduce_scatter", "sum_across", "matrices", "all_gather"]


class StepObserver:
    """Sees the values that pass through a step; override the methods you need.

    A step may not wait for the device, so an observer may not either. An observer must copy what it keeps, because the
    buffers are overwritten.
    """

    def on_gradient(self, name: str, micro_batch: int, grad: Tensor) -> None:
        """Look at a parameter's gradient as backward returns it, before it is added to any other."""

    def on_transfer(self, kind: TransferKind, bucket: Bucket, pending: Pending) -> None:
        """Look at a transfer that has just been launched."""

    def on_use(self, what: Used, bucket: Bucket, values: Tensor) -> None:
        """Look at the values that the update uses of this rank's part of a bucket. Shapes: values (shard_numel,)."""

    def cut(self, bucket: Bucket, spans: Iterable[GroupSpan]) -> Iterable[GroupSpan]:
        """Yield the spans of a bucket's shard, whole or cut at rows. Each yielded span is updated before the next one
        is asked for; the bits do not depend on the cuts.
        """
        return spans
