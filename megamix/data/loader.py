"""Batches as tensors. One thread reads them ahead, in the order in which the trainer announces them."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.data.deal import deal_chunks
from megamix.data.sampler import Ints, Samples
from megamix.data.source import NO_TOKEN, SampleSource

IGNORE = -100  # a target that no loss counts; torch's own value for it


class Batch(NamedTuple):
    """One batch. Each tensor has its own memory: if they were overlapping views, a write to one would change another.

    For a GPU they are in pinned memory of the host, so that `to(device)` does not wait.
    """

    tokens: Tensor  # int64 (samples, seq_len)
    targets: Tensor  # int64 (samples, seq_len): the token after each token, IGNORE where another document begins
    positions: Tensor | None  # int64 (samples, seq_len) in packed documents, 0 begins one; None: 0 .. seq_len - 1
    num_counted: int  # targets that are not IGNORE
    num_documents: int = 0  # documents that positions begin, at most; 0: not counted
    deal: Tensor | None = None  # int64 (samples, ranks, chunks): the chunks of each context-parallel rank, see deal.py

    @property
    def weight(self) -> float:
        """Return the share of targets that count, for `ShardedEngine.backward`."""
        return self.num_counted / self.targets.numel()

    @property
    def inputs(self) -> tuple[Tensor | int | None, ...]:
        """Return the arguments with which the model computes its loss. Positions and documents are among them only if
        the batch is packed, and the deal only if it is dealt: a plugin's family may not take them.
        """
        packed = () if self.positions is None else (self.positions, self.num_documents)
        dealt = () if self.deal is None else (self.deal,)
        return self.tokens, self.targets, *packed, *dealt

    def to(self, device: torch.device) -> "Batch":
        return Batch._make(x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in self)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return batches of one source as one batch."""
    if len(batches) == 1:
        return batches[0]
    tokens, targets, positions, counted, documents, deals = zip(*batches, strict=True)
    packed, dealt = (None if some[0] is None else torch.cat(some) for some in (positions, deals))
    return Batch(torch.cat(tokens), torch.cat(targets), packed, sum(counted), sum(documents), dealt)


class BatchLoader:
    """Reads batches of a source. `prefetch` announces the batches for which `get` will ask.

    Only the caller decides the order, by sample numbers: `get` works for any range, announced or not, and its result
    depends on the range alone. At most `max_ready` announced batches are read before they are asked for. The `get` that
    asks for a batch raises the exception that the reading thread met. One thread must make all calls, and call `close`
    last: otherwise Python's exit waits for the reads. `num_dealt`: the ranks to which packed sequences are dealt, if
    there are several.
    """

    def __init__(self, source: SampleSource, device: torch.device, *, max_ready: int = 4, num_dealt: int = 1) -> None:
        self._source, self._device, self._max_ready, self._num_dealt = source, device, max_ready, num_dealt
        # Each thread has its own current device: without this line, pinning would open a context on GPU 0.
        begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "megamix-loader", begin)
        self._reads = dict[range, Future[Batch] | None]()  # announced batches, in order; None: not begun

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def prefetch(self, samples: range) -> None:
        """Announce a batch, and return at once. Announcing a batch a second time changes nothing."""
        self._reads.setdefault(samples)
        self._read_ahead()

    def forget(self) -> None:
        """Drop all announced batches: the next ones have other ranges."""
        self._reads.clear()

    def get(self, samples: range) -> Batch:
        """Return the batch of these samples. Raises: any error of the source."""
        read = self._reads.pop(samples, None)
        self._read_ahead()
        # One that is not begun is read here: it may be announced behind batches that nobody fetches.
        return self._read(samples) if read is None or read.cancel() else read.result()

    def load(self, samples: Samples) -> Batch:
        """Return the batch of several ranges, on the device. Raises: any error of the source."""
        return joined([self.get(part) for part in samples]).to(self._device)

    def close(self) -> None:
        """End the thread and drop the batches that it has read. A second call does nothing."""
        self._thread.shutdown(cancel_futures=True)
        self._reads.clear()

    def _read_ahead(self) -> None:
        for samples in [*self._reads][: self._max_ready]:
            self._reads[samples] = self._reads[samples] or self._thread.submit(self._read, samples)

    def _read(self, samples: range) -> Batch:
        rows = self._source.read(samples)
        tokens, targets = self._tensor(rows.tokens[:, :-1]), self._tensor(rows.tokens[:, 1:])
        if rows.positions is None:
            return Batch(tokens, targets, None, targets.numel())
        begins = rows.positions[:, 1:] == 0
        ignored = begins | (rows.tokens[:, 1:] == NO_TOKEN)
        targets[torch.from_numpy(ignored)] = IGNORE
        tokens.clamp_(min=0)
        positions, num_counted = self._tensor(rows.positions[:, :-1]), ignored.size - int(ignored.sum())
        # Documents are counted on the host: to count them on a GPU the host would have to wait for it.
        dealt = self._tensor(deal_chunks(rows.positions[:, :-1], self._num_dealt)) if self._num_dealt > 1 else None
        return Batch(tokens, targets, positions, num_counted, len(begins) + int(begins[:, :-1].sum()), dealt)

    def _tensor(self, values: Ints) -> Tensor:
        out = torch.empty(values.shape, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return out.copy_(torch.from_numpy(values))
