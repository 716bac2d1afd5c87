"""The passes of a step's micro-batches through the model, one after the other. A pipeline has passes of its own."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.data.loader import Batch
from megamix.mixed_precision.engine import ShardedEngine


class MicroBatch(NamedTuple):
    batch: Batch
    seed: int | None = None  # the seed of its forward's dropout


class MicroBatchRunner:
    """Runs micro-batches one after the other, on a rank that has the whole model or a part of every layer. It is the
    base class of `Pipeline` (pipeline_parallel.py).
    """

    def __init__(self, engine: ShardedEngine):
        self.engine = engine

    def forward_backward(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Run forward and backward of all micro-batches of a step. The caller then calls `engine.step()`."""
        for batch, seed in micro_batches:
            if seed is not None:
                torch.manual_seed(seed)
            with self.engine.clock.span("forward_backward"):
                self.engine.backward(self.engine(*batch.inputs), batch.weight)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Run forward on as many micro-batches as a step has. Return the sum of the losses that this rank knows, and
        the sum of their weights: FP64 (2,).
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        for loss, weight in self._losses(batches):
            sums[0] += loss
            sums[1] += weight
        return sums

    def _losses(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, float]]:
        for batch in batches:
            yield self.engine(*batch.inputs), batch.weight
