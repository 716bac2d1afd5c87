"""Report of a run as one HTML file to send: what its wall time went into, its stops and their causes, and its curves.
This module imports no torch.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from megamix.durable import write_text
from megamix.progress import duration
from megamix.report.goodput import Goodput, OneStart, read_goodput, verdict
from megamix.report.ledger import DOWN, REDONE, START, TRAINED
from megamix.report.metrics import TAGS
from megamix.run.run_folder import METRICS

REPORT, NUMBERS = "report.html", "report.json"
_MOST = 1e11  # of a number in a curve: beyond it a time is no date
_SHOWN = 50  # most starts in the table
_POINTS = 400  # most points of a curve are twice as many: the least and the largest of each part

# Colour of each bucket, its meaning, and what helps if its share is high.
_TOLD = {
    "trained": ("#2a9d5c", "attempts whose update is in the final line of checkpoints", ""),
    "overflow": ("#b07aa1", "attempts that overflowed and changed nothing", "see the loss scale; BF16"),
    "redone": ("#e08a1e", "updates after the last save, lost by a stop", "a smaller checkpoint.save_interval"),
    "start": ("#7f8fa6", "from the launcher's start to the loop, without compiling", "fewer starts; local disks"),
    "compile": ("#4c78a8", "compiling the update, and what a first attempt takes longer", "TORCHINDUCTOR_CACHE_DIR"),
    "validation": ("#72b7b2", "validations", "a larger training.eval_interval, fewer eval_batches"),
    "saving": ("#c9a227", "saves, as far as training waited for them", "async_save, a larger save_interval"),
    "waiting": ("#9c755f", "attempts that waited for data", "token files on a local disk"),
    "stalled": ("#d1495b", "attempts beyond three times their usual time", "the stops' causes; the ranks' hosts"),
    "down": ("#3b3b3b", "between the end of a start and the next one", "the scheduler's queue; spare nodes"),
}
# Legend of the strip: the parts of the wall clock that it tells apart.
_STRIP = " &nbsp; ".join(
    f'<i style="background:{_TOLD[bucket][0]}"></i>{text}'
    for bucket, text in ((START, "start and compile"), (TRAINED, "the loop"), (REDONE, "redone"), (DOWN, "down"))
)
_STYLE = (  # on a phone, which has no room for columns, each value has its column's name in front
    "body{font:16px/1.45 system-ui,sans-serif;max-width:64rem;margin:1.5rem auto;padding:0 1rem;color:#222}"
    "h1{font-size:1.3rem;margin:0}"
    "h3{font-size:1rem;margin:1.2rem 0 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}"
    ".verdict{font-size:1.2rem;margin:.5rem 0 1rem}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}td,th{padding:.25rem .8rem .25rem 0;"
    "text-align:left;vertical-align:top;border-bottom:1px solid #e5e5e5}td:nth-child(-n+3){white-space:nowrap}"
    "svg{display:block;width:100%}.axis{display:flex;justify-content:space-between;font-size:.8rem;color:#666}"
    "i{display:inline-block;width:.8rem;height:.8rem;margin-right:.4rem}"
    "polyline{fill:none;stroke:#2a6fb0;stroke-width:1.5;vector-effect:non-scaling-stroke}"
    "@media(max-width:40rem){th,td:empty{display:none}tr{display:block;padding:.4rem 0;border-bottom:1px solid #e5e5e5}"
    "td{border:0;display:inline-block}td::before{content:attr(title) ' ';color:#777}}"
)


def write_report(folder: Path, *, numbers: bool) -> Iterator[str]:
    """Write the report of a run into its folder; with `numbers` a JSON file beside it. Yield the verdict, then a line
    for each file; between them a line on a step's planned time, if the run has compared it.

    Raises: ValueError naming a folder that is no run; OSError.
    """
    goodput = read_goodput(folder)
    yield verdict(goodput)
    if goodput.compared:
        yield goodput.compared
    write_text(folder / REPORT, _page(folder.resolve().name, goodput, [*_points(folder / METRICS)]))
    yield f"{folder / REPORT}"
    if numbers:
        values = {"verdict": verdict(goodput), "share": goodput.share, "wall_s": goodput.wall_s}
        values |= {"steps": goodput.steps, "seconds": goodput.seconds, "compared": goodput.compared}
        starts = [asdict(one) for one in goodput.starts]
        write_text(folder / NUMBERS, json.dumps({**values, "starts": starts}, indent=1) + "\n")
        yield f"{folder / NUMBERS}"


def _page(name: str, goodput: Goodput, points: Sequence[_Point]) -> str:
    charts = [_curve("updates", "wall clock", goodput.points, of_time=True)]
    charts.append(_curve("loss, nats a token", "update", [(it.update, it.loss) for it in points]))
    charts.append(_curve("tokens/s", "wall clock", [(it.t, it.tokens_per_s) for it in points], of_time=True, least=0.0))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style><h1>{escape(name)}</h1>"
        f'<p class="verdict">{escape(verdict(goodput))}</p><p>{_cause(goodput.starts[-1])}</p>'
        f"<p>{escape(goodput.compared)}</p>{_strip(goodput)}"
        f"<h2>Where the time went</h2>{_buckets(goodput)}<h2>Starts and stops</h2>{_stops(goodput)}"
        f"<h2>Curves</h2>{''.join(charts)}</html>\n"
    )


def _buckets(goodput: Goodput) -> str:
    rows = []
    for bucket, seconds in goodput.seconds.items():
        colour, meaning, help = _TOLD[bucket]
        name, share = f'<i style="background:{colour}"></i>{bucket}', f"{seconds / (goodput.wall_s or 1):.1%}"
        rows += [[name, duration(seconds), share, meaning, help]] if seconds >= 0.05 else []
    return _table(["", "time", "share", "what it is", "what makes it less"], rows)


def _stops(goodput: Goodput) -> str:
    """Return the causes by their number, the times of restarts, and the last starts."""
    stopped = [one for one in goodput.starts if one.state not in ("finished", "running")]
    causes = Counter(one.state for one in stopped).most_common()
    told = ", ".join(
        [f"{len(stopped)} stop{'s' * (len(stopped) != 1)}", *(f"{number} {state}" for state, number in causes)]
    )
    restarts = [one for one in goodput.starts[1:] if len(one.ready) == 3]
    parts = {
        "down": [one.seconds[DOWN] for one in restarts],
        "meeting": [one.ready["joined"] for one in restarts],
        "loading": [one.ready["loaded"] - one.ready["joined"] for one in restarts],
        "first step": [one.ready["first_step"] - one.ready["loaded"] for one in restarts],
    }
    if restarts:
        told += "; median of the restarts: "
        told += ", ".join(f"{part} {duration(statistics.median(times))}" for part, times in parts.items())
    shown = goodput.starts[-_SHOWN:]
    if len(shown) < len(goodput.starts):
        told += f". The last {len(shown)} of {len(goodput.starts)} starts:"
    heads = ["start", "began", "host", "down before", "updates", "lost", "redone", "end", "cause"]
    return f"<p>{escape(told)}</p>{_table(heads, [_stop(one) for one in reversed(shown)])}"


def _stop(one: OneStart) -> list[str]:
    down, lost, redone = one.seconds[DOWN], one.last - one.kept, one.seconds[REDONE]
    return [
        f"{one.starts}",
        _clock(one.t, "%m-%d %H:%M"),
        escape(one.host),
        duration(down) if down >= 0.05 else "",
        f"{one.first:,} to {one.last:,}",
        f"{lost:,}" if lost else "",
        duration(redone) if redone >= 0.05 else "",
        escape(one.state.replace("_", " ")),
        _cause(one),
    ]


def _cause(one: OneStart) -> str:
    return escape(one.reason.partition("\n")[0][:300])


def _strip(goodput: Goodput) -> str:
    """Return the run's wall clock as a strip: for each start its way to the loop, what was kept, what was redone."""
    begin, end = goodput.starts[0].t, goodput.starts[-1].end_t
    scale = 1000 / max(end - begin, 1e-9)
    paths = dict.fromkeys((START, TRAINED, REDONE), "")
    for one in goodput.starts:
        ready = one.t + min(one.ready.get("first_step", one.end_t - one.t), one.end_t - one.t)
        borders = [one.t, ready, max(ready, one.end_t - one.seconds[REDONE]), one.end_t]
        for bucket, left, right in zip(paths, borders, borders[1:], strict=False):
            if right > left:
                paths[bucket] += (
                    f"M{(left - begin) * scale:.1f} 0h{(right - left) * scale:.2f}V1H{(left - begin) * scale:.1f}"
                )
    drawn = "".join(f'<path fill="{_TOLD[bucket][0]}" d="{path}"/>' for bucket, path in paths.items())
    return (
        f'<svg viewBox="0 0 1000 1" height="28" preserveAspectRatio="none" style="background:{_TOLD[DOWN][0]}">{drawn}'
        f'</svg><div class="axis"><span>{_clock(begin)}</span><span>{_clock(end)}</span></div>'
        f"<p>{_STRIP}</p>"
    )


