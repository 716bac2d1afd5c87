"""`verify --trainer`: somebody's own training on ranks that this command starts, and a table of its results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from megamix.arguments import Failed
from megamix.supervise.console import say
from megamix.tools.ranks import RankFailure, pool_for
from megamix.tools.verify.core.table import COLUMNS, result_lines, row
from megamix.tools.verify.core.verdict import Verdict
from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import check_trainer, in_own_code, load_trainer
from megamix.tools.verify.foreign.watch import watch_trainer

DEADLINE_S = 1800.0


def trainer_lines(where: str, worlds: Sequence[int], steps: int, bisect: bool = False) -> Iterator[str]:
    """Yield the lines to print: the results of somebody's own training on each number of ranks. `where`:
    FILE.py:CLASS.
    """
    trainer = load_trainer(where, ranks=worlds[0])
    with in_own_code(trainer):
        check_trainer(trainer)  # mistakes of the trainer are told before any rank is started
    yield row("ranks", "attempts", "skipped", *COLUMNS, "")
    for world in worlds:
        say(f"megamix verify: {where} on {world} rank(s)", sys.stderr)
        try:
            yield from result_lines(str(world), verify_trainer(where, world, steps, bisect), bisect)
        except RankFailure as failure:
            yield Failed(f"{world:<13} fails\n{failure}")
    yield "numbers are the largest error as a share of its bound (docs/verify_reference.md); 1 is too much"


def verify_trainer(where: str, world: int, steps: int, bisect: bool = False) -> Verdict:
    """Run FILE.py:CLASS on `world` ranks and judge it."""
    with pool_for(world, deadline_s=DEADLINE_S) as pool:
        ranks = pool.call(watch_trainer, where, steps, bisect)
    trainer = load_trainer(where, ranks=world)
    with in_own_code(trainer):
        return judge_trainer(trainer, ranks)
