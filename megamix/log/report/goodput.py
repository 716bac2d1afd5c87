"""Goodput of a run: what its wall time went into, from its events. This module imports no torch.

Trained is the wall time of the attempts whose update the run has kept: those of a start count up to
the update from which a later start went on, or, if no start followed, up to its own newest checkpoint. A run that goes
on has trained all that it has done so far.
"""

from __future__ import annotations

import time
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from megamix.base.progress import duration
from megamix.launch.journal import JOURNAL, KILLED, Row, closing_row, read_rows
from megamix.launch.ledger import BUCKETS, DOWN, REDONE, STALLED, TRAINED, stalled_s

STALE_S = 60.0  # seconds without a sign of life after which a run counts as dead
RUNNING, STALE = "running", "stale"  # states of a start without an end, beside those that an end says
_READY = ("launched", "joined", "loaded", "first_step")  # kinds of rows on the way to the first step


class OneStart(NamedTuple):
    """One start of a run. `t` and `end_t` are seconds since 1970."""

    starts: int  # its number
    host: str
    t: float
    end_t: float
    first: int  # update from which it went on
    source: str  # from where: memory, disk, or empty for a new run
    last: int  # update that it reached
    kept: int  # update up to which its work was kept
    seconds: dict[str, float]  # by bucket; down is the time since the end of the start before
    ready: dict[str, float]  # seconds until its ranks were launched, joined, loaded, at first_step, as far as it came
    state: str
    reason: str
    ranks: str

    @property
    def ended(self) -> str:
        return {"preempted": "stopped on request"}.get(self.state, self.state.replace("_", " "))


class Goodput(NamedTuple):
    """All starts of a run, and their seconds by bucket, which add up to the run's wall time."""

    starts: list[OneStart]
    seconds: dict[str, float]
    steps: int  # updates of the whole run
    facts: Row  # the event of the last start: what trained where
    compared: str  # the log's line on a step's planned and measured time; empty without one

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Return the share of the wall time that trained, 0 to 1."""
        return self.seconds[TRAINED] / (self.wall_s or 1.0)


def read_goodput(folder: Path, now_t: float | None = None) -> Goodput:
    """Return the goodput of the run in a folder, which may go on meanwhile. `now_t`: seconds since 1970.

    Raises: ValueError naming a folder without events; OSError.
    """
    rows = read_rows(folder)
    if not rows:
        lacks = f"has no start in {JOURNAL}" if folder.is_dir() else "is no folder"
        raise ValueError(f"RUN: {folder} {lacks}; give the checkpoint.folder of a run")
    if rows[-1]["kind"] != "end":
        rows.append(_present(rows[-1], time.time() if now_t is None else now_t))
    starts = list[OneStart]()
    kept = None  # the update from which the starts after this one went on
    for _, group in groupby(reversed(rows), itemgetter("starts")):
        starts.append(_one_start([*group][::-1], kept))
        kept = starts[-1].first if kept is None else min(kept, starts[-1].first)
    starts.reverse()
    for before, after in pairwise(starts):
        after.seconds[DOWN] = max(0.0, after.t - before.end_t)  # two hosts may have two clocks
    seconds = {bucket: sum(one.seconds.get(bucket, 0.0) for one in starts) for bucket in BUCKETS}
    compared = next((row["words"] for row in reversed(rows) if "words" in row), "")
    facts = next((row for row in reversed(rows) if row["kind"] == "start"), {})
    return Goodput(starts, seconds, facts.get("steps", 0), facts, compared)


def _present(last: Row, now_t: float) -> Row:
    """Return a row for the present of a run whose last start has not written its end, by its last row."""
    ended = closing_row(last)
    silent_s = now_t - ended["t"]
    if silent_s > STALE_S:
        reason = f"no sign of life for {duration(silent_s)}: killed, or its machine is lost or stopped"
        return {**ended, "state": STALE, "reason": reason}
    return {**ended, "at": ended["at"] + max(0.0, silent_s), "state": RUNNING, "reason": ""}


def _one_start(rows: list[Row], kept: int | None) -> OneStart:
    """Return a start by its rows. `kept`: the update from which a later start went on; None if there is none."""
    start, end = rows[0], rows[-1]
    ready = {row["kind"]: row["at"] for row in rows if row["kind"] in _READY}
    first = next((row["step"] for row in rows if row["kind"] == "loaded"), start["step"])
    source = "memory" if any(row.get("memory") for row in rows) else "disk" if first else ""
    state = end.get("state", KILLED)  # the end of a start may lie in a line that a disk has lost
    last, runs = end["step"], state == RUNNING
    if kept is None:
        saves = [row["saved"] for row in rows if "saved" in row]
        kept = last if runs else max(saves, default=first)
    seconds = {bucket: end["seconds"].get(bucket, 0.0) for bucket in BUCKETS}
    trained_s, open_s = seconds[TRAINED], max(0.0, end["at"] - sum(seconds.values()))
    reason = end.get("reason", "")
    if end["phase"] == TRAINED:  # in an attempt whose outcome is not known
        seconds[STALLED] += (stood_s := stalled_s(open_s, trained_s / max(1, last - first)))
        if runs and stood_s:
            reason = f"no update for {duration(open_s)}"
        open_s -= stood_s
    seconds[TRAINED if runs else REDONE if end["phase"] == TRAINED else end["phase"]] += open_s
    if kept < last:
        lost_s = trained_s - _trained_at(kept, first, rows)
        seconds[TRAINED] -= lost_s
        seconds[REDONE] += lost_s
    facts = start.get("host", ""), start["t"], end["t"], first, source, last, min(kept, last)
    return OneStart(start["starts"], *facts, seconds, ready, state, reason, str(start.get("ranks", "")))


def _trained_at(update: int, first: int, rows: list[Row]) -> float:
    """Return the seconds that had trained when `update` was applied: those of the row at it, or between two rows."""
    points: list[tuple[int, float]] = [(first, 0.0), *((row["step"], row["seconds"].get(TRAINED, 0.0)) for row in rows)]
    if update <= first:
        return 0.0
    step, seconds = max(point for point in points if point[0] <= update)
    later, later_s = min(point for point in points if point[0] > update)
    return seconds + (later_s - seconds) * (update - step) / (later - step)


def verdict(goodput: Goodput) -> str:
    """Return in one line how the run stands, and the share of its wall clock that trained."""
    last = goodput.starts[-1]
    starts = f"in {len(goodput.starts)} starts" if len(goodput.starts) > 1 else "without a restart"
    return (
        f"{last.ended} at update {last.last:,} of {goodput.steps:,}, after {duration(goodput.wall_s)} {starts}: "
        f"{goodput.share:.1%} of that time trained"
    )
