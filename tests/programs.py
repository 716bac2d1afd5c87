"""What a program that a test starts finds in its environment."""

from __future__ import annotations

import os

_COUNTING = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
_taken: dict[str, str] = {}


def count_no_lines_in_programs() -> None:
    """Take away what makes Python count covered lines in programs: importing torch takes half as long again, and so
    does each step. The tests of each room count its lines.
    """
    _taken.update({name: os.environ.pop(name) for name in _COUNTING if name in os.environ})


def with_settings(**settings: object) -> dict[str, str]:
    """Return this process's environment with `settings`."""
    return os.environ | {name: str(value) for name, value in settings.items()}


def counted(**settings: object) -> dict[str, str]:
    """Return the same for a program whose lines no test counts in this process or its ranks."""
    return with_settings(**settings) | _taken
