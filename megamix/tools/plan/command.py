"""The verb `plan`: it checks its request before it imports torch, then prints the report."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from threading import Timer
from typing import TYPE_CHECKING

from megamix.arguments import Parser, add_config, lines_told
from megamix.config import Config, ConfigError, axis_sizes, check_world_size, load_config
from megamix.supervise.console import say
from megamix.tools.plan.limits import MOST_RANKS, bytes_of

if TYPE_CHECKING:
    from megamix.tools.plan.activations import Machine

PATIENCE_S = 2.0  # seconds for which a user sees nothing


def plan_arguments(parser: Parser) -> None:
    parser.example = "megamix plan job.toml --world 64 --memory 80GiB"
    add_config(parser)
    parser.add_argument("--world", metavar="N", type=int, help="ranks (parallelism.dp_size, or 1)")
    parser.add_argument("--memory", metavar="SIZE", help="what a rank may hold, as 80GiB (this machine's GPU, if any)")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="what the ranks compute on (gpu)")
    parser.add_argument("--json", action="store_true", help="every number, in bytes")


@lines_told
def run_plan(arguments: argparse.Namespace) -> Iterator[str]:
    config = load_config(arguments.config, arguments.overrides)
    return plan_lines(config, arguments.world, arguments.memory, arguments.device, arguments.json)


def plan_lines(
    config: Config, world: int | None, memory: str | None, device: Machine | None, as_json: bool
) -> Iterator[str]:
    """Yield the lines to print, as they become known.

    `world`: None for parallelism.dp_size, or 1. `device`: None for a GPU, and a line that says so.
    Raises: ConfigError for a job that cannot be planned.
    """
    section, problems = config.parallelism, list[str]()
    parts = math.prod(axis_sizes(section).values())
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
        from megamix.tools.plan.report import report_lines  # imports torch, which takes seconds

        yield from report_lines(config, world // parts, device or "gpu", limit, as_json)
    finally:
        late.cancel()
