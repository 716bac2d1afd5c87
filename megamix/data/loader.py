"""Batches as tensors, read ahead by one thread in the order that the trainer asks for."""

import threading
from collections import deque
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.data.source import SampleSource


class Batch(NamedTuple):
    """Two tensors of their own memory: as overlapping views a write to one would change the other.

    On the host; pinned when the device is a GPU, so that `.to(device, non_blocking=True)` does not wait.
    """

    tokens: Tensor  # int64 (samples, seq_len)
    targets: Tensor  # int64 (samples, seq_len): the token after each token


class BatchLoader:
    """Reads batches of a source; `prefetch` announces what `get` will ask for.

    The caller alone decides the order, by sample numbers: `get` works for any range, announced or not, and what it
    returns depends on the range only. At most `max_ready` announced batches wait in memory. An exception of the
    reading thread is raised by the `get` that asks for its batch.
    """

    def __init__(self, source: SampleSource, device: torch.device, *, max_ready: int = 4) -> None:
        self._source = source
        self._device = device
        self._max_ready = max_ready
        self._changed = threading.Condition()  # guards everything below
        self._announced: deque[range] = deque()
        self._reading: range | None = None
        self._ready: dict[range, Batch | BaseException] = {}
        self._closed = False
        # A daemon: a trainer that dies without close() must not leave a process that never ends.
        self._thread = threading.Thread(target=self._read_ahead, name="megamix-loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prefetch(self, samples: range) -> None:
        """Announce a batch. Returns at once; announcing one that is announced already changes nothing."""
        assert samples.step == 1, samples
        with self._changed:
            assert not self._closed, "prefetch after close"
            if samples not in self._announced and samples != self._reading and samples not in self._ready:
                self._announced.append(samples)
                self._changed.notify_all()

    def get(self, samples: range) -> Batch:
        """The batch of these samples. Raises: whatever the source raises."""
        assert samples.step == 1, samples
        with self._changed:
            assert not self._closed, "get after close"
            if samples in self._announced:
                # Not begun: it may stand behind batches that nobody has fetched yet, and would never be read.
                self._announced.remove(samples)
            self._changed.wait_for(lambda: samples != self._reading)
            result = self._ready.pop(samples, None)
            self._changed.notify_all()
        if isinstance(result, BaseException):
            raise result
        return result if result is not None else self._read(samples)

    def close(self) -> None:
        """End the thread and drop what it has read; may be called twice."""
        with self._changed:
            self._closed = True
            self._announced.clear()
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def _read(self, samples: range) -> Batch:
        rows = torch.from_numpy(self._source.read(samples))  # int64 (samples, seq_len + 1)
        shape = (rows.shape[0], rows.shape[1] - 1)
        pinned = self._device.type == "cuda"
        batch = Batch(*(torch.empty(shape, dtype=torch.int64, pin_memory=pinned) for _ in Batch._fields))
        batch.tokens.copy_(rows[:, :-1])
        batch.targets.copy_(rows[:, 1:])
        return batch

    def _read_ahead(self) -> None:
        if self._device.type == "cuda":
            # The current device belongs to the thread: without this, pinning would open a context on GPU 0.
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (bool(self._announced) and len(self._ready) < self._max_ready)
                )
                if self._closed:
                    return
                samples = self._reading = self._announced.popleft()
            result: Batch | BaseException
            try:
                result = self._read(samples)
            except BaseException as error:  # to be raised where someone can act on it
                result = error
            with self._changed:
                self._reading = None
                self._ready[samples] = result
                self._changed.notify_all()
