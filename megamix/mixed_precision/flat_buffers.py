"""The memory of flat buffers: there from beginning to end, or taken and freed as a step comes to need it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives, Pending

log = logging.getLogger("megamix")


class FlatBuffers:
    """Buffers that keep their memory. `flat[k]`: (padded_numel,) of bucket k.

    The base of `PassingBuffers`: whoever fills and empties them calls the same of both.
    """

    def __init__(self) -> None:
        self.flat: list[Tensor] = []

    def add(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer of the next bucket, which has memory until it is freed: zeros (numel,)."""
        self.flat.append(torch.zeros(numel, dtype=dtype, device=device))
        return self.flat[-1]

    def add_sum(self, flat: Tensor, among: Collectives, dtype: torch.dtype) -> None:
        """Add where the sum of a bucket's `flat` over its owners may lie, `dtype` (shard_numel,): in the bucket itself,
        so that no memory is added.

        A sum in the bucket's own dtype overwrites the rank's part. An FP32 sum of halves takes the start of the bucket,
        all of which has been sent by then: 4 bytes for each element of a share of a bucket with 2 bytes an element, so
        it has at least 2 owners.
        """
        part = flat.numel() // among.axis.size
        self.flat.append(among.own_part(flat) if dtype == flat.dtype else flat.view(dtype)[:part])

    def take(self, bucket: int) -> None:
        """Let a bucket have memory. What it holds already stays; fresh memory holds anything."""

    def free(self, bucket: int) -> None:
        """Give the memory of a bucket back, if it goes at all."""

    def free_behind(self, bucket: int, pending: Pending) -> None:
        """Give it back once what was begun with it has ended."""


class PassingBuffers(FlatBuffers):
    """Buffers whose memory comes with `take` and goes with `free`.

    The storage is resized, so that tensors, their views and whatever holds these stay as they are. Between `free` and
    `take` nothing may read them, for torch would read from address 0, nor make new views of them. Memory that NumPy or
    another process has a view of cannot go: it stays, as that of `FlatBuffers`, and the log says so once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shared: set[int] = set()

    def add_sum(self, flat: Tensor, among: Collectives, dtype: torch.dtype) -> None:
        self.add(flat.numel() // among.axis.size, dtype, flat.device)
        self.free(len(self.flat) - 1)

    def take(self, bucket: int) -> None:
        flat, storage = self.flat[bucket], self.flat[bucket].untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(flat.nbytes)

    def free(self, bucket: int) -> None:
        storage = self.flat[bucket].untyped_storage()
        if storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared()):
            storage.resize_(0)
        elif bucket not in self._shared:
            self._shared.add(bucket)
            log.warning(
                "%.1f MB of parameters stay in memory: a NumPy array or another process shares them. Inside "
                "engine.whole_parameters() take a copy, as tensor.clone().numpy()",
                storage.nbytes() / 1e6,
            )

    def free_behind(self, bucket: int, pending: Pending) -> None:
        pending.wait()
        self.free(bucket)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes behind these tensors, what several share once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
