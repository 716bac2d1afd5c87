"""The verb `train`: everything that can be wrong is found before torch is imported, then the job runs."""

import os

from megamix.config import Config, ConfigError
from megamix.train.preflight import job_problems


def run(config: Config) -> None:
    """Train by `config` on the ranks that torchrun started, or alone.

    Raises: ConfigError with everything that is wrong with ranks, files and folder, and nothing is written then.
    """
    problems = job_problems(config, int(os.environ.get("WORLD_SIZE", "1")))
    if problems:
        raise ConfigError(problems, "job")
    from megamix.train.job import run_job

    run_job(config)
