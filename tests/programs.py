"""Environment of a program that a test starts, and the processes that count covered lines."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np


def counting() -> Any:
    """Return this process's coverage, None where no lines are counted."""
    return sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None


@contextlib.contextmanager
def lines_counted(counts: bool) -> Iterator[None]:
    """Count no covered lines until the end of the block unless it `counts`."""
    before = sys.gettrace(), threading.gettrace()
    if not counts:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if not counts:
            sys.settrace(before[0])
            threading.settrace(before[1])  # type: ignore[arg-type]


def stop_counting() -> None:
    """Count no more lines in this process: counting costs 38 % more processor time."""
    if (coverage := counting()) is not None:
        coverage.stop()


def count_no_lines_in_programs() -> None:
    """Take away what makes Python count covered lines in programs: importing torch takes half as long again, and so
    does each step. The tests of each room count its lines.
    """
    for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"):
        os.environ.pop(name, None)


def fresh_pages() -> int:
    """Return how many pages 128 MiB take that are not there yet: 64 or more, unless malloc has kept as much."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def with_settings(**settings: object) -> dict[str, str]:
    """Return this process's environment with `settings`."""
    return os.environ | {name: str(value) for name, value in settings.items()}


@contextlib.contextmanager
def no_compiler() -> Iterator[None]:
    """Let engines take torch's own kernels until the end of the block, as on a machine without a compiler."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no compiler")

    with mock.patch("megamix.mixed_precision.fused_update._compile", return_value=refuse):
        yield
