"""What a run looks like: the pictures of `megamix plot` and the console, from what two runs have left.

`python docs/run_pictures.py` writes docs/pictures/run_*.png and the console on the pages. The runs' rows and the
console of one are in docs/example_runs; lines of steps are printed anew from the rows, so a page shows today's.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from megamix.log.interval_report import StepMetrics
from megamix.log.metrics import TAGS, format_lines

DOCS = Path(__file__).parent
RUNS = [DOCS / "example_runs/quickstart", DOCS / "example_runs/quickstart_adamw"]
MARK = "<!-- console: python docs/run_pictures.py writes it -->\n```text\n"
LEFT_OUT = "[...]"
# Of each page: the steps from which and up to which it shows the console.
PAGES = {"watch.md": ((0, 10), (130, 130))}
PICTURES = {"run_loss", "run_range", "run_compared"}


def console() -> list[tuple[int, str]]:
    """Return what the first run said, line by line, each with the step that it is of."""
    steps, said, step = _lines_of_steps(RUNS[0]), [], 0
    for line in (RUNS[0] / "console.txt").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"step +(\d+)/\d+ \| (loss|eta|time:)?", line):
            step = int(found[1])
            if found[2]:
                line = steps[step][("loss", "eta", "time:").index(found[2])]
        said.append((step, line))
    return said


def _lines_of_steps(run: Path) -> dict[int, list[str]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    logged = [row for row in rows if TAGS["loss"] in row]
    return {
        row["step"]: format_lines(row["step"], logged[-1]["step"], _metrics(row), detailed=True).splitlines()
        for row in logged
    }


def _metrics(row: dict[str, Any]) -> StepMetrics:
    return StepMetrics(**{field.name: row.get(TAGS[field.name]) for field in fields(StepMetrics)})


def with_console(page: str, parts: tuple[tuple[int, int], ...]) -> str:
    """Return the text of a page with the console that it shows replaced by today's."""
    before, mark, after = page.partition(MARK)
    assert mark, "no place for the console"
    shown = ["\n".join(line for step, line in console() if first <= step <= last) for first, last in parts]
    text = f"\n{LEFT_OUT}\n".join(shown)
    return f"{before}{mark}{text}\n```{after.partition('```')[2]}"


def draw(folder: Path) -> None:
    """Write what `megamix plot` draws."""
    from megamix.log.history import read_history
    from megamix.log.report.plot import compared, figures, png

    runs = {run.name: read_history(run) for run in RUNS}
    drawn = figures(runs[RUNS[0].name]) | {"compared": compared(runs)}
    for name in PICTURES:
        (folder / f"{name}.png").write_bytes(png(drawn[name.removeprefix("run_")]))


if __name__ == "__main__":
    draw(DOCS / "pictures")
    for name, parts in PAGES.items():
        page = DOCS / name
        page.write_text(with_console(page.read_text(encoding="utf-8"), parts), encoding="utf-8")
