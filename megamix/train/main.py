"""The verb `train`: everything that can be wrong is found before torch is imported, then the job runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megamix.config import Config, ConfigError
from megamix.train.preflight import job_problems

if TYPE_CHECKING:
    from megamix.train.trainer import MemoryLine


def check(config: Config) -> None:
    """Raises: ConfigError with everything that is wrong with ranks (WORLD_SIZE), files and folder; writes nothing."""
    problems = job_problems(config, int(os.environ.get("WORLD_SIZE", "1")))
    if problems:
        raise ConfigError(problems, "job")


def run(config: Config, memory_line: MemoryLine | None = None) -> None:
    """Train by `config` on the ranks that torchrun started, or alone, if `check` finds nothing; see `run_job`."""
    check(config)
    from megamix.train.job import run_job

    run_job(config, memory_line)
