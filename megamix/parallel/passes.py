"""How a step's micro-batches pass through the model: one after the other, or through a pipeline of stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megamix.data.loader import Batch
from megamix.mixed_precision.engine import ShardedEngine


class MicroBatch(NamedTuple):
    batch: Batch
    seed: int | None = None  # of what its forward drops out


class Passes(Protocol):
    engine: ShardedEngine

    def backward(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Forward and backward of all micro-batches of a step; `engine.step()` comes next."""

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Forward of as many micro-batches as a step has: the sum of the losses that this rank knows and the sum of
        their weights, FP64 (2,).
        """


class OneByOne:
    """This rank has the whole of the model, or a part of every layer."""

    def __init__(self, engine: ShardedEngine):
        self.engine = engine

    def backward(self, micro_batches: Iterable[MicroBatch]) -> None:
        for batch, seed in micro_batches:
            if seed is not None:
                torch.manual_seed(seed)
            with self.engine.clock.span("forward_backward"):
                self.engine.backward(self.engine(*batch.inputs), batch.weight)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        sums = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        for batch in batches:
            sums[0] += self.engine(*batch.inputs)
            sums[1] += batch.weight
        return sums
