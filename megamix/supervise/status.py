"""How a run is asked to leave, and how it ended, for whoever decides whether to start it again: signals that are only
noted, `status.json`, and the process's exit status.

torchrun ends with 1 whatever its ranks ended with, and a killed process with no status of its own; the file says what
happened, also to those who were not there. No torch here.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

from megamix.durable import read_own, write_text
from megamix.supervise.console import say

STATUS = "status.json"

State = Literal["running", "finished", "preempted", "failed", "gave_up"]

# 75 is EX_TEMPFAIL of sysexits.h, "try again later"; 2 is taken by wrong input, which starts no run.
EXIT_STATUS: dict[State, int] = {"finished": 0, "failed": 1, "gave_up": 3, "preempted": 75}  # none while it runs
WRONG_INPUT: Literal[2] = 2  # also of a run that had begun, whose state is then `failed`


NO_MEMORY: Literal[4] = 4  # likewise


class EndedEarlyError(Exception):
    """The run ended in good order, on all ranks alike, before all its updates; the message says why."""

    state: State = "failed"

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.state]


class PreemptedError(EndedEarlyError):
    """The run was asked to leave."""

    state: State = "preempted"


class SaveFailedError(EndedEarlyError):
    """A checkpoint could not be written, and going on without one was not wanted or made no sense."""


class WrongDataError(EndedEarlyError):
    """The data turned out wrong, or were changed, while the run read them. No step has used them."""

    @property
    def exit_status(self) -> int:
        return WRONG_INPUT  # started again it would meet the same


class NoMemoryError(EndedEarlyError):
    """A rank ran out of memory."""

    @property
    def exit_status(self) -> int:
        return NO_MEMORY  # by which the launcher knows


class NoAnswerError(EndedEarlyError):
    """A rank died or hung before all had agreed, or the store holds what no rank has written."""


class StuckError(EndedEarlyError):
    """The run was started again and again, and fails before it gets any further."""

    state: State = "gave_up"


class RunStatus:
    """Writes `status.json` in a run's folder: whole or not there. The first rank does, or the lowest that lives."""

    def __init__(self, folder: Path, steps: int, applied: Callable[[], int] = lambda: 0):
        """`applied`: updates so far, for any thread; less than what the run starts from until it trains."""
        self.folder, self._steps, self._applied = folder, steps, applied
        self._start, self._restarts = 0, 0

    def begin(self, update: int, max_restarts: int) -> None:
        """Note that the run starts from `update`, as its newest save has it; call it again if that save cannot be
        loaded and it starts from an older one.

        Raises: OSError if it cannot be written down; StuckError, written down as well, at more than `max_restarts`
        starts in a row from one update; those after a run that was asked to leave do not count.
        """
        state, start, restarts, reason = self._earlier
        in_vain = state not in ("finished", "preempted") and update <= start
        self._start, self._restarts = update, restarts + 1 if in_vain else 0
        if self._restarts > max_restarts:
            stuck = StuckError(
                f"started {self._restarts + 1} times from update {update} without progress "
                f"(checkpoint.max_restarts {max_restarts}); find out why, then remove {self.folder / STATUS}. "
                f"The last start's end: {state} {reason}".strip()
            )
            self.end(stuck)
            raise stuck
        self._store("running", "")

    @functools.cached_property
    def _earlier(self) -> tuple[str, int, int, str]:
        """State, start, restarts and reason that the start before left, read before this one has written anything."""
        try:
            values = json.loads(read_own(self.folder / STATUS))
            return values["state"], int(values["start"]), int(values["restarts"]), values["reason"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # none, or not ours
            return "finished", 0, 0, ""

    @property
    def _update(self) -> int:
        return max(self._start, self._applied())

    def end(self, error: BaseException | None) -> None:
        """Leave how the run ended, by what it ended with; None: all is done."""
        if error is None:
            self.write("finished")
        elif isinstance(error, EndedEarlyError):
            self.write(error.state, str(error), error.exit_status)
        else:
            notes = getattr(error, "__notes__", [])  # the watchdog's verdict
            self.write("failed", "\n".join([*notes, f"{type(error).__name__}: {error}"]))

    def write(self, state: State, reason: str = "", exit_status: int | None = None) -> None:
        """Leave how the run ended; where the disk does not take that, it goes to the console. `exit_status`: the
        state's own unless given.
        """
        try:
            self._store(state, reason, exit_status)
        except OSError as error:
            say(
                f"megamix train: {self.folder / STATUS} NOT written: {error}; the run ended as {state} (exit status "
                f"{exit_status or EXIT_STATUS[state]}) after update {self._update}: {reason or 'all is done'}",
                sys.stderr,
            )

    def _store(self, state: State, reason: str, exit_status: int | None = None) -> None:
        values = {
            "state": state,
            "exit_status": exit_status or EXIT_STATUS.get(state),
            "update": self._update,
            "steps": self._steps,
            "start": self._start,
            "restarts": self._restarts,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "reason": reason,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        write_text(self.folder / STATUS, json.dumps(values, indent=2) + "\n")


# SIGHUP: the terminal was closed, or the connection to it was lost. SIGQUIT: Ctrl-\\; it dumps no core here.
_PRESSING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # who sends one does not wait for ever
NOTED = (*_PRESSING, signal.SIGUSR1)
PARENT_DIED, SAVE_FAILED = 256, 257  # reasons beside the signals' numbers
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # torchrun's name; our launcher sets it


class LeaveRequest:
    """Whether this rank was asked to leave, and why: 0, a signal's number, or a reason of ours. The first one stays.

    `shutdown_s`: how long after any signal but SIGUSR1 the launcher kills its ranks; inf: never.
    """

    def __init__(self, shutdown_s: float = math.inf, now_s: Callable[[], float] = time.monotonic) -> None:
        self.reason = 0
        self._shutdown_s, self._now_s = shutdown_s, now_s
        self._end_s = math.inf

    def ask(self, reason: int) -> None:
        self.reason = self.reason or reason
        if reason in _PRESSING:  # also after SIGUSR1, for which nobody is killed
            self._end_s = min(self._end_s, self._now_s() + self._shutdown_s)

    def left_s(self) -> float:
        """Until the launcher kills this rank."""
        return self._end_s - self._now_s()


def shutdown_s(launched: bool) -> float:
    """Return how long a launcher, if there is one, waits after SIGTERM: 30 s unless it was told otherwise."""
    return float(os.environ.get(SHUTDOWN_VARIABLE, "30")) if launched else math.inf


def noted_signals() -> list[signal.Signals]:
    """Return those to note in this process: not a SIGHUP that is ignored, as under nohup: such a run outlives its
    terminal.
    """
    return [number for number in NOTED if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def signals_noted(*, launched: bool = False) -> Iterator[LeaveRequest]:
    """Note signals until the end of the block: they only fill in the request, and training ends at its next update. A
    handler must not do more: it may run in the middle of anything, a save included. A third SIGINT raises
    KeyboardInterrupt.

    Only the main thread may call it. `launched`: a launcher ends this process some time after a signal.
    """
    request = LeaveRequest(shutdown_s(launched))
    interrupts = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        request.ask(number)
        interrupts += number == signal.SIGINT
        if interrupts == 3:  # somebody sits at the terminal and has lost patience
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in noted_signals()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leaves(reason: int, applied: int, steps: int) -> EndedEarlyError:
    """Return how a run ends that leaves for this reason after update `applied` of `steps`."""
    if reason == SAVE_FAILED:
        return SaveFailedError(f"ended after update {applied}: {reason_words(reason)}, see the log")
    return PreemptedError(f"asked to stop ({reason_words(reason)}): ended after update {applied} of {steps}")


def reason_words(reason: int) -> str:
    ours = {PARENT_DIED: "a launcher died", SAVE_FAILED: "a checkpoint could not be saved"}
    return ours.get(reason) or signal.Signals(reason).name
