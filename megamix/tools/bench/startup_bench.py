"""Start-up time on two ranks, from the start of the processes to the end of the first step: the compiler's cost."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from megamix.tools.bench.ranks import Settings, Side, TrainRank, start_ranks
from megamix.tools.bench.report import Result, paired_ratio, progress, rounds_told, show
from megamix.tools.bench.sides import Ddp, Engine, Ours, Work

MAX_ROUNDS = 5  # a cold compile takes most of a minute on a slow machine


def startup(settings: Settings) -> Result:
    """Measure ours with the compiler's cache empty and filled, ours without a compiler, and DDP."""
    rounds, work = min(settings.rounds, MAX_ROUNDS), settings.work
    uncompiled = replace(work, compile_update=False, model=work.model.model_copy(update={"compile": False}))
    seconds = dict[str, list[float]]()
    for number in rounds_told(rounds):
        with tempfile.TemporaryDirectory(prefix="megamix-compile-cache-") as cache:
            cached = {"TORCHINDUCTOR_CACHE_DIR": cache}
            starts: dict[str, tuple[Callable[[Work], Engine], Work, Mapping[str, str]]] = {
                "ours, compile cache cold": (Ours, work, cached),  # fills the cache
                "ours, compile cache warm": (Ours, work, cached),
                "ours, no compiler": (Ours, uncompiled, {}),
                "ddp": (Ddp, work, {}),
            }
            for name, (build, of_side, environment) in starts.items():
                progress(f"startup: {name}")
                took_s = _seconds_to_first_step(Side(name, build), of_side, environment, settings.ranks)
                seconds.setdefault(name, []).append(took_s)
                settings.tell(side=name, round=number + 1, seconds=took_s)
    rows = [(name, show(values, 2), show(paired_ratio(values, seconds["ddp"]), 2)) for name, values in seconds.items()]
    described = replace(settings, rounds=rounds).described()
    return Result("startup", described, seconds, ("side", "seconds to first step", "side / ddp"), rows)


def _seconds_to_first_step(side: Side, work: Work, environment: Mapping[str, str], world_size: int) -> float:
    start_s = time.perf_counter()
    actor, device = partial(TrainRank, side, work), work.device
    with start_ranks(side.name, actor, world_size=world_size, environment=environment, device=device) as ranks:
        ranks.call(TrainRank.losses, 1)
        return time.perf_counter() - start_s
