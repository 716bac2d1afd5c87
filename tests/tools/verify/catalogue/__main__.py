"""The tables of answers.md and docs/verify_reference.md: `python -m tests.tools.verify.catalogue` runs every entry and
writes them.
"""

import re
from pathlib import Path

import torch

from megamix.tools.ranks import RankPool
from tests.tools.verify.catalogue.bugs import BUGS, named
from tests.tools.verify.catalogue.run import verdicts
from tests.tools.verify.runs.run_bugs import RUN_BUGS

PAGE = Path(__file__).parents[4] / "docs" / "verify_reference.md"
ANSWERS = Path(__file__).with_name("answers.md")
HEADER = "| bug | met in | ranks | step | what `verify` says first |\n|---|---|---|---|---|\n"

IN_TABLE = [bug for bug in BUGS.values() if bug.met_in]
RUNS_HEADER = "| bug in a run | met in | what `verify --runs` says |\n|---|---|---|\n"


def runs_table():
    """Return the table of answers that `--runs` must give: tests/tools/verify/runs/test_runs.py plants and asks."""
    rows = (f"| {name.replace('_', ' ')} | {met_in} | {words.strip()} |\n" for name, met_in, words in RUN_BUGS)
    return RUNS_HEADER + "".join(rows)


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
    """Return the rows of the table of all answers."""
    return [f"{row}\n" for row in page.partition(HEADER)[2].partition("\n\n")[0].splitlines()]


def write(path, header, table):
    """Write the table with this header anew. `table`: all of it."""
    before, known, after = path.read_text(encoding="utf-8").partition(header)
    assert known, f"no table in {path}: it begins with {header!r}"
    path.write_text(f"{before}{table}\n{after.partition(chr(10) * 2)[2]}", encoding="utf-8")


def main():
    torch.set_num_threads(1)
    pools = {ranks: RankPool(ranks) for ranks in {bug.ranks for bug in IN_TABLE}}
    try:
        names = [bug.name for bug in IN_TABLE]
        found = verdicts(lambda work, ranks, *args, **kept: pools[ranks].call(work, *args, **kept), names)
    finally:
        for pool in pools.values():
            pool.close()
    write(ANSWERS, HEADER, HEADER + "".join(row(bug, found[bug.name]) for bug in IN_TABLE))
    write(PAGE, RUNS_HEADER, runs_table())
    wrong = [bug.name for bug in IN_TABLE if not named(bug, found[bug.name])]
    print(f"{len(IN_TABLE) - len(wrong)} of {len(IN_TABLE)} as expected; not: {wrong}")


if __name__ == "__main__":
    main()
