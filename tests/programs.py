"""Environment of a program that a test starts, and the processes that count covered lines."""

import contextlib
import os
import resource
import sys
from unittest import mock

import numpy as np

MAP_FOLDER = "MEGAMIX_LINE_MAP"  # environment variable: the folder of a map in the making (tests/line_map.py)


def counting():
    """Return this process's coverage, None where no lines are counted."""
    return sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None


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


def map_programs():
    """Let programs count their lines for the test that starts them, if a map of lines is in the making."""
    if (folder := os.environ.get(MAP_FOLDER)) is not None:
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
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
