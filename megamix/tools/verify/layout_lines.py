"""The verb `verify`: each layout in turn on ranks that this command starts, and a table of what became of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import torch

from megamix.arguments import Failed
from megamix.config import Config
from megamix.mixed_precision.observer import DIRECTION, SOURCE
from megamix.supervise.console import say
from megamix.tools.ranks import RankFailure, RankPool
from megamix.tools.verify.judge import judge
from megamix.tools.verify.judge_trainer import judge_trainer
from megamix.tools.verify.layouts import Layout, size_told, without_dropout
from megamix.tools.verify.observe import observe
from megamix.tools.verify.trainer import check_trainer, load_trainer
from megamix.tools.verify.verdict import Verdict
from megamix.tools.verify.watch import watch_trainer

UPDATES = 3  # the first has no moments yet, the second both, the third a clip coefficient and scale of its own
OVERFLOW_AT = 1  # in the middle: there is something to leave unchanged, and steps after it
ATTEMPTS = f"{UPDATES} updates each, 1 overflow, and the steps that find the loss scale"
DEADLINE_S = 1800.0
# Columns of the table, and the checks that each one counts.
COLUMNS = {
    "loss": ("loss",),
    "gradients": ("gradient",),
    "norm": ("norm", "largest"),
    "weights": ("weight", "initial weight", DIRECTION, f"{DIRECTION} in FP64"),
    "moments": ("exp_avg", "exp_avg_sq", "momentum_buffer", "velocity", "row_var", "col_var", "variance", SOURCE),
}


def verify_lines(config: Config, layouts: Sequence[Layout], bisect: bool = False) -> Iterator[str]:
    """Yield what to print, as it becomes known. What begins is said on stderr."""
    yield size_told(config)
    yield _row("layout", "attempts", "skipped", *COLUMNS, "")
    pools: dict[int, RankPool] = {}
    begin_s = time.monotonic()
    try:
        for number, layout in enumerate(layouts):
            # By their ranks, which share this machine.
            done, left = (sum(one.world_size for one in part) for part in (layouts[:number], layouts[number:]))
            rest = f"about {(time.monotonic() - begin_s) / done * left:.0f} s left" if done else ATTEMPTS
            what = f"{layout.name} on {layout.world_size} rank(s), {number + 1} of {len(layouts)}"
            say(f"megamix verify: {what}; {rest}", sys.stderr)
            on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= layout.world_size
            # Ranks of one number serve all its layouts.
            pool = pools.setdefault(layout.world_size, RankPool(layout.world_size, on_gpus=on_gpus))
            try:
                yield from _result(layout.name, verify_layout(config, layout, pool, bisect), bisect)
            except RankFailure as failure:
                yield Failed(f"{layout.name:<13} fails\n{failure}")
    finally:
        for pool in pools.values():
            pool.close()
    yield "numbers are the largest error as a share of its bound (docs/parallelism.md); 1 is too much"


def verify_layout(
    config: Config, layout: Layout, pool: RankPool, bisect: bool = False, deadline_s: float = DEADLINE_S
) -> Verdict:
    """Run one layout on its ranks and judge it."""
    here = without_dropout(layout.apply(config))
    ranks = pool.call(observe, here, UPDATES, OVERFLOW_AT, bisect, deadline_s=deadline_s)
    return judge(here, ranks, torch.device("cuda" if pool.on_gpus else "cpu"), UPDATES, OVERFLOW_AT)


def trainer_lines(where: str, worlds: Sequence[int], steps: int, bisect: bool = False) -> Iterator[str]:
    """Yield what to print of somebody's own training on each number of ranks: FILE.py:CLASS for `steps` steps."""
    check_trainer(load_trainer(where, ranks=worlds[0]))  # its mistakes are told before any rank is started
    yield _row("ranks", "attempts", "skipped", *COLUMNS, "")
    for world in worlds:
        say(f"megamix verify: {where} on {world} rank(s)", sys.stderr)
        try:
            yield from _result(str(world), verify_trainer(where, world, steps, bisect), bisect)
        except RankFailure as failure:
            yield Failed(f"{world:<13} fails\n{failure}")
    yield "numbers are the largest error as a share of its bound (docs/verify.md); 1 is too much"


def verify_trainer(where: str, world: int, steps: int, bisect: bool = False, deadline_s: float = DEADLINE_S) -> Verdict:
    """Run FILE.py:CLASS on so many ranks and judge it."""
    with RankPool(world, on_gpus=torch.cuda.is_available() and torch.cuda.device_count() >= world) as pool:
        ranks = pool.call(watch_trainer, where, steps, bisect, deadline_s=deadline_s)
    return judge_trainer(load_trainer(where, ranks=world), ranks)


def _result(name: str, verdict: Verdict, bisect: bool = False) -> Iterator[str]:
    shares = [[verdict.worst[check] for check in checks if check in verdict.worst] for checks in COLUMNS.values()]
    worst = [max(column) if column else None for column in shares]
    cells = ["-" if one is None else f"{one:.3f}" if one < 1000 else f"{one:.3g}" for one in worst]
    ends = "differs" if verdict.differences else "passes"
    yield _row(name, str(verdict.attempts), str(verdict.skipped), *cells, ends)
    if verdict.differences:
        yield Failed(f"  first: {verdict.differences[0]}")
        more = dict.fromkeys(f"{one.check} of {one.where}" for one in verdict.differences[1:])
        yield f"  and {len(more)} more: {', '.join([*more][:8])}" if more else "  and nothing else"
    for (what, told), names in verdict.left.items():
        yield f"  {what} of {len(names)} tensor(s): {told}"
    if verdict.culprit:
        yield Failed(f"  first module: {verdict.culprit}")
    elif bisect and verdict.differences:
        yield "  first module: none, up to a factor: look behind backward (hooks, reduction, clipping) or at the update"


def _row(*cells: str) -> str:
    return f"{cells[0]:<14}" + "".join(f"{cell:>10}" for cell in cells[1:-1]) + f"  {cells[-1]}".rstrip()
