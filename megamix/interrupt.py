"""Ctrl-C at a verb: its work unwinds, and it and the processes that it started end without a traceback."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Self

INTERRUPTED = 128 + signal.SIGINT  # exit status by which a shell knows an interrupted command


class Interrupt:
    """Notes a Ctrl-C in the block, where it raises KeyboardInterrupt; a second one ends the process at once.

    `seen` outlives the exception: a library may turn it into another one, as imports of extensions do. A process that
    was started with SIGINT ignored, as a shell's `&` does, goes on ignoring it.
    """

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Note no Ctrl-C from here on."""
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt


@contextmanager
def starts_deaf() -> Iterator[None]:
    """Start processes in the block that a Ctrl-C does not reach. It goes to all processes of a terminal, and one whose
    imports it breaks prints a traceback. The process that started them ends them.
    """
    resource_tracker.ensure_running()  # its start would end the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_deaf() -> None:
    """Ignore Ctrl-C in a process that started deaf, but let its work take SIGINT by a handler of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
