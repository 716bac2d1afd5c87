"""What a program that a test starts finds in its environment."""

from __future__ import annotations

import os


def count_no_lines_in_programs() -> None:
    """Take away what makes Python count covered lines in programs: importing torch takes half as long again, and so
    does each step. The tests of each room count its lines.
    """
    for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"):
        os.environ.pop(name, None)


def with_settings(**settings: object) -> dict[str, str]:
    """Return this process's environment with `settings`."""
    return os.environ | {name: str(value) for name, value in settings.items()}
