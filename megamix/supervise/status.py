"""The end of a run: its error, `status.json`, and the exit status. By status and exit status a scheduler or a person
decides whether to start the run again.

The file is needed beside the exit status: plain torchrun ends with 1 if a rank fails, and a killed process chooses no
exit status. This module imports no torch.
"""

import datetime
import functools
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from megamix.config import ConfigError
from megamix.durable import write_text
from megamix.signals import PREEMPTED, SAVE_FAILED, reason_words
from megamix.supervise.console import say

STATUS = "status.json"

State = Literal["running", "finished", "preempted", "failed", "gave_up"]

# 2 is taken by wrong input, which starts no run. "running" has no exit status.
EXIT_STATUS: dict[State, int] = {"finished": 0, "failed": 1, "gave_up": 3, "preempted": PREEMPTED}
WRONG_INPUT = ConfigError.exit_status  # a run that has begun may end with 2, too; its state is then `failed`


NO_MEMORY = 4  # with exit status 4 the state is `failed`


class EndedEarlyError(Exception):
    """The end of a run before its last update, in good order and on all ranks alike. The message says why."""

    state: State = "failed"
    exit_status = EXIT_STATUS["failed"]


class PreemptedError(EndedEarlyError):
    """The end of a run that was asked to leave."""

    state: State = "preempted"
    exit_status = EXIT_STATUS["preempted"]


class SaveFailedError(EndedEarlyError):
    """The end of a run that could not write a checkpoint: its last one, or one for which on_save_failure is "stop"."""


class WrongDataError(EndedEarlyError):
    """The end of a run that found its data wrong or changed while it read them. No step has used the wrong data."""

    exit_status = WRONG_INPUT  # a new start would meet the same data


class NoMemoryError(EndedEarlyError):
    """The end of a run because a rank ran out of memory."""

    exit_status = NO_MEMORY  # the launcher recognises this status


class NoAnswerError(EndedEarlyError):
    """The end of a start because a rank died or hung before all agreed."""


class PeerLostError(EndedEarlyError):
    """The end of a rank that lost another one, which died or hung."""


class StuckError(EndedEarlyError):
    """The end of a run that was started again and again, and failed each time before it got any further."""

    state: State = "gave_up"
    exit_status = EXIT_STATUS["gave_up"]


class LastStart(NamedTuple):
    """The words and counts of `status.json` on a run's last start. The defaults stand for a missing file."""

    state: str = "finished"
    exit_status: int | None = None  # None: it runs
    reason: str = ""
    update: int = 0  # that it has reached
    start: int = 0  # update from which it went on
    restarts: int = 0  # in a row from there, without progress
    starts: int = 0  # its number
    t: float = 0.0  # time of writing, in seconds since 1970


def read_status(folder: Path) -> LastStart:
    """Return what the last start has left in a run's folder; the defaults if there is no status of ours."""
    try:
        values = {"starts": 0} | json.loads((folder / STATUS).read_bytes())  # older ones have no number
        counts = {name: int(values[name]) for name in ("update", "start", "restarts", "starts")}
        t = datetime.datetime.fromisoformat(values["time"]).timestamp()
        return LastStart(str(values["state"]), values["exit_status"], str(values["reason"]), **counts, t=t)
    except (OSError, ValueError, KeyError, TypeError):  # no file, or not as we write it
        return LastStart()


class RunStatus:
    """Writes `status.json` in a run's folder, whole or not at all. The first rank does, or the lowest living one."""

    def __init__(
        self, folder: Path, steps: int, applied: Callable[[], int] = lambda: 0, ended: Callable[..., None] | None = None
    ):
        """Keep the folder. `applied`: returns the number of updates so far, on any thread. Before training it may
        return less than the number of the update from which the run starts. `ended`: called with `state`, `reason` and
        `exit_status` once the end is written.
        """
        self.folder, self._steps, self._applied, self._ended = folder, steps, applied, ended
        self._began: LastStart | None = None  # None on a rank that began nothing

    def begin(self, update: int, max_restarts: int, starts: int = 1) -> None:
        """Note that the run starts from `update`, the update of its newest checkpoint. Call it again if that checkpoint
        cannot be loaded and the run starts from an older one. `starts`: the number of starts, this one included.

        Raises: OSError if the file cannot be written; StuckError, which is also written to the file, after more than
        `max_restarts` restarts in a row from one update. A start after a preempted run does not count.
        """
        before = self._before
        in_vain = before.state not in ("finished", "preempted") and update <= before.start
        restarts = before.restarts + 1 if in_vain else 0
        self._began = before._replace(start=update, restarts=restarts, starts=starts)
        if restarts > max_restarts:
            stuck = StuckError(
                f"started {restarts + 1} times from update {update} without progress "
                f"(checkpoint.max_restarts {max_restarts}); find out the reason, then remove {self.folder / STATUS}. "
                f"The last start's end: {before.state} {before.reason}".strip()
            )
            self.end(stuck)
            raise stuck
        self._store("running", "")

    @functools.cached_property
    def _before(self) -> LastStart:
        """Return what the start before has left. It is read once, before this start writes. A rank that ends for the
        first one reads what that has written.
        """
        return read_status(self.folder)

    @property
    def _this(self) -> LastStart:
        """Return the counts of this start, also on a rank that did not begin it."""
        return self._began or self._before

    @property
    def _update(self) -> int:
        return max(self._this.start, self._applied())

    def end(self, error: BaseException | None) -> None:
        """Write how the run ended. `error`: the exception that ended it; None if all updates are done."""
        if error is None:
            self.write("finished")
        elif isinstance(error, EndedEarlyError):
            self.write(error.state, str(error), error.exit_status)
        else:
            notes = getattr(error, "__notes__", [])  # such as the watchdog's end reason
            self.write("failed", "\n".join([*notes, f"{type(error).__name__}: {error}"]))

    def write(self, state: State, reason: str = "", exit_status: int | None = None) -> None:
        """Write how the run ended. If the disk fails, print it on the console. `exit_status`: None is that of the
        state.
        """
        exit_status = exit_status or EXIT_STATUS[state]
        if self._ended is not None:
            self._ended(state=state, reason=reason, exit_status=exit_status)
        try:
            self._store(state, reason, exit_status)
        except OSError as error:
            say(
                f"megamix train: {self.folder / STATUS} NOT written: {error}; the run ended as {state} (exit status "
                f"{exit_status}) after update {self._update}: {reason or 'all is done'}",
                sys.stderr,
            )

    def _store(self, state: State, reason: str, exit_status: int | None = None) -> None:
        values = {
            "state": state,
            "exit_status": exit_status,
            "update": self._update,
            "steps": self._steps,
            "start": self._this.start,
            "restarts": self._this.restarts,
            "starts": self._this.starts,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "reason": reason,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        write_text(self.folder / STATUS, json.dumps(values, indent=2) + "\n")


def leaves(reason: int, applied: int, steps: int) -> EndedEarlyError:
    """Return the error with which a run leaves for this reason, after update `applied` of `steps`."""
    if reason == SAVE_FAILED:
        return SaveFailedError(f"ended after update {applied}: {reason_words(reason)}, see the log")
    return PreemptedError(f"asked to stop ({reason_words(reason)}): ended after update {applied} of {steps}")
