"""`python -m megamix.supervise.launch`: torchrun with its own arguments, ending with the rank's exit status.

torchrun itself ends with 1 whatever its ranks ended with, and a scheduler could not tell a run that gave up from one
whose node failed. It dies of SIGUSR1, leaving its ranks behind, and of the third SIGTERM, whatever its ranks are still
saving; it installs handlers where nohup had a signal ignored. Here the signals are ours: each goes on to the ranks, and
how these end is how the launcher ends. Where the ranks of one machine meet, nobody else can run code in them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megamix.config import ConfigError
from megamix.machine import has_gpu, kernel_kills, memory_for_each
from megamix.supervise.console import drop_unwritten, open_streams, say
from megamix.supervise.processes import children_of
from megamix.supervise.status import NO_MEMORY, NOTED, SHUTDOWN_VARIABLE, LeaveRequest, PreemptedError, noted_signals

PREEMPTED = PreemptedError().exit_status
# Wrong input, gave up, no memory, asked to leave: a rank that ends so has said why, and torchrun's line behind it is no
# news.
_SAID = tuple(f"failed (exitcode: {status})" for status in (2, 3, NO_MEMORY, PREEMPTED))
# torchrun's own 30 s after a signal may be less than a save takes. Who sent the signal ends this process whenever its
# own patience is over, and the ranks end a hang by themselves.
SHUTDOWN_S = 3600
# torchrun must be left one signal at least. This one ends a process that knows nothing of it, torchrun or not.
_LEFT_TO_TORCHRUN = "SIGUSR2"


def launch(arguments: list[str]) -> int:
    """Start the ranks and wait.

    Returns 0, the exit status of the first rank that failed (1 for a signal that nobody asked for), or that of a run
    that was asked to leave, if its ranks died of being asked or had no time; 2 where machines cannot meet.
    """
    with signals_passed_on() as request:
        return start_ranks(arguments, request)


def start_ranks(arguments: list[str], request: LeaveRequest) -> int:
    """As `launch`, within its `signals_passed_on`."""
    kills = kernel_kills()
    # Below the handlers: importing takes seconds.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from megamix.supervise.rendezvous import torchrun

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not record.getMessage().startswith(_SAID)
    )
    try:
        torchrun([f"--signals-to-handle={_LEFT_TO_TORCHRUN}", *arguments])
    except ConfigError as error:
        say(f"megamix: {error.problems[0]}", sys.stderr)
        return 2
    except ChildFailedError as error:
        status: int = error.get_first_failure()[1].exitcode
        if -signal.SIGKILL in (one.exitcode for one in error.failures.values()) and kernel_kills() > kills:
            say("megamix: the kernel has killed a rank, for there was no memory left", sys.stderr)
            status = NO_MEMORY
        if status == NO_MEMORY:
            _tell_plan(arguments)
        # A rank that dies of the request itself was still starting: nothing is lost.
        return PREEMPTED if -status in NOTED or request.left_s() <= 0 else max(status, 1)
    return 0


def _tell_plan(arguments: list[str]) -> None:
    """Say what each rank was to hold, and what to change: by `megamix plan`, for as much memory as a rank has here."""
    from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

    args = get_args_parser().parse_args(arguments)
    ranks = determine_local_world_size(args.nproc_per_node)
    world = f"--world={ranks * parse_min_max_nnodes(args.nnodes)[1]}"
    of_cpu = ["--device=cpu", f"--memory={int(memory_for_each(ranks)[0]) >> 20}MiB"]
    if [args.training_script, *args.training_script_args[:1]] == ["megamix", "train"]:
        plan = ["megamix", "plan", *args.training_script_args[1:], world, *([] if has_gpu() else of_cpu)]
        subprocess.run([sys.executable, "-m", *plan], stdout=sys.stderr, check=False)


@contextmanager
def signals_passed_on() -> Iterator[LeaveRequest]:
    """Until the end of the block each signal goes on to the ranks, at once: by a thread that the system wakes, since
    the main one may wait within torch for minutes, for another node say, where Python runs no handler. Without ranks it
    ends this process as a run that was asked to leave.
    """
    # By the environment, so that the ranks know it, too: a save that takes longer must not begin.
    request = LeaveRequest(float(os.environ.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN_S))))
    wake, woken = os.pipe()[::-1]
    os.set_blocking(wake, False)
    before_fd = signal.set_wakeup_fd(wake)
    before = {number: signal.signal(number, lambda number, frame: None) for number in noted_signals()}
    thread = threading.Thread(target=_pass_on, args=(woken, request, _faults_of_the_ended()), daemon=True)
    thread.start()
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(wake)  # which ends the thread
        thread.join()
        os.close(woken)


def _pass_on(woken: int, request: LeaveRequest, faults: int) -> None:
    """Send each signal that `woken` tells of to the ranks, and kill them when the request's time is over.

    Without ranks there is no run to end, and the launcher leaves, unless they have ended: then it is about to say how.
    """
    while True:
        left_s = request.left_s()
        readable, _, _ = select.select([woken], [], [], None if math.isinf(left_s) else max(0.1, left_s))
        if not readable:
            _send(signal.SIGKILL)
            continue
        told = os.read(woken, 64)
        if not told:
            return
        for number in told:
            if number in NOTED:  # and not one for which torchrun, or Python, has a handler
                request.ask(number)
                if not _send(number) and _faults_of_the_ended() == faults:
                    os._exit(PREEMPTED)


def _send(number: int) -> bool:
    """Returns whether there was a rank to send it to."""
    ranks = children_of(os.getpid())
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it has ended in this very moment
            os.kill(rank, number)
    return bool(ranks)


def _faults_of_the_ended() -> int:
    """Page faults of the children that have ended: not what it was as soon as another one has."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


if __name__ == "__main__":
    open_streams()
    exit_status = launch(sys.argv[1:])
    drop_unwritten()
    sys.exit(exit_status)
