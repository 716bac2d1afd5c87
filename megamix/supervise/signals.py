"""Being asked to leave: the signals by which that is said are only noted, and training ends at its next update.

A handler must not do more: it may run in the middle of anything, a save included.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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
    """How long a launcher, if there is one, waits after SIGTERM: 30 s unless it was told otherwise."""
    return float(os.environ.get(SHUTDOWN_VARIABLE, "30")) if launched else math.inf


def noted_signals() -> list[signal.Signals]:
    """Those to note in this process: not a SIGHUP that is ignored, as under nohup: such a run outlives its terminal."""
    return [number for number in NOTED if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def signals_noted(shutdown_s: float = math.inf) -> Iterator[LeaveRequest]:
    """Until the end of the block signals only fill in the request; a third SIGINT raises KeyboardInterrupt.

    Only the main thread may call it.
    """
    request = LeaveRequest(shutdown_s)
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


def reason_words(reason: int) -> str:
    ours = {PARENT_DIED: "a launcher died", SAVE_FAILED: "a checkpoint could not be saved"}
    return ours.get(reason) or signal.Signals(reason).name
