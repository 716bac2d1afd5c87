"""The table of other trainers' names in docs/configuration.md: `python -m tests.config.names` writes it."""

from collections import defaultdict
from pathlib import Path

from megamix.config.other_trainers import names

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEADER = "| here | elsewhere |\n|---|---|\n"


def table():
    """Return the table's text: a row for each key of ours, then one for each that has no equal here."""
    theirs = defaultdict(list)
    for name, ours in names()["here"].items():
        remark = names()["remarks"].get(name)
        theirs[f"`{ours}`"].append(f"`{name}`" + (f" ({remark})" if remark else ""))
    for name, instead in names()["instead"].items():
        theirs[instead].append(f"`{name}`")
    return HEADER + "".join(f"| {here} | {', '.join(them)} |\n" for here, them in theirs.items())


def with_table(page):
    """Return the text `page` with its table replaced by today's."""
    before, header, after = page.partition(HEADER)
    assert header, f"no table of names: it begins with {HEADER!r}"
    rest = after.partition("\n\n")[2]
    return f"{before}{table()}\n{rest}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
