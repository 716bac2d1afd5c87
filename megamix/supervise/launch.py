"""`python -m megamix.supervise.launch`: runs torchrun, with its arguments, but ends with the exit status of the ranks.

torchrun itself always ends with 1 if a rank fails, so a scheduler could not tell a run that gave up from a run whose
node failed. SIGUSR1 kills torchrun and leaves its ranks behind. A third SIGTERM kills torchrun even while its ranks
save. And torchrun handles signals that nohup has set to be ignored.

This launcher handles the signals itself: it sends each signal to the ranks, and ends with their exit status. The ranks
of one machine meet in a store through which nobody else can run code in them.
"""

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
from megamix.supervise.status import (
    NO_MEMORY,
    NOTED,
    SHUTDOWN_VARIABLE,
    LeaveRequest,
    NoAnswerError,
    PreemptedError,
    noted_signals,
)

PREEMPTED = PreemptedError.exit_status
# Lines of torchrun that say nothing new: a rank has printed the reason for its exit status, or this launcher names the
# signal that killed it.
_SAID = ("failed (exitcode: ", "Sending process")
# Seconds from a signal until the ranks are killed. torchrun's default, 30 s, may be less than a save takes. A long
# limit does no harm: a scheduler kills this process by a limit of its own, and the ranks end a hang by themselves.
SHUTDOWN_S = 3600
# torchrun must handle at least one signal, and ends by it. This one would end the launcher anyway.
_LEFT_TO_TORCHRUN = "SIGUSR2"


def launch(arguments: list[str]) -> int:
    """Start the ranks, and wait until they end.

    Returns: 0 if all succeed; the exit status of the first rank that failed, or 1 if an unexpected signal killed this
    rank; PREEMPTED if a signal to leave killed the ranks directly, or if their grace period was over; 2 if the machines
    cannot meet, 1 if machine 0 does not listen in time.
    """
    with signals_passed_on() as request:
        return start_ranks(arguments, request)


def start_ranks(arguments: list[str], request: LeaveRequest) -> int:
    """Start the ranks as `launch` does. The caller is within `signals_passed_on`, which gives `request`."""
    kills = kernel_kills()
    # These imports take seconds, so they come after the signal handlers are installed.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from megamix.supervise.rendezvous import torchrun

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not record.getMessage().startswith(_SAID)
    )
    try:
        torchrun([f"--signals-to-handle={_LEFT_TO_TORCHRUN}", *arguments])
    except ConfigError as error:
        say(f"megamix: {error.problems[0]}", sys.stderr)
        return error.exit_status
    except NoAnswerError as error:
        say(f"megamix: {error}", sys.stderr)
        return error.exit_status
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        status: int = first.exitcode
        if -signal.SIGKILL in (one.exitcode for one in error.failures.values()) and kernel_kills() > kills:
            say("megamix: the kernel has killed a rank, because there was no memory left", sys.stderr)
            status = NO_MEMORY
        elif status < 0 and -status not in NOTED:
            say(f"megamix: rank {rank} (pid {first.pid}) was killed by {first.signal_name()}", sys.stderr)
        if status == NO_MEMORY:
            _tell_plan(arguments)
        # A rank that a signal to leave has killed directly was still starting, so nothing is lost.
        return PREEMPTED if -status in NOTED or request.left_s() <= 0 else max(status, 1)
    return 0


def _tell_plan(arguments: list[str]) -> None:
    """Print what each rank needed and what to change: run `megamix plan` with the memory that a rank has here."""
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
    """Send each signal on to the ranks, at once, until the end of the block. Without ranks a signal ends this process
    with PREEMPTED. After the block signals stay ignored: the ranks have ended, and nothing may replace their status,
    not even while Python ends.

    A thread that the system wakes sends the signals. The main thread may wait within torch for minutes, for instance
    for another node, and Python runs no handler then.
    """
    # The ranks read the limit from the environment: they must not begin a save that takes longer.
    request = LeaveRequest(float(os.environ.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN_S))))
    wake, woken = os.pipe()[::-1]
    os.set_blocking(wake, False)
    before_fd = signal.set_wakeup_fd(wake)
    numbers = noted_signals()
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    thread = threading.Thread(target=_pass_on, args=(woken, request, _faults_of_the_ended()), daemon=True)
    thread.start()
    try:
        yield request
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(before_fd)
        os.close(wake)  # ends the thread
        thread.join()
        os.close(woken)


def _pass_on(woken: int, request: LeaveRequest, faults: int) -> None:
    """Send each signal that the pipe `woken` announces to the ranks. Kill the ranks at the end of the request's grace
    period.

    If no rank has started, the launcher ends here. If the ranks have ended already, this function continues, because
    the main thread is about to return their exit status. `faults`: `_faults_of_the_ended()` before the ranks started.
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
            if number in NOTED:  # other signals are left to torchrun and Python
                request.ask(number)
                if not _send(number) and _faults_of_the_ended() == faults:
                    say("megamix: interrupted before any rank had started; the same command starts again", sys.stderr)
                    os._exit(PREEMPTED)


def _send(number: int) -> bool:
    """Send a signal to every rank. Return whether there was any rank."""
    ranks = children_of(os.getpid())
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # the rank has just ended
            os.kill(rank, number)
    return bool(ranks)


def _faults_of_the_ended() -> int:
    """Return the page faults of all children that have ended. The number changes when another child ends."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


if __name__ == "__main__":
    open_streams()
    exit_status = launch(sys.argv[1:])
    drop_unwritten()
    sys.exit(exit_status)
