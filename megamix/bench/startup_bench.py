"""From the start of the processes to the end of the first step on two ranks: what the compiler costs whoever waits."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from megamix.bench.engines import Ours, Work
from megamix.bench.peers import Ddp
from megamix.bench.processes import Ranks
from megamix.bench.report import Result, progress, show
from megamix.bench.spread import paired_ratio, spread
from megamix.bench.train_bench import GPT_12M
from megamix.bench.train_rank import Side, TrainRank
from megamix.model.sizes import parameter_count

MAX_ROUNDS = 5  # a cold compile takes most of a minute on a slow machine


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupSettings:
    """How much of what is measured."""

    work: Work = field(default_factory=lambda: Work(model=GPT_12M))
    rounds: int = MAX_ROUNDS
    ranks: int = 2


class _Start(NamedTuple):
    side: Side
    work: Work
    environment: Mapping[str, str]


def startup(settings: StartupSettings) -> Result:
    """Ours with the compiler's cache empty and filled, ours without a compiler, and DDP."""
    rounds = min(settings.rounds, MAX_ROUNDS)
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        with ExitStack() as stack:
            for name, start in _starts(settings, stack).items():
                progress(f"startup: round {number + 1} of {rounds}, {name}")
                seconds.setdefault(name, []).append(_seconds_to_first_step(start, settings.ranks))
    rows = [
        (name, show(spread(values), 2), show(paired_ratio(values, seconds["ddp"]), 2))
        for name, values in seconds.items()
    ]
    described = {"rounds": rounds, "ranks": settings.ranks, "threads": 1, "model": settings.work.model.model_dump()}
    described["parameters"] = parameter_count(settings.work.model)
    return Result("startup", described, seconds, ("side", "seconds to first step", "side / ddp"), rows)


def _starts(settings: StartupSettings, stack: ExitStack) -> dict[str, _Start]:
    """In the order in which they run: the cold start fills the cache of the warm one."""
    cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megamix-compile-cache-")))
    ours, environment = Side("ours", Ours), {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    uncompiled = replace(settings.work, compile_update=False)
    return {
        "ours, compile cache cold": _Start(ours, settings.work, environment),
        "ours, compile cache warm": _Start(ours, settings.work, environment),
        "ours, no compiler": _Start(ours, uncompiled, {}),
        "ddp": _Start(Side("ddp", Ddp), settings.work, {}),
    }


def _seconds_to_first_step(start: _Start, world_size: int) -> float:
    start_s = time.perf_counter()
    with Ranks(
        start.side.name, TrainRank, start.side, start.work, world_size=world_size, environment=start.environment
    ) as ranks:
        ranks.call("losses", 1)
        return time.perf_counter() - start_s
