"""`verify --layouts`: each layout in turn on ranks that this command starts, and a table of the results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import torch

from megamix.base.console import Failed, say
from megamix.base.progress import ProgressLine
from megamix.config import Config
from megamix.tools.ranks import RankFailure, RankPool
from megamix.tools.verify.core.layout import Layout
from megamix.tools.verify.core.own_size import size_told
from megamix.tools.verify.core.table import COLUMNS, DEADLINE_S, result_lines, row
from megamix.tools.verify.core.verdict import Verdict
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.observe import observe

UPDATES = 3  # the first has no moments yet, the second both, the third a clip coefficient and scale of its own
OVERFLOW_AT = 1  # in the middle: there is something to leave unchanged, and steps follow
ATTEMPTS = f"{UPDATES} updates each, 1 overflow, and the steps that find the loss scale"


def verify_lines(
    config: Config, layouts: Sequence[Layout], where: str | None, progress: ProgressLine, bisect: bool = False
) -> Iterator[str]:
    """Yield the lines to print, as they become known. The beginning of each layout is reported on stderr. `where`: as
    for `RankPool`.
    """
    yield size_told(config)
    yield row("layout", "on", "attempts", "skipped", *COLUMNS, "")
    pools = dict[int, RankPool]()
    # Weighted by the number of ranks, which share this machine.
    progress.begin(f"{len(layouts)} layout(s)", total=sum(layout.world_size for layout in layouts))
    try:
        for number, layout in enumerate(layouts, 1):
            rest = progress.work.told(time.monotonic()) if progress.work.done else ATTEMPTS
            on = f"{layout.name} on {layout.world_size} rank(s), {number} of {len(layouts)}"
            with progress.aside():
                say(f"megamix verify: {on}; {rest}", sys.stderr)
            # One pool of a size serves all layouts of that size.
            pool = pools.setdefault(layout.world_size, RankPool(layout.world_size, where, deadline_s=DEADLINE_S))
            try:
                for name, job in _by_products(layout.name, config).items():
                    yield from result_lines(name, pool.where, verify_layout(job, layout, pool, bisect), bisect)
            except RankFailure as failure:
                yield Failed(f"{row(layout.name, pool.where, 'fails')}\n{failure}")
            progress.advance(layout.world_size)
    finally:
        for pool in pools.values():
            pool.close()
    yield "numbers are the largest error as a share of its bound (docs/verify_reference.md); 1 is too much"


def _by_products(name: str, config: Config) -> dict[str, Config]:
    """Return the jobs to verify in a layout. One with products in FP8, whose rounding could hide a small mistake, comes
    after the same job with products in half.
    """
    if config.precision.fp8 is None:
        return {name: config}
    return {name: config.with_keys(precision={"fp8": None}), "  in FP8": config}


def verify_layout(config: Config, layout: Layout, pool: RankPool, bisect: bool = False) -> Verdict:
    # Other units would drop out in one process, and bounds that allow for that would hide every mistake.
    here = layout.apply(config)
    if here.model.dropout:
        here = here.with_keys(model={"dropout": 0.0})
    ranks = pool.call(observe, here, UPDATES, OVERFLOW_AT, bisect)
    return judge(here, ranks, torch.device(pool.where), UPDATES, OVERFLOW_AT)
