"""Lines on the console; on a terminal a progress bar below them, in a log file nothing but the lines."""

import io
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

_PATIENCE_S = 5.0  # for ranks to start, one later than the other, and for torchrun to see one end


def open_streams() -> None:
    """At the start of a process: have standard streams that take any line. One that is closed, as of a daemon, becomes
    /dev/null, lest the next file that is opened get its number and all that libraries say. A letter that its encoding
    lacks is written by its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # the lowest number first
        stream = getattr(sys, name)
        if stream is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line at once: whoever follows a log file waits for it. Where nobody reads any more, since the reader has
    died or the terminal is closed, it is lost: that must not end a run that can still save.
    """
    with suppress(OSError):
        print(text, file=stream, flush=True)


def say_on_first_rank(text: str, stream: TextIO | None = None) -> None:
    """Every rank of a distributed run reads the same configuration and ends alike; one of them says so."""
    if os.environ.get("RANK", "0") == "0":
        say(text, stream)


def say_phase(phase: str) -> None:
    """Say what whoever waits for a run's first step waits for now; beside the log."""
    say_on_first_rank(f"megamix train: {phase}", sys.stderr)


def say_unless_first_did(text: str, stream: TextIO | None = None) -> None:
    """Say it on the first rank, before an end. Under torchrun another one waits until the first has said it and ended,
    and is ended with it; else it is alone with this, and says it.
    """
    say_on_first_rank(text, stream)
    rank = os.environ.get("RANK", "0")
    if rank != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(_PATIENCE_S + int(os.environ.get("LOCAL_RANK", "0")))  # of a machine the first one is enough
        say(f"rank {rank}: {text}", stream)


def drop_unwritten() -> None:
    """Before the end of a process: what nobody can read any more is forgotten. Python would try to write it once more,
    and end with 120 instead of the exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Console:
    """Speaks on the first rank only. Raises no OSError: a dead reader, a terminal that is gone or a full disk must not
    end a run that can still save.
    """

    def __init__(self, steps: int, *, speaks: bool):
        self._speaks = speaks
        self._bar = _progress_bar(steps) if speaks and sys.stdout.isatty() else None

    def line(self, text: str) -> None:
        if self._bar is not None:
            self._on_bar("write", text)
        elif self._speaks:
            say(text)

    @contextmanager
    def telling(self, path: Path) -> Iterator[None]:
        """Write a file that a run can do without: where the disk does not take it, that is a line and no more."""
        try:
            yield
        except OSError as error:
            self.line(f"{path} NOT written: {error}")

    def begin(self, steps: int) -> None:
        """Begin the bar behind these steps, and judge its speed from here."""
        if self._bar is not None:
            self._bar.initial = self._bar.n = self._bar.last_print_n = steps

    def advance(self) -> None:
        """Move the bar on by a step."""
        self._on_bar("update")

    def show(self, text: str) -> None:
        """Show a text behind the bar, until the next one."""
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
    except ImportError:  # an extra; the lines say it all
        return None
    return tqdm(total=steps, unit="step", leave=False, dynamic_ncols=True)


COLUMNS = 100  # of a line on the console


def folded(text: str) -> str:
    """Return a text as indented lines of at most COLUMNS; a word, such as a parameter's name, stays whole."""
    return textwrap.fill(
        text, COLUMNS, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def format_scale(loss_scale: float | None) -> str:
    """Return a loss scale as its log line has it."""
    if loss_scale is None:
        return "off"
    exponent = math.log2(loss_scale)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{loss_scale:g}"
