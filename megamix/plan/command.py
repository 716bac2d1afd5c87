"""The verb `plan`: what was asked for, checked before torch is imported, and then the report."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from threading import Timer
from typing import TYPE_CHECKING

from megamix.config import Config, ConfigError, check_world_size, data_parallel_size
from megamix.supervise.console import say

if TYPE_CHECKING:
    from megamix.plan.activations import Machine

UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MOST_RANKS = 16384
PATIENCE_S = 2.0  # of a user who sees nothing


def plan_lines(
    config: Config, world: int | None, memory: str | None, device: Machine | None, as_json: bool
) -> Iterator[str]:
    """Yield what to print, as it becomes known. `world`: None for parallelism.dp_size, or 1; `device`: None for a GPU,
    and a line that says so.

    Raises: ConfigError for what cannot be planned.
    """
    section, problems = config.parallelism, list[str]()
    parts = section.tp_size * section.pp_size
    if world is None:
        world = (section.dp_size or 1) * parts
    if 1 <= world <= MOST_RANKS:
        problems += check_world_size(config, world)
    else:
        problems.append(f"--world: got {world}, must be from 1 to {MOST_RANKS}; write --world {8 * parts}")
    limit = None if memory is None else _bytes(memory, problems)
    if problems:
        raise ConfigError(problems, "plan")
    if device is None and not as_json:
        yield "GPUs are assumed: --device cpu plans for CPUs"
    late = Timer(PATIENCE_S, say, [f"megamix plan: counting {world} rank(s); large models take seconds", sys.stderr])
    late.start()
    try:
        from megamix.plan.report import report_lines  # and torch, which takes seconds

        yield from report_lines(config, world // parts, device or "gpu", limit, as_json)
    finally:
        late.cancel()


def memory_of_check(memory: str, *, checks: bool) -> int:
    """Return what `train --check --memory` lets a rank hold, in bytes. `checks`: whether --check is there.

    Raises: ConfigError for no size, or without --check.
    """
    problems = list[str]()
    limit = _bytes(memory, problems)
    if not checks:
        problems.append(f"--memory: got {memory!r} without --check; write --check --memory {memory}")
    if limit is None or problems:
        raise ConfigError(problems, "flags")
    return limit


def fit_line(config: Config, limit: int) -> str:
    """Return what a rank of the job that this environment would start needs. Raises: ConfigError if that is more."""
    from megamix.plan.report import require_fit  # and torch

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return require_fit(config, data_parallel_size(config, world_size), limit)


def _bytes(memory: str, problems: list[str]) -> int | None:
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+) *([kMGT]i?)B?", memory)
    if match is not None:
        return int(float(match[1]) * UNITS[match[2]])
    problems.append(f"--memory: got {memory!r}, must be a number and a unit; write --memory 80GiB")
    return None
