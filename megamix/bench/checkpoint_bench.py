"""Checkpoints beside plain writes and reads of the same bytes, and what a save beside training costs the training."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megamix.bench.checkpoint_rank import Beside, CheckpointRank
from megamix.bench.engines import Work
from megamix.bench.processes import Ranks
from megamix.bench.report import Goal, Result, progress, show
from megamix.bench.spread import paired_ratio, spread
from megamix.bench.train_bench import GPT_12M
from megamix.model.sizes import parameter_count

SAVE, WRITE = "save", "write + fsync"
LOAD, READ = "load, from the disk", "read, from the disk"
CACHED_LOAD, CACHED_READ = "load, from memory", "read, from memory"
STEPS = 2  # taken while a save is under way, and as many without


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """How much of what is measured. `folder`: where a temporary folder is made; None: where the system has them."""

    work: Work = field(default_factory=lambda: Work(model=GPT_12M))
    rounds: int = 15
    ranks: int = 2
    folder: Path | None = None


_CALLS: dict[str, Callable[[Ranks], list[float]]] = {
    WRITE: lambda ranks: ranks.call("write"),
    SAVE: lambda ranks: ranks.call("save"),
    READ: lambda ranks: ranks.call("read", True),
    LOAD: lambda ranks: ranks.call("load", True),
    CACHED_READ: lambda ranks: ranks.call("read", False),
    CACHED_LOAD: lambda ranks: ranks.call("load", False),
}


def checkpoint(settings: CheckpointSettings) -> Result:
    """Every round: all calls in rotated order, then steps without and with a save."""
    seconds: dict[str, list[float]] = {name: [] for name in _CALLS}
    steps: list[Beside] = []
    with (
        tempfile.TemporaryDirectory(prefix="megamix-bench-", dir=settings.folder) as folder,
        Ranks("checkpoint", CheckpointRank, settings.work, Path(folder), world_size=settings.ranks) as ranks,
    ):
        progress("first saves, loads and steps")
        for call in _CALLS.values():
            call(ranks)
        ranks.call("steps_beside_a_save", STEPS)
        for number in range(settings.rounds):
            progress(f"round {number + 1} of {settings.rounds}")
            first = number % len(_CALLS)
            for name in [*_CALLS][first:] + [*_CALLS][:first]:
                seconds[name].append(max(_CALLS[name](ranks)))
            steps.append(_slowest(ranks.call("steps_beside_a_save", STEPS)))
        saved_bytes = ranks.call("saved_bytes")[0]
    return _result(settings, seconds, steps, saved_bytes)


def _slowest(ranks: list[Beside]) -> Beside:
    return Beside(*map(max, zip(*ranks, strict=True)))


def _result(
    settings: CheckpointSettings, seconds: dict[str, list[float]], steps: list[Beside], saved_bytes: int
) -> Result:
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
        Goal("time of a save over writing and syncing the same bytes", save.median, 1.3, False, save),
        Goal("time of a load over reading the same bytes from the disk", load.median, 1.5, False, load),
        Goal("% of a step that training waits for a save to start, beyond a copy", stall.median, 10.0, False, stall),
        Goal("bytes a parameter", saved_bytes / num_params, 12 * 1.01, False),
    ]
    notes = [
        f"{saved_bytes / 1e6:.1f} MB, {settings.ranks} ranks, below {settings.folder or tempfile.gettempdir()}",
        _milliseconds("a step", [turn.step for turn in steps]),
        _milliseconds("a copy of a rank's state", [turn.copy for turn in steps]),
        _milliseconds("the start of a save beside training", [turn.start for turn in steps]),
        f"% of a step that {STEPS} steps lose beside a save, beyond a copy: {show(taken)}",
    ]
    described = {
        "rounds": settings.rounds,
        "ranks": settings.ranks,
        "threads": 1,
        "parameters": num_params,
        "model": settings.work.model.model_dump(),
    }
    raw = {**seconds, "steps": [turn._asdict() for turn in steps]}
    return Result("checkpoint", described, raw, ("side", "ms", "MB/s", "time / plain"), rows, goals, notes)


def _milliseconds(what: str, seconds: list[float]) -> str:
    return f"{what}, ms: {show(spread([1e3 * value for value in seconds]), 1)}"
