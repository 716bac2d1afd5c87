"""What a program that a test starts finds in its environment, and who counts covered lines."""

from __future__ import annotations

import os
import sys
from typing import Any


def counting() -> Any:
    """Return this process's coverage, None where no lines are counted."""
    return sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None


def count_lines_on_first_rank(rank: int) -> None:
    """Stop coverage on every other rank: counting costs 38 % more processor time, and the first runs their lines."""
    if rank > 0 and (coverage := counting()) is not None:
        coverage.stop()


def count_no_lines_in_programs() -> None:
    """Take away what makes Python count covered lines in programs: importing torch takes half as long again, and so
    does each step. The tests of each room count its lines.
    """
    for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"):
        os.environ.pop(name, None)


def with_settings(**settings: object) -> dict[str, str]:
    """Return this process's environment with `settings`."""
    return os.environ | {name: str(value) for name, value in settings.items()}
