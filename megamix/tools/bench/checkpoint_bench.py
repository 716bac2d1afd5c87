"""Checkpoints beside plain writes and reads of the same bytes, and the cost to training of a save beside it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import Saver
from megamix.durable import advise, sync_file
from megamix.model.family import parameter_count
from megamix.tools.bench.ranks import Settings, Side, TrainRank, rotated, start_ranks
from megamix.tools.bench.report import Goal, Result, paired_ratio, progress, rounds_told, show, spread
from megamix.tools.bench.sides import Ours, Work

SAVE, WRITE = "save", "write + fsync"
LOAD, READ = "load, from the disk", "read, from the disk"
CACHED_LOAD, CACHED_READ = "load, from memory", "read, from memory"
STEPS = 2  # steps taken while a save is under way, and as many without
_CHUNK = 1 << 22  # bytes of a plain read
_KEPT = 2  # number of checkpoints, and of plainly written files, that are kept


class Beside(NamedTuple):
    """Seconds of steps beside a save, on one rank."""

    step: float  # one step without a save
    copy: float  # a copy of the state, from memory to memory
    start: float  # time for which training waits, a copy included
    steps: float  # all steps taken while the save may be under way


class CheckpointRank(TrainRank):
    """Rank that trains, and saves its state below `folder`, which all ranks share."""

    def __init__(self, work: Work, folder: Path):
        super().__init__(Side("ours", Ours), work)
        ours = self._built()
        assert isinstance(ours, Ours)
        self._ours = ours
        self._folder, self._checkpoints = folder, folder / "checkpoints"
        self._written: list[Path] = []
        self._all_or_none = AllOrNone.apart(ours.engine.topology.world, timeout_s=600.0)
        self._saver = Saver(self._checkpoints, _KEPT, self._all_or_none, saved=lambda path: None, failed=_fail)
        self.losses(1)  # makes every state nonzero
        self._state = [flat for owned in ours.engine.owned_ranges() for flat in owned.tensors.values()]
        self._copies = [torch.empty_like(flat) for flat in self._state]

    def save(self) -> float:
        """Save the state, and return the seconds.

        The removal of an old checkpoint, which a run does beside training, is not timed.
        """
        self._free_pages()
        seconds = self._seconds_together(lambda: self._saver.save(self._ours.engine, RunRecord()))
        self._saver.finish()
        return seconds

    def write(self) -> float:
        """Write the state's bytes into a file, and return the seconds. The oldest file is then removed, untimed."""
        path = self._folder / f"plain_{self._rank}_{time.monotonic_ns()}"
        self._free_pages()
        seconds = self._seconds_together(lambda: self._write(path))
        self._written.append(path)
        if len(self._written) > _KEPT:
            self._written.pop(0).unlink()
        return seconds

    def load(self, cold: bool) -> float:
        """Load the newest checkpoint, and return the seconds. `cold`: from the disk, not from memory."""
        if cold:
            _drop_from_cache([*self._newest().iterdir()])
        return self._seconds_together(self._load)

    def read(self, cold: bool) -> float:
        """Read this rank's file into a buffer that stays in the processor's cache, and return the seconds."""
        path = self._newest() / f"rank_{self._rank:05d}.safetensors"
        if cold:
            _drop_from_cache([path])
        return self._seconds_together(lambda: _read(path))

    def steps_beside_a_save(self, steps: int) -> Beside:
        """Take `steps` steps without a save, and as many with one under way."""
        alone = _seconds(lambda: self.losses(steps))
        copy = _seconds(self._copy)
        start = _seconds(lambda: self._saver.start(self._ours.engine, RunRecord()))
        beside = _seconds(lambda: self.losses(steps))
        self._saver.finish()
        return Beside(alone / steps, copy, start, beside)

    def saved_bytes(self) -> int:
        """Return the size of the newest checkpoint, with all ranks' files and its manifest."""
        return sum(path.stat().st_size for path in self._newest().iterdir())

    def _seconds_together(self, work: Callable[[], object]) -> float:
        """Return the seconds of `work`, begun when all ranks are ready: only a save would wait for a late rank."""
        self._all_or_none.every(lambda: None)
        return _seconds(work)

    def _newest(self) -> Path:
        return checkpoints(self._checkpoints)[0]

    def _free_pages(self) -> None:
        """Leave as many freshly freed pages as the state's file will take, so that earlier work does not matter.

        On a virtual machine, a write into pages that its host must find first takes up to three times as long.
        """
        path = self._folder / f"scratch_{self._rank}"
        self._write(path, sync=False)
        path.unlink()

    def _write(self, path: Path, *, sync: bool = True) -> None:
        with open(path, "xb", buffering=0) as file:
            for flat in self._state:
                rest = memoryview(flat.numpy().data).cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
            if sync:
                sync_file(file)

    def _load(self) -> None:
        checkpoint = newest_checkpoint(self._checkpoints, self._all_or_none)
        assert checkpoint is not None
        load(checkpoint, self._ours.engine, self._all_or_none)

    def _copy(self) -> None:
        for flat, copy in zip(self._state, self._copies, strict=True):
            copy.copy_(flat)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _read(path: Path) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _drop_from_cache(paths: list[Path]) -> None:
    """Drop files from the page cache, so that the next read comes from the disk.

    Caches of the disk itself or of a host cannot be dropped.
    """
    for path in paths:
        with path.open("rb") as file:
            advise(file, 0, 0, "DONTNEED")


