"""The verb `plan`: it checks its request before it imports torch, then prints the report, or the fastest layouts."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megamix.cli.parser import Parser, add_config, lines_told
from megamix.config import Config, ConfigError, axis_sizes, check_world_size, data_parallel_size, load_config
from megamix.data import import_extra
from megamix.tools.plan.limits import MOST_RANKS, RESERVED, bytes_of, gpus_of

if TYPE_CHECKING:
    from megamix.tools.plan.activations import Machine
    from megamix.tools.plan.calibrate import MeasuredStep
    from megamix.tools.plan.time_hardware import Hardware

WITH_GPUS: tuple[str, ...] = ("hardware", "rates", "calibrate", "plot")


def plan_arguments(parser: Parser) -> None:
    parser.example = "megamix plan job.toml --world 64 --memory 80GiB"
    add_config(parser)
    parser.add_value("--world", "N", int, "ranks (parallelism.dp_size, or 1)")
    parser.add_value("--memory", "SIZE", bytes_of, "what a rank may hold, as 80GiB (this machine's GPU, if any)")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="what the ranks compute on (gpu)")
    parser.add_flag("--json", "every number, in bytes and seconds")
    parser.add_value("--gpus", "N..M", gpus_of, "the fastest layouts on N GPUs, or on each power of two up to M")
    parser.add_argument("--hardware", metavar="NAME", help="with --gpus: h100-sxm (default), h200, and others")
    parser.add_value("--rates", "FILE", Path, "with --gpus: output of megamix doctor --json there")
    parser.add_value("--calibrate", "RUN/metrics.jsonl", Path, "with --gpus: runs to learn from", nargs="+")
    parser.add_value("--plot", "FILE.svg", Path, "with --gpus: what a step's time goes into")


@lines_told
def run_plan(arguments: argparse.Namespace) -> Iterator[str]:
    config = load_config(arguments.config, arguments.overrides)
    others, told = WITH_GPUS, "got it without --gpus; write --gpus 8..1024 beside it"
    if arguments.gpus:
        others, told = ("world", "device"), "got it with --gpus; leave it out: --gpus says for what"
    if problems := [f"--{name}: {told}" for name in others if getattr(arguments, name) is not None]:
        raise ConfigError(problems, "plan")
    if arguments.plot is not None:
        import_extra("matplotlib", "plot", what="--plot: ")
    if arguments.gpus:
        return _layout_lines(config, arguments)
    arguments.progress.begin("counting the bytes of a rank")
    return plan_lines(config, arguments.world, arguments.memory, arguments.device, arguments.json)


def _layout_lines(config: Config, arguments: argparse.Namespace) -> Iterator[str]:
    from megamix.tools.plan.calibrate import calibrate  # numpy takes a third of a second
    from megamix.tools.plan.layout_report import layout_lines
    from megamix.tools.plan.layouts import LayoutSearch
    from megamix.tools.plan.time_constants import fitted_constants
    from megamix.tools.plan.time_hardware import load_hardware

    name = arguments.hardware or "h100-sxm"
    hardware = load_hardware(name)
    limit = int(hardware.memory_bytes) - RESERVED if arguments.memory is None else arguments.memory
    if config.precision.fp8 is not None and hardware.fp8_flops is None:
        problem = f"precision.fp8: got a table, but {name} has no products in FP8; write precision.fp8 = false"
        raise ConfigError([problem], "plan")
    if arguments.rates is not None:
        hardware = _with_rates(arguments.rates, hardware)
    before = constants = fitted_constants()
    if arguments.calibrate:
        constants = calibrate([_measured(path, hardware) for path in arguments.calibrate], before)
    search = LayoutSearch(config, hardware, constants, limit)
    title = f"{arguments.config.stem} on {name}"
    told = before, arguments.progress, arguments.json, arguments.plot, title
    yield from layout_lines(search, arguments.gpus, *told)


def _with_rates(path: Path, base: Hardware) -> Hardware:
    """Return `base` with the rates that doctor measured. Raises: ValueError for a file of another kind."""
    from megamix.tools.plan.time_hardware import measured_hardware

    fix = "on that machine run megamix doctor --json > FILE"
    with _named("--rates", path, f"is no output of megamix doctor --json; {fix}"):
        lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        hardware = measured_hardware([line for line in lines if "fit" not in line], base)
    if hardware == base:
        raise ValueError(f"--rates: got {path}, in which nothing that the plan needs was measured; {fix}")
    return hardware


@contextmanager
def _named(flag: str, path: Path, trouble: str) -> Iterator[None]:
    """Name the flag, the file and the trouble if the block cannot read its content."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{flag}: got {path}, which {trouble}") from error


def _measured(metrics: Path, hardware: Hardware) -> MeasuredStep:
    """Return the median step of a run, from the files in its folder.

    Raises: ValueError for a folder that is no run's, or whose run was too short; ConfigError.
    """
    from megamix.launch.journal import read_rows
    from megamix.launch.run_folder import CONFIG, METRICS
    from megamix.tools.plan.calibrate import measured_step
    from megamix.tools.plan.time_job import timed_job

    ranks = [row["ranks"] for row in read_rows(metrics.parent) if "ranks" in row]
    if len({*ranks}) != 1:  # rows do not say of which start they are
        raise ValueError(
            f"--calibrate: got {metrics}; by journal.jsonl beside it the starts had {ranks or 'no'} ranks, but one "
            "number is needed; name a run's own"
        )
    config = load_config(metrics.parent / CONFIG, imports=False)
    if config.training.batch_ramp:
        raise ValueError(f"--calibrate: got {metrics}, whose steps grew by a batch_ramp; name a run of equal steps")
    job = timed_job(config, data_parallel_size(config.parallelism, ranks[-1]))
    fix = f"name the {METRICS} of a run that trained"
    with _named("--calibrate", metrics, f"has a line that is no row of a run's metrics; {fix}"):
        return measured_step(metrics, job, hardware)


def plan_lines(
    config: Config, world: int | None, limit: int | None, device: Machine | None, as_json: bool
) -> Iterator[str]:
    """Yield the lines to print, as they become known.

    `world`: None for parallelism.dp_size, or 1. `limit`: bytes that a rank may hold; None: as `report_lines` says.
    `device`: None for a GPU, and a line that says so.
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
    if problems:
        raise ConfigError(problems, "plan")
    if device is None and not as_json:
        yield "GPUs are assumed: --device cpu plans for CPUs"
    from megamix.tools.plan.report import report_lines  # imports torch, which takes seconds

    yield from report_lines(config, world // parts, device or "gpu", limit, as_json)
