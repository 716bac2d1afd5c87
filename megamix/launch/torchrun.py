"""`python -m megamix.launch.torchrun`: runs torchrun, with its arguments, but ends with the exit status of the ranks.

torchrun itself always ends with 1 if a rank fails, so a scheduler could not tell a run that gave up from a run whose
node failed. SIGUSR1 kills torchrun and leaves its ranks behind. A third SIGTERM kills torchrun even while its ranks
save. And torchrun handles signals that nohup has set to be ignored.

This launcher handles the signals itself: it sends each signal to the ranks, and ends with their exit status. The ranks
of one machine meet in a store through which nobody else can run code in them.
"""

import logging
import signal
import sys
from typing import NamedTuple

from megamix.base.console import drop_unwritten, open_streams, say
from megamix.base.machine import kernel_kills
from megamix.base.processes import children_of
from megamix.base.signals import INTERRUPTED, NOTED, PREEMPTED, LeaveRequest, signals_passed_on
from megamix.config import ConfigError
from megamix.launch.exit_status import NO_MEMORY, NoAnswerError

# Lines of torchrun that say nothing new: a rank has printed the reason for its exit status, or this launcher names the
# signal that killed it.
_SAID = ("failed (exitcode: ", "Sending process")
# torchrun must handle at least one signal, and ends by it. This one would end the launcher anyway.
_LEFT_TO_TORCHRUN = "SIGUSR2"


def launch(arguments: list[str]) -> int:
    """Start the ranks, and wait until they end.

    Returns: 0 if all succeed; the exit status of the first rank that failed, or 1 if an unexpected signal killed this
    rank; PREEMPTED if a signal to leave killed the ranks directly, or if their grace period was over; 2 if the machines
    cannot meet, 1 if machine 0 does not listen in time.
    """
    with signals_passed_on(children_of) as request:
        return _run(arguments, request)


def _run(arguments: list[str], request: LeaveRequest) -> int:
    kills = kernel_kills()
    # These imports take seconds, so they come after the signal handlers are installed.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from megamix.launch.rendezvous import torchrun

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(
        lambda record: not record.getMessage().startswith(_SAID)
    )
    try:
        torchrun([f"--signals-to-handle={_LEFT_TO_TORCHRUN}", *arguments])
    except (ConfigError, NoAnswerError) as error:
        say(f"megamix: {error.problems[0] if isinstance(error, ConfigError) else error}", sys.stderr)
        return error.exit_status
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        was_killed = -signal.SIGKILL in (one.exitcode for one in error.failures.values())
        return status_of(Ended(rank, first.pid, first.exitcode), was_killed, kills, request)
    return 0


class Ended(NamedTuple):
    """The end of a rank."""

    rank: int  # among those of this machine, from 0 on
    pid: int
    code: int  # exit status; below 0: a signal's number


def status_of(first: Ended, was_killed: bool, kills: int, request: LeaveRequest) -> int:
    """Return the exit status of a launcher whose ranks have failed, and name a rank that was killed.

    `first`: the first one that failed. `was_killed`: whether one got SIGKILL. `kills`: `kernel_kills()` before.
    """
    status = first.code
    if was_killed and kernel_kills() > kills:
        say("megamix: the kernel has killed a rank, because there was no memory left", sys.stderr)
        status = NO_MEMORY
    elif status < 0 and -status not in NOTED:
        say(f"megamix: rank {first.rank} (pid {first.pid}) was killed by {signal.Signals(-status).name}", sys.stderr)
    # A rank that a signal to leave has killed directly was still starting, so nothing is lost.
    return PREEMPTED if -status in NOTED or status == INTERRUPTED or request.left_s() <= 0 else max(status, 1)


if __name__ == "__main__":
    open_streams()
    exit_status = launch(sys.argv[1:])
    drop_unwritten()
    sys.exit(exit_status)
