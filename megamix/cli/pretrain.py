"""`python -m megamix.cli.pretrain`: the one process of launch/pretrain.sh. It checks a job, then launches its ranks.

    python -m megamix.cli.pretrain CONFIG [section.key=value ...] [--check [--memory SIZE]]

The script has judged NNODES, NPROC_PER_NODE and where the machines meet. Mistakes in the configuration are reported
before torch is imported, mistakes in files and numbers of ranks before any rank starts.
"""

from megamix.base.signals import PREEMPTED, LeaveRequest, ctrl_c_kills, signals_passed_on, sigterm_and_sigusr1_end

if __name__ == "__main__":
    ctrl_c_kills()
    sigterm_and_sigusr1_end()

import argparse
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from megamix.base.console import end_process, say, say_phase
from megamix.base.machine import has_gpu, many_imports, memory_for_each, set_torch_environment
from megamix.cli import train, verbs
from megamix.config import Config, ConfigError
from megamix.launch.agent import Agent, Machines
from megamix.launch.exit_status import EXIT_STATUS, NO_MEMORY
from megamix.launch.ledger import age_s, boot_s
from megamix.launch.run_folder import describe_failure, in_memory
from megamix.launch.warm import WarmProcess, ranks_of
from megamix.train.compiler import try_compiler
from megamix.train.own_code import source

_SETTINGS = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def main(argv: list[str]) -> int:
    """Return the exit status: 0 after --check, the launcher's, or 2 for wrong input."""
    return verbs.main(["train", *argv], partial(_pretrain, argv))


def _pretrain(job: list[str], arguments: argparse.Namespace) -> int:
    began_s = boot_s() - age_s(os.getpid())
    say_phase("checking the job")
    number, this = int(os.environ.get("NNODES") or 1), int(os.environ.get("NODE_RANK") or 0)
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 29500)
    config = train.job_of(arguments, say if this == 0 else lambda line: None)
    with signals_passed_on(ranks_of) as request:
        ranks = int(os.environ.get("NPROC_PER_NODE") or 0) or max(1, _gpus())
        # Both sizes are the whole job's; each rank is told its own. No node is ahead of the others: the run's folder is
        # claimed only when all ranks have met.
        world_size = ranks * number
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(ranks)}
        outlook = train.outlook_of(arguments, config, say if arguments.check else lambda line: None)
        if arguments.check:
            say(outlook)
            return 0
        say_phase(f"no problems; starting {ranks} rank{'s' * (ranks > 1)}")
        status = start_ranks(config, Machines(ranks, number, this, address, port), job, request, began_s)
    if status == NO_MEMORY:
        _tell_plan(job, ranks, world_size)
    if status == PREEMPTED:
        say(f"megamix: interrupted; to go on, repeat the command: {_command_line(job)}", sys.stderr)
    elif status == EXIT_STATUS["failed"]:
        told = in_memory(config.checkpoint) + describe_failure(config.checkpoint)
        say(f"megamix: failed; {told}: {_command_line(job)}", sys.stderr)
    return status


def start_ranks(config: Config, machines: Machines, job: list[str], request: LeaveRequest, began_s: float) -> int:
    """Load what the ranks need, start them, and return the exit status."""
    train.set_environment(config)
    _import_torch()
    import torch

    if (threads := os.environ["OMP_NUM_THREADS"]).isdecimal():  # torch may have been loaded before it was set
        torch.set_num_threads(int(threads))
    with many_imports():
        train.load(config)
        if machines.ranks > 1:
            import torch._dynamo  # each rank that sums would import it
        if config.optimizer.compile:
            with suppress(Exception):  # a rank says why it cannot compile
                try_compiler()
        source()  # for all ranks
        from megamix.launch.rendezvous import keep_to_loopback  # imports torch

    if machines.number == 1:
        keep_to_loopback(os.environ)
    warm = WarmProcess(partial(verbs.main, ["train", *job], partial(train.run_warm, config)))
    return Agent(warm, machines, request, began_s).run(Path(config.checkpoint.folder))


def _tell_plan(job: list[str], ranks: int, world_size: int) -> None:
    """Print what each rank needed and what to change: run `megamix plan` with the memory that a rank has here."""
    of_cpu = ["--device=cpu", f"--memory={int(memory_for_each(ranks)[0]) >> 20}MiB"]
    plan = ["megamix", "plan", *job, f"--world={world_size}", *([] if has_gpu() else of_cpu)]
    subprocess.run([sys.executable, "-m", *plan], stdout=sys.stderr, check=False)


def _command_line(job: list[str]) -> str:
    launched = (Path(__file__).parents[2] / "launch/pretrain.sh").is_file()  # in a checkout
    start = ["./launch/pretrain.sh"] if launched else ["python", "-m", "megamix.cli.pretrain"]
    ranks = os.environ["LOCAL_WORLD_SIZE"]
    settings = {"NPROC_PER_NODE": ranks} if ranks != "1" else {}
    settings |= {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)}
    words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    return " ".join([*words, shlex.join([*start, *job])])


def _gpus() -> int:
    """Return the number of GPUs that torch can use. Another process counts them: ranks are forked from this one, which
    must leave CUDA alone. Raises: as `_import_torch`.
    """
    set_torch_environment(None)
    _import_torch()
    import torch

    if (pid := os.fork()) == 0:
        os._exit(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _import_torch() -> None:
    """Raises: ConfigError if torch cannot be imported."""
    if "torch" not in sys.modules:
        say_phase("loading torch")
    try:
        with many_imports():
            import torch  # noqa: F401  # what follows takes it as loaded
    except ImportError as error:
        python = os.environ.get("MEGAMIX_PYTHON")
        where = f"MEGAMIX_PYTHON: got {python}" if python else f"python: got {sys.executable}"
        problem = f"{where}, it cannot import: torch; install that there, or name another ({error})"
        raise ConfigError([problem], "environment") from error


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
