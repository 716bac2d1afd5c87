"""How a run stands, by the rows of its journal: state, exit status, and the restarts without progress. This module
imports no torch.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from megamix.launch.exit_status import StuckError
from megamix.launch.journal import Journal, Row, read_rows


class RunStatus(NamedTuple):
    """How a run stands after a start. The defaults stand for a run without one."""

    state: str = "finished"
    exit_status: int | None = None  # None: it runs, or was killed
    reason: str = ""
    update: int = 0  # that it has reached
    start: int = 0  # update from which it went on
    restarts: int = 0  # in a row from there, without progress
    starts: int = 0  # its number


def statuses(rows: Iterable[Row]) -> Iterator[RunStatus]:
    """Yield a run's status after each of its starts, by the rows of its journal. A start after a preempted run is no
    restart without progress.
    """
    status = RunStatus()
    for number, group in groupby(rows, itemgetter("starts")):
        one = [*group]
        end = one[-1] if one[-1]["kind"] == "end" else {}
        # A start whose newest checkpoint is damaged loads an older one.
        start = [row["step"] for row in one if row is one[0] or row["kind"] == "loaded"][-1]
        in_vain = status.state not in ("finished", "preempted") and start <= status.start
        status = RunStatus(
            state=end.get("state", "running"),
            exit_status=end.get("exit_status"),
            reason=end.get("reason", ""),
            update=max(start, one[-1]["step"]),
            start=start,
            restarts=status.restarts + 1 if in_vain else 0,
            starts=number,
        )
        yield status


def read_status(folder: Path) -> RunStatus:
    """Return how the run in a folder stands; the defaults if its journal cannot be read."""
    with suppress(OSError):
        return [RunStatus(), *statuses(read_rows(folder))][-1]
    return RunStatus()


def refuse_if_stuck(journal: Journal, max_restarts: int) -> None:
    """Refuse a start after more than `max_restarts` restarts in a row from one update.

    Raises: StuckError, which is also written as the end; OSError.
    """
    before, last = [RunStatus(), *statuses(read_rows(journal.folder))][-2:]
    if last.restarts > max_restarts:
        stuck = StuckError(
            f"started {last.restarts + 1} times from update {last.start} without progress (checkpoint.max_restarts "
            f"{max_restarts}); find out the reason, then write max_restarts = {last.restarts + 1} or more. "
            f"The last start's end: {before.state} {before.reason}".strip()
        )
        journal.end(stuck)
        raise stuck
