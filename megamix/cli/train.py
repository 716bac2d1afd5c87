"""The verb `train`: a job is checked before torch is imported, and then trains on this rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megamix.base.console import say_on_first_rank, say_phase
from megamix.base.machine import has_gpu, keep_freed_memory, many_imports, set_torch_environment
from megamix.cli.parser import Parser, add_config, check_plugins
from megamix.comm.starter import take_place
from megamix.config import Config, ConfigError, data_parallel_size, load_config
from megamix.tools.plan.limits import bytes_of
from megamix.train.compiler import compiler_problem, load_compiler

if TYPE_CHECKING:
    from megamix.mixed_precision.engine import ShardedEngine


def train_arguments(parser: Parser) -> None:
    parser.example = "megamix train configs/quickstart.toml checkpoint.folder=runs/mine"
    add_config(parser)
    parser.add_flag("--check", "only look for mistakes, as before a job; start nothing")
    parser.add_value("--memory", "SIZE", bytes_of, "with --check: most memory of a rank, such as 3GiB")


def run_train(arguments: argparse.Namespace) -> None:
    take_place()  # each process may be one of srun's or mpirun's, without a launcher
    config = job_of(arguments, say_on_first_rank)
    if arguments.check:
        say_on_first_rank(outlook_of(arguments, config, say_on_first_rank))
        return
    _check(config)
    load(config)
    _train(config)


def run_warm(config: Config, arguments: argparse.Namespace) -> int:
    """Train on this rank, which was forked from a process that has called `job_of`, `set_environment` and `load`.
    Return the exit status.
    """
    _check(config)
    _train(config)
    return 0


def _check(config: Config) -> None:
    from megamix.train.check import check
    from megamix.train.job_size import JobSize

    check(config, say_on_first_rank, starts=True)
    set_environment(config)
    size = JobSize(config)
    if too_much := size.memory_problem() or size.mirror_problem():
        raise ConfigError([too_much], "job")
    if (no_compiler := compiler_problem(config.model)) and not has_gpu():
        raise ConfigError([no_compiler], "job")
    if too_little := size.disk_problem():
        say_on_first_rank(f"note: {too_little}")


def _train(config: Config) -> None:
    from megamix.train.job import Lines
    from megamix.train.main import run_job

    if not has_gpu():
        keep_freed_memory()
    run_job(config, Lines(partial(_memory_line, config), partial(_time_line, config)))


def load(config: Config) -> None:
    """Load torch, and all else that a job needs of code. Nothing here asks for a GPU."""
    with many_imports():
        if "torch" not in sys.modules:
            say_phase("loading torch")
        import megamix.train.main  # noqa: F401  # for its imports

        if config.optimizer.compile:
            load_compiler(config.model)


def job_of(arguments: argparse.Namespace, tell: Callable[[str], None]) -> Config:
    """Return the configuration that `train` was given; torch is not imported.

    `tell` gets a line for each key that is not read.
    Raises: ConfigError with everything that is wrong with the configuration, its files and the flags.
    """
    if arguments.memory is not None and not arguments.check:
        raise ConfigError(["--memory: got it without --check; write --check beside it"], "flags")
    try:
        config = load_config(
            arguments.config, arguments.overrides, say=lambda line: tell(f"megamix train: {line}"), starts=True
        )
    except ConfigError as error:
        if error.sound is None:
            raise
        from megamix.train.corpus import JobCorpus

        problems = JobCorpus(error.sound.data, error.sound.model).problems()
        raise ConfigError([*error.problems, *problems], error.source) from None
    check_plugins(arguments, config.plugins)
    return config


def outlook_of(arguments: argparse.Namespace, config: Config, tell: Callable[[str], None]) -> str:
    """Return the text of `train --check` on a job without mistakes, for the ranks of this environment.

    `tell` gets a line for each setting that is allowed but probably a mistake. Raises: ConfigError.
    """
    from megamix.launch.run_folder import in_memory
    from megamix.train.check import check
    from megamix.train.job_size import JobSize
    from megamix.train.judge import describe_start

    told = check(config, tell)
    if arguments.check:
        set_environment(config)
        size = JobSize(config)
        problems = size.memory_problem(), size.mirror_problem(), size.disk_problem(), compiler_problem(config.model)
        for problem in filter(None, problems):
            tell(f"note: {problem}")  # the job may run on another machine than the check
    start, before = describe_start(config)
    told = f"{told}; {in_memory(config.checkpoint)}{start}"
    if arguments.check:
        more = [_of_transformers(config.model)] if config.model.family == "transformers" else []
        told = "\n  ".join([told, *size.lines(before), *more])
    if arguments.memory is not None:
        from megamix.tools.plan.report import require_fit  # imports torch

        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        told = f"{told}\n  {require_fit(config, data_parallel_size(config.parallelism, world_size), arguments.memory)}"
    return told


def _of_transformers(model: Any) -> str:
    """Return what `--check` says of a model of transformers, which it has built without values."""
    return (
        f"{model.theirs.model_type} of transformers. Only a start tests values: that weights load, and that the model "
        "sees no later tokens, draws no noise and keeps packed documents apart"
    )


def set_environment(config: Config) -> None:
    """Set what torch reads when it is loaded."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    set_torch_environment(ranks, deterministic=config.training.deterministic)


def _memory_line(config: Config, engine: ShardedEngine) -> str:
    """Return the log's line on planned and measured memory; if the planner cannot be imported, a line that says why."""
    try:
        from megamix.tools.plan.memory_plan import memory_line
    except ImportError as error:
        return f"memory | NOT compared with what was planned: {error}"
    return memory_line(config, engine)


def _time_line(config: Config, engine: ShardedEngine, tokens_per_s: float) -> str:
    """Return the log's line on predicted and measured time; empty for devices whose rates nobody has written down."""
    from megamix.tools.plan.time_line import time_line

    return time_line(config, engine.topology.dp.size, engine.device, tokens_per_s)
