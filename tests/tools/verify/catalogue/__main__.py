"""The table of docs/verify_reference.md: `python -m tests.tools.verify.catalogue` runs every entry and writes it."""

import re
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch

from megamix.tools.ranks import RankPool
from tests.tools.verify.catalogue.bugs import BUGS
from tests.tools.verify.catalogue.run import verdicts
from tests.tools.verify.runs.run_bugs import RUN_BUGS

PAGE = Path(__file__).parents[4] / "docs" / "verify_reference.md"
HEADER = "| bug | met in | ranks | step | what `verify` says first |\n|---|---|---|---|---|\n"

RUNS_HEADER = "| bug in a run | met in | what `verify --runs` says |\n|---|---|---|\n"


def runs_table():
    """Return the table of answers that `--runs` must give: tests/tools/verify/runs/test_runs.py plants and asks."""
    rows = ""
    for bug in RUN_BUGS:
        rows += f"| {bug.plant.__name__.replace('_', ' ')} | {bug.met_in} | {bug.words.strip()} |\n"
    return RUNS_HEADER + rows


def named(bug, verdict):
    """Return whether the first difference is at the right place and of the right kind."""
    if not verdict.differences:
        return False
    first = verdict.differences[0]
    return first.check.startswith(bug.check) and bug.where in first.where and bug.kind in first.looks_like


def row(bug, verdict):
    """Return a bug's row: the answer without its numbers for errors."""
    said, step = "nothing", ""
    if verdict.differences:
        first = verdict.differences[0]
        step = "start" if first.attempt < 0 else str(first.attempt)
        said = f"{re.sub(r' by [0-9.e+-]+', '', first.check)} of `{first.where}`"
        said += f": {first.looks_like}" if first.looks_like else ""
    said += f" ({bug.missing})" if bug.missing else ""
    place = "our engine" if bug.layout else f"`{bug.name}`"
    cells = f"{bug.sentence} {place}", bug.met_in, bug.layout or str(bug.ranks), step, said
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def masked(row):
    """Return a row without its numbers: another machine rounds in another order."""
    return re.sub(r"\d[\d.e-]*", "#", row)


def rows_of(page):
    """Return the rows of the page's table."""
    return [f"{row}\n" for row in page.partition(HEADER)[2].partition("\n\n")[0].splitlines()]


def with_table(page, found):
    before, header, after = page.partition(HEADER)
    assert header, f"no table of bugs: it begins with {HEADER!r}"
    table = "".join(row(bug, found[name]) for name, bug in BUGS.items())
    page = f"{before}{header}{table}\n{after.partition(chr(10) * 2)[2]}"
    before, header, after = page.partition(RUNS_HEADER)
    assert header, f"no table of bugs in runs: it begins with {RUNS_HEADER!r}"
    return f"{before}{runs_table()}\n{after.partition(chr(10) * 2)[2]}"


def _call(pools, function, ranks, *args, **other):
    pools.setdefault(ranks, RankPool(ranks))
    return pools[ranks].call(function, *args, **other)


def main():
    torch.set_num_threads(1)
    pools = {}
    try:
        found = verdicts(partial(_call, pools), [*BUGS])
    finally:
        for pool in pools.values():
            pool.close()
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    kinds = defaultdict(list)
    for name, bug in BUGS.items():
        kinds[named(bug, found[name])].append(name)
    print(f"{len(kinds[True])} of {len(BUGS)} as expected; not: {kinds[False]}")


if __name__ == "__main__":
    main()
