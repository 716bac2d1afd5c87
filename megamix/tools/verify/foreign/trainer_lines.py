"""`verify --trainer`: somebody's own training on ranks that this command starts, and a table of its results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from megamix.base.console import Failed, say
from megamix.tools.ranks import RankFailure, RankPool
from megamix.tools.verify.core.table import COLUMNS, DEADLINE_S, result_lines, row
from megamix.tools.verify.core.verdict import Verdict
from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import check_trainer, loaded_trainer
from megamix.tools.verify.foreign.watch import watch_trainer


def trainer_lines(
    trained: str, worlds: Sequence[int], where: str | None, steps: int, bisect: bool = False
) -> Iterator[str]:
    """Yield the lines to print: the results of somebody's own training on each number of ranks. `trained`:
    FILE.py:CLASS. `where`: as for `RankPool`.
    """
    with loaded_trainer(trained, ranks=worlds[0]) as trainer:
        check_trainer(trainer)  # mistakes of the trainer are told before any rank is started
    yield row("ranks", "on", "attempts", "skipped", *COLUMNS, "")
    for world in worlds:
        say(f"megamix verify: {trained} on {world} rank(s)", sys.stderr)
        pool = RankPool(world, where, deadline_s=DEADLINE_S)
        try:
            yield from result_lines(str(world), pool.where, verify_trainer(trained, pool, steps, bisect), bisect)
        except RankFailure as failure:
            yield Failed(f"{row(str(world), pool.where, 'fails')}\n{failure}")
    yield "numbers are the largest error as a share of its bound (docs/verify_reference.md); 1 is too much"


def verify_trainer(trained: str, pool: RankPool, steps: int, bisect: bool = False) -> Verdict:
    """Run FILE.py:CLASS on these ranks, which end behind it, and judge it."""
    with pool:
        ranks = pool.call(watch_trainer, trained, steps, bisect)
    with loaded_trainer(trained, ranks=pool.world_size) as trainer:
        return judge_trainer(trainer, ranks)
