"""How a step's micro-batches pass through the model: one after the other, or through a pipeline of stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.data.loader import Batch
from megamix.mixed_precision.engine import ShardedEngine


class MicroBatch(NamedTuple):
    batch: Batch
    seed: int | None = None  # of what its forward drops out


class Passes:
    """One after the other, on a rank that has the whole of the model or a part of every layer. The base of a pipeline's
    (pipeline_parallel.py).
    """

    def __init__(self, engine: ShardedEngine):
        self.engine = engine

    def backward(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Forward and backward of all micro-batches of a step; `engine.step()` comes next."""
        for batch, seed in micro_batches:
            if seed is not None:
                torch.manual_seed(seed)
            with self.engine.clock.span("forward_backward"):
                self.engine.backward(self.engine(*batch.inputs), batch.weight)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Forward of as many micro-batches as a step has: the sum of the losses that this rank knows and the sum of
        their weights, FP64 (2,).
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        for loss, weight in self._losses(batches):
            sums[0] += loss
            sums[1] += weight
        return sums

    def _losses(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, float]]:
        for batch in batches:
            yield self.engine(*batch.inputs), batch.weight
