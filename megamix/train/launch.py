"""`python -m megamix.train.launch`: torchrun with its own arguments, ending with the rank's exit status.

torchrun itself ends with 1 whatever its ranks ended with, and a scheduler could not tell a run that gave up from one
whose node failed. And it dies of SIGUSR1, by which a scheduler announces the end of a job's time, leaving its ranks
behind; here that signal goes on to the ranks, which then have as long as they need. Where the ranks of one machine
meet, nobody else can run code in them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from megamix.train.processes import children_of
from megamix.train.signals import NOTED, SHUTDOWN_VARIABLE
from megamix.train.status import PreemptedError

PREEMPTED = PreemptedError().exit_status
# After SIGTERM torchrun lets its ranks live for 30 s, which may be less than a save takes. Who sent the signal ends
# this process whenever its own patience is over, and the ranks end a hang by themselves.
SHUTDOWN_S = 3600
TORCHRUN_SHUTDOWN_S = 30


def launch(arguments: list[str]) -> int:
    """Start the ranks and wait.

    Returns 0, the exit status of the first rank that failed (1 for a signal that nobody asked for), or that of a run
    that was asked to leave.
    """
    signal.signal(signal.SIGUSR1, lambda number, frame: _pass_on(number))
    # Below the handler: importing takes seconds.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser

    from megamix.train.rendezvous import torchrun

    # Told by the environment, so that the ranks know it, too: a save that takes longer must not begin.
    if "--shutdown-timeout" in get_args_parser().format_help():
        os.environ.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN_S))
    else:  # as in torch 2.11, which has no such option and reads no such variable
        os.environ[SHUTDOWN_VARIABLE] = str(TORCHRUN_SHUTDOWN_S)
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        status: int = error.get_first_failure()[1].exitcode
        # A rank that dies of the request itself was still starting: nothing is lost.
        return PREEMPTED if -status in NOTED else max(status, 1)
    except SignalException:  # torchrun has passed it on, and has waited for the ranks
        return PREEMPTED
    return 0


def _pass_on(number: int) -> None:
    """Send a signal to the ranks; without any there is no run to end, and the launcher leaves."""
    ranks = children_of(os.getpid())
    if not ranks:
        sys.exit(PREEMPTED)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it has ended in this very moment
            os.kill(rank, number)


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
