"""Ctrl-C at a verb: its work unwinds, and it and the processes that it started end without a traceback."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType, TracebackType
from typing import Self

INTERRUPTED = 128 + signal.SIGINT  # exit status by which a shell knows an interrupted command
_AGAIN_S = 0.1  # seconds until an import that goes on is interrupted again


class Interrupt:
    """Notes a Ctrl-C in the block, where it raises KeyboardInterrupt; a second one ends the process at once.

    `seen` outlives the exception: a library may turn it into another one, as imports of extensions do, or drop it, as
    torch does while it imports numpy; then it is raised again. A process that was started with SIGINT ignored, as a
    shell's `&` does, goes on ignoring it.
    """

    def __init__(self) -> None:
        self.seen = False
        self._takes = False

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        self._takes = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._takes:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Note no Ctrl-C from here on."""
        if self.seen:
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif self._takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._takes = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if _is_importing(frame):
            signal.signal(signal.SIGALRM, self._raise_again)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        raise KeyboardInterrupt

    def _raise_again(self, number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextmanager
def starts_deaf() -> Iterator[None]:
    """Start processes in the block that a Ctrl-C does not reach. It goes to all processes of a terminal, and one whose
    imports it breaks prints a traceback. The process that started them ends them.
    """
    _start_tracker()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_tracker() -> None:
    """Start Python's resource tracker: its start would end a block of `starts_deaf`. It removes what killed processes
    leave, and shall not warn of that.
    """
    before = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = f"{before},ignore:resource_tracker".removeprefix(",")
    try:
        resource_tracker.ensure_running()
    finally:
        os.environ.pop("PYTHONWARNINGS")
        os.environ |= {"PYTHONWARNINGS": before} if before else {}


def stay_deaf() -> None:
    """Ignore Ctrl-C in a process that started deaf, but let its work take SIGINT by a handler of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
