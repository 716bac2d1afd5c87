"""This rank's part of global batches."""

from __future__ import annotations

from megamix.comm.topology import Topology
from megamix.data.loader import Batch, BatchLoader
from megamix.data.sampler import Samples, micro_batches


class RankBatches:
    """Cuts global batches into this rank's micro-batches, and reads those."""

    def __init__(self, loader: BatchLoader, topology: Topology, micro_batch_size: int):
        self._loader, self._topology, self._micro_batch_size = loader, topology, micro_batch_size

    def micro_batches(self, batch: Samples) -> list[Samples]:
        return micro_batches(
            batch,
            micro_batch_size=self._micro_batch_size,
            dp_rank=self._topology.dp.rank,
            dp_size=self._topology.dp.size,
        )

    def prefetch(self, batch: Samples) -> None:
        """Announce a global batch, so that it is read while another one is computed."""
        for samples in self.micro_batches(batch):
            for part in samples:
                self._loader.prefetch(part)

    def load(self, samples: Samples) -> Batch:
        """A micro-batch, on the device. Raises: whatever the source raises."""
        return self._loader.load(samples)
