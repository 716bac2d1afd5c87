"""`python -m megamix.cli.pretrain`: the one process of launch/pretrain.sh. It checks a job, then launches its ranks.

    python -m megamix.cli.pretrain [torchrun's options] -- CONFIG [section.key=value ...] [--check [--memory SIZE]]

The script has judged NNODES and NPROC_PER_NODE. Mistakes in the configuration are reported before torch is imported,
mistakes in files and numbers of ranks before any rank starts.
"""

from megamix.base.signals import PREEMPTED, ctrl_c_kills, signals_passed_on, sigterm_and_sigusr1_end

if __name__ == "__main__":
    ctrl_c_kills()
    sigterm_and_sigusr1_end()

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megamix.base.console import end_process, say, say_phase
from megamix.base.machine import many_imports
from megamix.base.processes import children_of
from megamix.cli import train, verbs
from megamix.config import ConfigError
from megamix.launch.exit_status import EXIT_STATUS
from megamix.launch.run_folder import describe_failure
from megamix.launch.torchrun import start_ranks

_SETTINGS = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def main(argv: list[str]) -> int:
    """Return the exit status: 0 after --check, the launcher's, or 2 for wrong input."""
    border = argv.index("--")
    options, job = argv[:border], argv[border + 1 :]
    return verbs.main(["train", *job], partial(_pretrain, options, job))


def _pretrain(options: list[str], job: list[str], arguments: argparse.Namespace) -> int:
    tell: Callable[[str], None] = say if arguments.check else lambda line: None  # the ranks print these lines
    say_phase("checking the job")
    config = train.job_of(arguments, tell)
    with signals_passed_on(children_of) as request:
        ranks = int(os.environ.get("NPROC_PER_NODE") or 0) or max(1, _gpus())
        # Both sizes are the whole job's; torchrun tells each rank its own. No node is ahead of the others: the run's
        # folder is claimed only when all ranks have met.
        world_size = ranks * int(os.environ.get("NNODES") or 1)
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(ranks)}
        outlook = train.outlook_of(arguments, config, tell)
        if arguments.check:
            say(outlook)
            return 0
        _gpus()  # tells in words if torch cannot be imported
        say_phase(f"no problems; starting {ranks} rank{'s' * (ranks > 1)}")
        status = start_ranks([*options, f"--nproc-per-node={ranks}", "-m", "megamix", "train", *job], request)
    if status == PREEMPTED:
        say(f"megamix: interrupted; to go on, repeat the command: {_command_line(options, job)}", sys.stderr)
    elif status == EXIT_STATUS["failed"]:
        say(f"megamix: failed; {describe_failure(config.checkpoint)}: {_command_line(options, job)}", sys.stderr)
    return status


def _command_line(options: list[str], job: list[str]) -> str:
    launched = (Path(__file__).parents[2] / "launch/pretrain.sh").is_file()  # in a checkout
    start = ["./launch/pretrain.sh"] if launched else ["python", "-m", "megamix.cli.pretrain", *options, "--"]
    ranks = os.environ["LOCAL_WORLD_SIZE"]
    settings = {"NPROC_PER_NODE": ranks} if ranks != "1" else {}
    settings |= {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)}
    words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    return " ".join([*words, shlex.join([*start, *job])])


def _gpus() -> int:
    """Return the number of GPUs that torch can use. Raises: ConfigError if torch cannot be imported."""
    if "torch" not in sys.modules:
        say_phase("loading torch")
    try:
        with many_imports():
            import torch
    except ImportError as error:
        python = os.environ.get("MEGAMIX_PYTHON")
        where = f"MEGAMIX_PYTHON: got {python}" if python else f"python: got {sys.executable}"
        problem = f"{where}, it cannot import: torch; install that there, or name another ({error})"
        raise ConfigError([problem], "environment") from error
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
