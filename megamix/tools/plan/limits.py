"""Limits from flags: `--memory` in bytes, and the most ranks that are planned."""

import re

from megamix.config import ConfigError

UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MOST_RANKS = 16384


def bytes_of(memory: str, problems: list[str]) -> int | None:
    """Return a size such as "80GiB" in bytes; None for a text that is no size, with a line added to `problems`."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) *([kMGT]i?)B?", memory)
    if match is not None:
        return int(float(match[1]) * UNITS[match[2]])
    problems.append(f"--memory: got {memory!r}, must be a number and a unit; write --memory 80GiB")
    return None


def memory_of_check(memory: str, *, checks: bool) -> int:
    """Return the bytes that `train --check --memory` lets a rank hold. `checks`: whether --check was given.

    Raises: ConfigError for a text that is no size, or without --check.
    """
    problems = list[str]()
    limit = bytes_of(memory, problems)
    if not checks:
        problems.append(f"--memory: got {memory!r} without --check; write --check --memory {memory}")
    if limit is None or problems:
        raise ConfigError(problems, "flags")
    return limit
