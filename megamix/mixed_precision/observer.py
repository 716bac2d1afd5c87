"""How anybody looks into an engine's steps: `with engine.observe(observer):`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from megamix.comm.collectives import Pending
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.flat_layout import GroupSpan

# An update uses of a bucket: the sum over ranks and micro-batches, with the loss scale in it; what Muon makes
# orthogonal, and by what the masters of matrices move then, both with zeros where no matrix is.
Used = Literal["gradient", "direction's input", "direction"]
GRADIENT: Used = "gradient"
SOURCE: Used = "direction's input"
DIRECTION: Used = "direction"

TransferKind = Literal["reduce_scatter", "matrices", "all_gather"]


class StepObserver:
    """Sees what passes through a step; override what is wanted. A step may not wait for the device, so neither may an
    observer; what it keeps it copies, for buffers are written again.
    """

    def on_gradient(self, name: str, micro_batch: int, grad: Tensor) -> None:
        """See a parameter's gradient as backward gives it, before it is added to any other."""

    def on_transfer(self, kind: TransferKind, bucket: Bucket, pending: Pending) -> None:
        """See a transfer that has just been launched."""

    def on_use(self, what: Used, bucket: Bucket, values: Tensor) -> None:
        """See what the update uses of this rank's part of a bucket. Shapes: values (shard_numel,)."""

    def cut(self, bucket: Bucket, spans: Iterable[GroupSpan]) -> Iterable[GroupSpan]:
        """Yield the spans of a bucket's shard, whole or in smaller ones cut at rows: each is updated while it is out,
        with the same bits however it is cut.
        """
        return spans
