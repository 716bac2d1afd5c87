"""`verify --runs` and `verify --twice`: the ranks on which their jobs run, and the lines that are printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megamix.arguments import Failed
from megamix.config import Config
from megamix.supervise.console import say
from megamix.tools.ranks import RankFailure, RankPool, pool_for
from megamix.tools.verify.core.layout import Layout
from megamix.tools.verify.core.own_size import size_told
from megamix.tools.verify.core.table import row
from megamix.tools.verify.runs.judge_runs import run_results, twice_problems
from megamix.tools.verify.runs.watched_run import BORDERS, STEPS

DEADLINE_S = 1800.0  # seconds of a part of a job
_SHOWN = 8  # differences of a run that are shown


def runs_lines(config: Config, layouts: Sequence[Layout], where: str | None) -> Iterator[str]:
    """Yield the lines on a job that is interrupted twice, as they become known. `where`: as for `pool_for`."""
    yield size_told(config)
    yield f"{'run':<48}{'on':>10}{'attempts':>10}{'skipped':>10}"
    sizes = sorted({layout.world_size for layout in layouts}, reverse=True)
    with ExitStack() as stack:
        most = _pool(stack, sizes[0], where)
        pools = {size: most if size == sizes[0] else _pool(stack, size, most.where) for size in sizes}
        borders = " and ".join(map(str, BORDERS))
        say(f"megamix verify: {STEPS} updates without a stop, and with resumes after {borders}", sys.stderr)

        device = torch.device("cuda" if most.on_gpus else "cpu")
        try:
            ranks = {size: pool.call for size, pool in pools.items()}
            for run, problems, share in run_results(config, layouts, _folder(stack), ranks, device):
                told = f"{run.name:<48}{most.where:>10}{len(run.attempts):>10}{run.skipped:>10}"
                yield f"{told}  {'differs' if problems else 'passes'}"
                yield from map(Failed, _first(problems))
                if share:
                    yield f"  each step by itself: at most {share:.3f} of its bound (docs/parallelism.md)"
        except RankFailure as failure:
            yield Failed(f"a run fails\n{failure}")


def twice_lines(config: Config, layouts: Sequence[Layout], where: str | None) -> Iterator[str]:
    """Yield the lines on one job in two new programs, layout by layout. `where`: as for `pool_for`."""
    yield size_told(config)
    for layout in layouts:
        say(f"megamix verify: {layout.name} on {layout.world_size} rank(s), in two programs", sys.stderr)
        with ExitStack() as stack:
            programs = [_pool(stack, layout.world_size, where, {}) for _ in range(2)]
            try:
                problems = twice_problems(config, layout, _folder(stack), [program.call for program in programs])
            except RankFailure as failure:
                problems = [f"fails\n{failure}"]
            yield row(layout.name, programs[0].where, "differs" if problems else "the same, bit for bit")
        yield from map(Failed, _first(problems))


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(TemporaryDirectory(prefix="megamix-verify-")))


def _pool(stack: ExitStack, size: int, where: str | None, environment: Mapping[str, str] | None = None) -> RankPool:
    return stack.enter_context(pool_for(size, where, environment=environment, deadline_s=DEADLINE_S))


def _first(problems: Sequence[str]) -> Iterator[str]:
    yield from (f"  {problem}" for problem in problems[:_SHOWN])
    if len(problems) > _SHOWN:
        yield f"  and {len(problems) - _SHOWN} more"
