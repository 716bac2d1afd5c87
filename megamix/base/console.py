"""Lines on the console. A terminal also shows a progress bar below them; a log file has only the lines."""

import atexit
import io
import math
import os
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from megamix.base.processes import repeated
from megamix.base.progress import ProgressLine

_PATIENCE_S = 5.0  # seconds within which all ranks start, and torchrun notices that one has ended
_STILL_S = 5.0  # seconds without a line after which a phase says that it goes on


def open_streams() -> None:
    """Make the standard streams take any line; call it when a process starts. A closed stream, as `>&-` leaves it,
    becomes /dev/null: otherwise libraries would print into the next file that is opened. A character that a stream's
    encoding lacks is written as its number.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of their descriptors
        stream = getattr(sys, name)
        if stream is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict" and name != "stdin":
            stream.reconfigure(errors="backslashreplace")


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line and flush it, because people follow log files. If the reader has died or the terminal is closed, the
    line is lost: this must not end a run that can still save.
    """
    with suppress(OSError):
        print(text, file=stream, flush=True)


def say_on_first_rank(text: str, stream: TextIO | None = None) -> None:
    """Print a line on the first rank only. It is for lines that every rank would print, as for a wrong
    configuration.
    """
    if os.environ.get("RANK", "0") == "0":
        say(text, stream)


def say_phase(phase: str) -> None:
    """Print the phase of a starting run on stderr, for people who wait for its first step."""
    say_on_first_rank(f"megamix train: {phase}", sys.stderr)


@contextmanager
def phase(words: str) -> Iterator[None]:
    """Print a phase that may take long. Until the end of the block, print from time to time how long it has taken."""
    say_phase(words)
    start_s = time.monotonic()

    def tell_seconds() -> None:
        say_phase(f"still {words.partition(';')[0]}, {time.monotonic() - start_s:.0f} s")

    with repeated(tell_seconds, _STILL_S, "phase"):
        yield


def say_unless_first_did(text: str, stream: TextIO | None = None) -> None:
    """Print the reason why this process is about to end. The first rank prints at once. Under torchrun another rank
    waits first: if the first rank ends for the same reason, torchrun ends this rank, too. If it does not, this rank
    prints.
    """
    say_on_first_rank(text, stream)
    rank = os.environ.get("RANK", "0")
    if rank != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
        # The machine's first rank waits least. After it has printed and ended, torchrun ends the others.
        time.sleep(_PATIENCE_S + int(os.environ.get("LOCAL_RANK", "0")))
        say(f"rank {rank}: {text}", stream)


def drop_unwritten() -> None:
    """Drop output that nobody can read any more; call it before a process ends. Python would try to write it once more,
    and end with 120 instead of the exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end_process(status: int) -> NoReturn:
    """End this process as Python does, but without an end of the interpreter. A thread that comes back from torch then
    would abort the process, and a run that has finished would count as failed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # Python's own first step: it waits for threads
    atexit._run_exitfuncs()
    drop_unwritten()
    os._exit(status)


def when_finished(work: Callable[[], object]) -> None:
    """Call `work` when this program has ended, while Python still runs; not after an uncaught error, which waits for
    nobody. If it fails, the program ends with 1.
    """

    def run() -> None:
        # Python keeps an uncaught error there, and in a notebook each error of a cell.
        if hasattr(sys, "last_value") and not hasattr(sys, "ps1"):
            return
        try:
            work()
        except Exception:
            traceback.print_exc()
            end_process(1)

    atexit.register(run)


class Console:
    """A console that prints only on the first rank (`speaks`). It raises no OSError: a dead reader, a closed terminal
    or a full disk must not end a run that can still save.
    """

    def __init__(self, steps: int, *, speaks: bool):
        self._speaks = speaks
        self._bar = _progress_bar(steps) if speaks and sys.stdout.isatty() else None

    def line(self, text: str) -> None:
        if self._bar is not None:
            self._on_bar("write", text)
        elif self._speaks:
            say(text)

    def lines(self, *texts: str) -> None:
        """Print those lines that are not empty."""
        for text in filter(None, texts):
            self.line(text)

    @contextmanager
    def telling(self, path: Path) -> Iterator[None]:
        """Turn an OSError of the block into a line. `path`: the file that is written, which the run can do without."""
        try:
            yield
        except OSError as error:
            self.line(f"{path} NOT written: {error}")

    def begin(self, steps: int) -> None:
        """Set the bar to `steps`, and measure its speed from now on."""
        if self._bar is not None:
            self._bar.initial = self._bar.n = self._bar.last_print_n = steps

    def advance(self) -> None:
        self._on_bar("update")

    def show(self, text: str) -> None:
        """Show a text behind the bar, until the next text."""
        self._on_bar("set_postfix_str", text)

    def close(self) -> None:
        self._on_bar("close")

    def _on_bar(self, call: str, *arguments: object) -> None:
        with suppress(OSError):
            if self._bar is not None:
                getattr(self._bar, call)(*arguments)


def _progress_bar(steps: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # tqdm is an optional dependency
        return None
    return tqdm(total=steps, unit="step", leave=False, dynamic_ncols=True)


COLUMNS = 100  # characters of a line on the console


def folded(text: str) -> str:
    """Return a text as indented lines of at most COLUMNS characters. A longer word, such as a parameter's name, stays
    whole.
    """
    return textwrap.fill(
        text, COLUMNS, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def format_scale(loss_scale: float) -> str:
    """Return a loss scale as text, as log lines show it: 2^16."""
    exponent = math.log2(loss_scale)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{loss_scale:g}"


class Failed(str):
    """Line that gives a negative answer: the verb's exit status is 1."""


def print_lines(lines: Iterator[str], progress: ProgressLine | None = None) -> bool:
    """Print each line as it comes. Return whether all were printed, and none is `Failed`.

    A reader may close the pipe when it has seen enough, as `head` does. `progress`: prints nothing meanwhile.
    """
    progress = progress or ProgressLine()
    passed = True
    for line in lines:
        passed = passed and not isinstance(line, Failed)
        try:
            with progress.aside():
                print(line, flush=True)
        except BrokenPipeError:  # around this print alone: any other broken pipe, such as a worker's, is an error
            drop_unwritten()
            return False
    return passed