def _curve(
    title: str, across: str, points: Sequence[tuple[float, float]], *, of_time: bool = False, least: float | None = None
) -> str:
    """Return a curve of points with its title and the ends of its axes; "" if there are less than two points."""
    if len(points) < 2:
        return ""
    every = -(-len(points) // _POINTS)
    parts = [points[place : place + every] for place in range(0, len(points), every)]
    drawn = [point for part in parts for point in sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})]
    (left, right), heights = (points[0][0], points[-1][0]), [height for _, height in drawn]
    low, high = min([*heights, *([] if least is None else [least])]), max(heights)
    wide, tall = 1000 / ((right - left) or 1.0), 200 / ((high - low) or 1.0)
    line = " ".join(f"{(x - left) * wide:.1f},{(high - y) * tall:.1f}" for x, y in drawn)
    ends = (_clock(left), _clock(right)) if of_time else (f"{left:,.0f}", f"{right:,.0f}")
    return (
        f'<h3>{title}</h3><div class="axis"><span>{high:,.6g}</span></div><svg viewBox="0 0 1000 200" height="180" '
        f'preserveAspectRatio="none"><polyline points="{line}"/></svg><div class="axis"><span>{low:,.6g}</span></div>'
        f'<div class="axis"><span>{ends[0]}</span><span>{across}</span><span>{ends[1]}</span></div>'
    )


class _Point(NamedTuple):
    """A row of the metrics: seconds since 1970, update, loss in nats a token."""

    t: float
    update: int
    loss: float
    tokens_per_s: float


def _points(path: Path) -> Iterator[_Point]:
    """Yield each whole row with numbers for all of a point."""
    time, known, rate = TAGS["time"], TAGS["loss"], TAGS["tokens_per_s"]
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            if known.encode() in line:
                row: dict[str, Any] = from_json(line)
                point = _Point(row[time] + 0.0, row["step"] + 0, row[known] + 0.0, row[rate] + 0.0)
                if all(abs(number) < _MOST for number in point):  # a loss that is no number has no place in a curve
                    yield point


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{text}</th>" for text in heads)
    body = ""
    for row in rows:
        cells = (f'<td title="{head}">{text}</td>' for head, text in zip(heads, row, strict=True))
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _clock(t: float, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime(form)
