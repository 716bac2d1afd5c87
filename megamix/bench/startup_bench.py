"""From the start of the processes to the end of the first step on two ranks: what the compiler costs whoever waits."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megamix.bench.ranks import Settings, Side, TrainRank, start_ranks
from megamix.bench.report import Result, paired_ratio, progress, show, spread
from megamix.bench.sides import Ddp, Ours, Work

MAX_ROUNDS = 5  # a cold compile takes most of a minute on a slow machine


class _Variant(NamedTuple):
    side: Side
    work: Work
    environment: Mapping[str, str]


def startup(settings: Settings) -> Result:
    """Measure ours with the compiler's cache empty and filled, ours without a compiler, and DDP."""
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
    described = replace(settings, rounds=rounds).described()
    return Result("startup", described, seconds, ("side", "seconds to first step", "side / ddp"), rows)


def _starts(settings: Settings, stack: ExitStack) -> dict[str, _Variant]:
    """Return them in the order in which they run: the cold start fills the cache of the warm one."""
    cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megamix-compile-cache-")))
    ours, environment = Side("ours", Ours), {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    uncompiled = replace(settings.work, compile_update=False)
    return {
        "ours, compile cache cold": _Variant(ours, settings.work, environment),
        "ours, compile cache warm": _Variant(ours, settings.work, environment),
        "ours, no compiler": _Variant(ours, uncompiled, {}),
        "ddp": _Variant(Side("ddp", Ddp), settings.work, {}),
    }


def _seconds_to_first_step(start: _Variant, world_size: int) -> float:
    start_s = time.perf_counter()
    actor = partial(TrainRank, start.side, start.work)
    with start_ranks(start.side.name, actor, world_size=world_size, environment=start.environment) as ranks:
        ranks.call(TrainRank.losses, 1)
        return time.perf_counter() - start_s
