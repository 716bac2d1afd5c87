"""`python -m megamix.pretrain`: the one process of launch/pretrain.sh. It checks a job, and then launches its ranks.

    python -m megamix.pretrain [torchrun's options] -- CONFIG [section.key=value ...] [--check [--memory SIZE]]

The script has judged NNODES and NPROC_PER_NODE. What is wrong with the configuration is told before torch is imported,
what is wrong with files and numbers of ranks before any rank starts.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from megamix import cli
from megamix.config import Config, ConfigError
from megamix.machine import many_imports
from megamix.supervise.console import say
from megamix.supervise.launch import signals_passed_on, start_ranks


def main(argv: list[str]) -> int:
    """Return the exit status: 0 after --check, that of the launcher, or 2 for what is wrong."""
    border = argv.index("--")
    options, job = argv[:border], argv[border + 1 :]
    return cli.main(["train", *job], partial(_pretrain, options, job))


def _pretrain(options: list[str], job: list[str], arguments: argparse.Namespace) -> int:
    if arguments.check:
        say(_judge(arguments, cli.job_of(arguments, say))[1])
        return 0
    _tell("checking the job")
    config = cli.job_of(arguments, _leave_to_ranks)
    with signals_passed_on() as request:
        ranks, _ = _judge(arguments, config)
        _tell("no problems; loading torch's launcher")
        _gpus()
        _tell(f"starting {ranks} rank{'s' * (ranks > 1)}")
        return start_ranks([*options, f"--nproc-per-node={ranks}", "-m", "megamix", "train", *job], request)


def _judge(arguments: argparse.Namespace, config: Config) -> tuple[int, str]:
    """Return the ranks of this machine, and what the job would do with all of them. Raises: ConfigError."""
    told = os.environ.get("NPROC_PER_NODE")
    if not told:
        _tell("loading torch, to count GPUs")
    ranks = int(told) if told else max(1, _gpus())
    world = {"WORLD_SIZE": ranks * int(os.environ.get("NNODES") or 1), "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(size) for name, size in world.items()}
    try:
        # No node is ahead of the others: the run's folder is claimed only when all ranks have met.
        return ranks, cli.outlook_of(arguments, config, say if arguments.check else _leave_to_ranks)
    finally:
        for name in world:  # which are a rank's
            del os.environ[name]


def _gpus() -> int:
    """Return how many torch can use. Raises: ConfigError if it cannot be imported."""
    try:
        with many_imports():
            import torch
    except ImportError as error:
        python = os.environ.get("MEGAMIX_PYTHON")
        where = f"MEGAMIX_PYTHON: got {python}" if python else f"python: got {sys.executable}"
        problem = f"{where}, it cannot import: torch; install that there, or name another ({error})"
        raise ConfigError([problem], "environment") from error
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _tell(phase: str) -> None:
    say(f"megamix: {phase}", sys.stderr)


def _leave_to_ranks(line: str) -> None:
    """Say nothing: a rank that starts says the same."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
