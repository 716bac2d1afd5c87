"""The verb `plan`: what was asked for, checked before torch is imported, and then the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from threading import Timer
from typing import TYPE_CHECKING

from megamix.config import Config, ConfigError, check_world_size, data_parallel_size
from megamix.supervise.console import say
from megamix.tools.plan.limits import MOST_RANKS, bytes_of

if TYPE_CHECKING:
    from megamix.tools.plan.activations import Machine

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
    limit = None if memory is None else bytes_of(memory, problems)
    if problems:
        raise ConfigError(problems, "plan")
    if device is None and not as_json:
        yield "GPUs are assumed: --device cpu plans for CPUs"
    late = Timer(PATIENCE_S, say, [f"megamix plan: counting {world} rank(s); large models take seconds", sys.stderr])
    late.start()
    try:
        from megamix.tools.plan.report import report_lines  # and torch, which takes seconds

        yield from report_lines(config, world // parts, device or "gpu", limit, as_json)
    finally:
        late.cancel()


def fit_line(config: Config, limit: int) -> str:
    """Return what a rank of the job that this environment would start needs. Raises: ConfigError if that is more."""
    from megamix.tools.plan.report import require_fit  # and torch

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return require_fit(config, data_parallel_size(config, world_size), limit)
