"""Being asked to leave: SIGTERM, SIGINT and SIGUSR1 are only noted, and training ends at its next update.

A handler must not do more: it may run in the middle of anything, a save included.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PARENT_DIED, SAVE_FAILED = 256, 257  # reasons beside the signals' numbers


class LeaveRequest:
    """Whether this rank was asked to leave, and why: 0, a signal's number, or a reason of ours. The first one stays."""

    def __init__(self) -> None:
        self.reason = 0

    def ask(self, reason: int) -> None:
        self.reason = self.reason or reason


@contextmanager
def signals_noted() -> Iterator[LeaveRequest]:
    """Until the end of the block signals only fill in the request; a third SIGINT raises KeyboardInterrupt.

    Only the main thread may call it.
    """
    request = LeaveRequest()
    interrupts = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        request.ask(number)
        interrupts += number == signal.SIGINT
        if interrupts == 3:  # somebody sits at the terminal and has lost patience
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in NOTED}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reason_words(reason: int) -> str:
    ours = {PARENT_DIED: "a launcher died", SAVE_FAILED: "a checkpoint could not be saved"}
    return ours.get(reason) or signal.Signals(reason).name
