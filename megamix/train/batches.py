"""This rank's part of global batches, for training and for evaluation."""

from collections.abc import Callable, Mapping

import torch

from megamix.comm.topology import Topology
from megamix.data.loader import BatchLoader
from megamix.data.sampler import Samples, micro_batches
from megamix.parallel.micro_batch_runner import MicroBatchRunner


class RankBatches:
    """This rank's micro-batches of global batches, and the loader that reads them."""

    def __init__(self, loader: BatchLoader, topology: Topology, micro_batch_size: int):
        self.loader, self._readers, self._micro_batch_size = loader, topology.data, micro_batch_size

    def micro_batches(self, batch: Samples) -> list[Samples]:
        size, readers = self._micro_batch_size, self._readers
        return micro_batches(batch, micro_batch_size=size, dp_rank=readers.rank, dp_size=readers.size)

    def count(self, global_batch_size: int) -> int:
        """Return the number of this rank's micro-batches of a global batch."""
        return len(self.micro_batches((range(global_batch_size),)))

    def prefetch(self, batch: Samples) -> None:
        """Announce a global batch, so that it is read while another batch is computed."""
        for samples in self.micro_batches(batch):
            for part in samples:
                self.loader.prefetch(part)


class Validation:
    """Computes the validation losses, over the same batches at every call. Every rank has such an object."""

    def __init__(self, runner: MicroBatchRunner, sets: Mapping[str, RankBatches], global_batch_size: int, count: int):
        """Take the batches of the sets by name; "" names a set alone. `count`: global batches of one validation."""
        self._runner, self._sets, size = runner, sets, global_batch_size
        self._batches = [(range(first, first + size),) for first in range(0, count * size, size)]

    def losses(self, before_each: Callable[[], None]) -> dict[str, float]:
        """Return each set's mean loss over its batches and all ranks (nats per token), computed in the dtype of
        training. Under "" is the mean over all targets of all sets.

        Every rank must call it.
        `before_each`: called before each batch; an exception from it ends the validation.
        """
        engine, batches = self._runner.engine, self._batches
        engine.module.eval()
        # a row for each set: sum of losses, sum of their weights
        sums = torch.zeros(len(self._sets), 2, dtype=torch.float64, device=engine.device)
        for row, mine in zip(sums, self._sets.values(), strict=True):
            mine.prefetch(batches[0])
            for number, batch in enumerate(batches, start=1):
                before_each()
                if number < len(batches):
                    mine.prefetch(batches[number])
                with engine.clock.span("validation"):
                    row += self._runner.evaluate(map(mine.loader.load, mine.micro_batches(batch)))
        engine.module.train()
        sums = engine.world.table(sums.flatten()).sum(0).view_as(sums)
        means = {"": sums.sum(0), **dict(zip(self._sets, sums, strict=True))}
        return {name: float(loss / weight) for name, (loss, weight) in means.items()}  # NaN without any weight
