"""Environment of a program that a test starts, and the processes that count covered lines."""

import contextlib
import os
import resource
import sys
import threading
from unittest import mock

import numpy as np

MAP_FOLDER = "MEGAMIX_LINE_MAP"  # environment variable: the folder of a map in the making (tests/line_map.py)


def counting():
    """Return this process's coverage, None where no lines are counted."""
    return sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None


@contextlib.contextmanager
def lines_counted(counts):
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


@contextlib.contextmanager
def mapped(test, counts):
    """Count the lines of a rank for `test` in the block, if a map of lines is in the making and this rank `counts`."""
    if (folder := os.environ.get(MAP_FOLDER)) is None or not counts:
        yield
        return
    import coverage

    running = coverage.Coverage(config_file=f"{folder}/settings.ini", context=test)
    running.start()
    try:
        yield
    finally:
        running.stop()
        running.save()


def stop_counting():
    """Count no more lines in this process: counting costs 38 % more processor time."""
    if (coverage := counting()) is not None:
        coverage.stop()


def count_no_lines_in_programs():
    """Take away what makes Python count covered lines in programs: importing torch takes half as long again, and so
    does each step. The tests of each room count its lines. Only a map of lines (tests/line_map.py) wants theirs.
    """
    for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"):
        os.environ.pop(name, None)
    if (folder := os.environ.get(MAP_FOLDER)) is not None:
        os.environ["COVERAGE_PROCESS_START"] = f"{folder}/settings.ini"


def fresh_pages():
    """Return how many pages 128 MiB take that are not there yet: 64 or more, unless malloc has kept as much."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def with_settings(**settings):
    """Return this process's environment with `settings`."""
    return os.environ | {name: str(value) for name, value in settings.items()}


@contextlib.contextmanager
def no_compiler():
    """Let engines take torch's own kernels until the end of the block, as on a machine without a compiler."""

    def refuse(*_):
        raise RuntimeError("no compiler")

    with mock.patch("megamix.mixed_precision.fused_update._compile", return_value=refuse):
        yield
