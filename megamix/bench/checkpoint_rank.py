"""One rank of the checkpoint bench: saves and loads its engine's state, and moves the same bytes plainly."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.bench.engines import Ours, Work
from megamix.bench.train_rank import Side, TrainRank
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import Saver
from megamix.checkpoint.together import Together
from megamix.durable import sync_file

_CHUNK = 1 << 22  # bytes, of a plain read
_KEPT = 2  # checkpoints, and files that were plainly written


class Beside(NamedTuple):
    """Steps beside a save, on one rank: seconds."""

    step: float  # without a save
    copy: float  # of the state, from memory to memory
    start: float  # what training waits for; a copy is in it
    steps: float  # all that are taken while the save may be under way


class CheckpointRank(TrainRank):
    """A rank that trains, and saves its state below `folder`, which all ranks share."""

    def __init__(self, work: Work, folder: Path):
        super().__init__(Side("ours", Ours), work)
        ours = self._built()
        assert isinstance(ours, Ours)
        self._ours = ours
        self._folder, self._checkpoints = folder, folder / "checkpoints"
        self._written: list[Path] = []
        self._together = Together.apart(ours.engine.topology.world, timeout_s=600.0)
        self._saver = Saver(self._checkpoints, _KEPT, self._together, saved=lambda path: None, failed=_fail)
        self.losses(1)  # so that no state is zeros
        self._state = [flat for owned in ours.engine.owned_ranges() for flat in owned.tensors]
        self._copies = [torch.empty_like(flat) for flat in self._state]

    def save(self) -> float:
        """What goes on beside training afterwards, the removal of an old checkpoint, is not timed, as below."""
        self._free_pages()
        seconds = self._seconds_together(lambda: self._saver.save(self._ours.engine, RunRecord()))
        self._saver.finish()
        return seconds

    def write(self) -> float:
        """The state's bytes into a file; the oldest goes afterwards, which is not timed."""
        path = self._folder / f"plain_{self._rank}_{time.monotonic_ns()}"
        self._free_pages()
        seconds = self._seconds_together(lambda: self._write(path))
        self._written.append(path)
        if len(self._written) > _KEPT:
            self._written.pop(0).unlink()
        return seconds

    def load(self, cold: bool) -> float:
        if cold:
            _drop_from_cache([*self._newest().iterdir()])
        return self._seconds_together(self._load)

    def read(self, cold: bool) -> float:
        """The bytes of this rank's file, into a buffer that stays in the processor's cache."""
        path = self._newest() / f"rank_{self._rank:05d}.safetensors"
        if cold:
            _drop_from_cache([path])
        return self._seconds_together(lambda: _read(path))

    def steps_beside_a_save(self, steps: int) -> Beside:
        alone = _seconds(lambda: self.losses(steps))
        copy = _seconds(self._copy)
        start = _seconds(lambda: self._saver.start(self._ours.engine, RunRecord()))
        beside = _seconds(lambda: self.losses(steps))
        self._saver.finish()
        return Beside(alone / steps, copy, start, beside)

    def saved_bytes(self) -> int:
        """Of the newest checkpoint, with all ranks' files and its manifest."""
        return sum(path.stat().st_size for path in self._newest().iterdir())

    def _seconds_together(self, work: Callable[[], object]) -> float:
        """From when all ranks are ready: a save waits for a rank that comes late, a plain write does not."""
        self._together.every(lambda: None)
        return _seconds(work)

    def _newest(self) -> Path:
        return checkpoints(self._checkpoints)[0]

    def _free_pages(self) -> None:
        """Leave as many pages just freed as the state's file will take. What came before would decide otherwise: on a
        virtual machine a write into pages that its host must find first takes up to three times as long.
        """
        path = self._folder / f"scratch_{self._rank}"
        with open(path, "xb", buffering=0) as file:
            for flat in self._state:
                _write_all(file.write, flat)
        path.unlink()

    def _write(self, path: Path) -> None:
        with open(path, "xb", buffering=0) as file:
            for flat in self._state:
                _write_all(file.write, flat)
            sync_file(file)

    def _load(self) -> None:
        checkpoint = newest_checkpoint(self._checkpoints, self._together)
        assert checkpoint is not None
        load(checkpoint, self._ours.engine, self._together)

    def _copy(self) -> None:
        for flat, copy in zip(self._state, self._copies, strict=True):
            copy.copy_(flat)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _write_all(write: Callable[[memoryview], int | None], flat: Tensor) -> None:
    rest = memoryview(flat.numpy().data).cast("B")
    while rest:
        rest = rest[write(rest) :]


def _read(path: Path) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _drop_from_cache(paths: list[Path]) -> None:
    """So that the next read comes from the disk. What the disk itself or a host keeps cannot be dropped."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _fail(error: Exception) -> None:
    raise error
