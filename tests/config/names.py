"""The last table of docs/coming_from.md, of the names that no table above it has: `python -m tests.config.names` writes
it.
"""

import re
from collections import defaultdict
from pathlib import Path

from megamix.config.other_trainers import names

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
HEADER = "| elsewhere | here |\n|---|---|\n"


def last_name(name):
    """Return a key as the data file has it: without its tables, the dashes in front, and dashes within."""
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


def table(above):
    """Return the table's text: a row for each key of ours, then one for each text on names that have no equal here.

    `above`: the page up to the table, whose tables have names of their own.
    """
    told = {last_name(name) for name in re.findall(r"`([\w.-]+)`", above)}
    theirs = defaultdict(list)
    for name, ours in names()["here"].items():
        remark = names()["remarks"].get(name)
        here = f"`{ours}`" + (f", {remark}" if remark else "")
        theirs[here].append(name)
    for name, instead in names()["instead"].items():
        theirs[instead].append(name)
    rest = {here: [f"`{name}`" for name in them if name not in told] for here, them in theirs.items()}
    return HEADER + "".join(f"| {', '.join(them)} | {here} |\n" for here, them in rest.items() if them)


def with_table(page):
    """Return the text `page` with its table replaced by today's."""
    above, header, _ = page.partition(HEADER)
    assert header, f"no table of names: it begins with {HEADER!r}"
    return above + table(above)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
