"""What a program that a test starts finds in its environment."""

from __future__ import annotations

import os


def untraced(**settings: object) -> dict[str, str]:
    """Return this process's environment with `settings`, without what makes Python count covered lines.

    Importing torch takes half as long again under coverage, and so does each step. Whole jobs of torchrun are run so:
    the tests of each room count its lines.
    """
    counting = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
    rest = {name: value for name, value in os.environ.items() if name not in counting}
    return rest | {name: str(value) for name, value in settings.items()}