def _fail(error: Exception) -> None:
    raise error


_CALLS: dict[str, tuple[Callable[..., float], *tuple[bool, ...]]] = {
    WRITE: (CheckpointRank.write,),
    SAVE: (CheckpointRank.save,),
    READ: (CheckpointRank.read, True),
    LOAD: (CheckpointRank.load, True),
    CACHED_READ: (CheckpointRank.read, False),
    CACHED_LOAD: (CheckpointRank.load, False),
}


def checkpoint(settings: Settings) -> Result:
    """Measure all calls in every round, in rotated order, then steps without and with a save."""
    seconds: dict[str, list[float]] = {name: [] for name in _CALLS}
    steps: list[Beside] = []
    with (
        tempfile.TemporaryDirectory(prefix="megamix-bench-") as folder,
        start_ranks(
            "checkpoint", partial(CheckpointRank, settings.work, Path(folder)), world_size=settings.ranks
        ) as ranks,
    ):
        progress("first saves, loads and steps")
        for call in _CALLS.values():
            ranks.call(*call)
        ranks.call(CheckpointRank.steps_beside_a_save, STEPS)
        for number in rounds_told(settings.rounds):
            for name in rotated([*_CALLS], number):
                seconds[name].append(max(ranks.call(*_CALLS[name])))
            by_rank = ranks.call(CheckpointRank.steps_beside_a_save, STEPS)
            steps.append(Beside(*map(max, zip(*by_rank, strict=True))))
            last = {name: values[-1] for name, values in seconds.items()}
            settings.tell(round=number + 1, seconds=last, steps=steps[-1]._asdict())
        saved_bytes = ranks.call(CheckpointRank.saved_bytes)[0]
    return _result(settings, seconds, steps, saved_bytes)


def _result(settings: Settings, seconds: dict[str, list[float]], steps: list[Beside], saved_bytes: int) -> Result:
    num_params = parameter_count(settings.work.model)
    beside = {SAVE: WRITE, LOAD: READ, CACHED_LOAD: CACHED_READ}
    rows = [
        (
            name,
            show(spread([1e3 * value for value in values])),
            show(spread([1e-6 * saved_bytes / value for value in values])),
            show(paired_ratio(values, seconds[beside[name]]), 2) if name in beside else "",
        )
        for name, values in seconds.items()
    ]
    save, load = (paired_ratio(seconds[name], seconds[beside[name]]) for name in (SAVE, LOAD))
    stall = spread([100 * (turn.start - turn.copy) / turn.step for turn in steps])
    taken = spread([100 * (turn.start + turn.steps - STEPS * turn.step - turn.copy) / turn.step for turn in steps])
    goals = [
        Goal("time of a save over writing and syncing the same bytes", save, 1.3, False),
        Goal("time of a load over reading the same bytes from the disk", load, 1.5, False),
        Goal("% of a step that training waits for a save to start, beyond a copy", stall, 10.0, False),
        Goal("bytes a parameter", saved_bytes / num_params, 12 * 1.01, False),
    ]
    notes = [
        f"{saved_bytes / 1e6:.1f} MB, {settings.ranks} ranks, below {tempfile.gettempdir()}",
        _milliseconds("a step", [turn.step for turn in steps]),
        _milliseconds("a copy of a rank's state", [turn.copy for turn in steps]),
        _milliseconds("the start of a save beside training", [turn.start for turn in steps]),
        f"% of a step that {STEPS} steps lose beside a save, beyond a copy: {show(taken)}",
    ]
    raw = {**seconds, "steps": [turn._asdict() for turn in steps]}
    return Result("checkpoint", settings.described(), raw, ("side", "ms", "MB/s", "time / plain"), rows, goals, notes)


def _milliseconds(what: str, seconds: list[float]) -> str:
    return f"{what}, ms: {show(spread([1e3 * value for value in seconds]), 1)}"
