"""A warm process, from which a launcher forks its ranks: it has loaded all that they need, has no threads of its own,
and leaves CUDA alone. A rank starts from it in milliseconds, the first time and after a failure.
"""

import gc
import json
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from megamix.base.console import end_process
from megamix.base.processes import children_of
from megamix.base.signals import INTERRUPTED, PREEMPTED, leave_signals_to_launcher, noted_again
from megamix.launch.torchrun import Ended

_POLL_S = 0.01


class WarmProcess:
    """Forks the ranks of one machine, which run `main` and end with its exit status.

    It is a fork of this process, so load first what ranks need. If this process dies, it ends, too.
    """

    def __init__(self, main: Callable[[], int]):
        sys.stdout.flush()
        self._link, theirs = socket.socketpair()
        if os.fork() == 0:
            self._link.close()
            try:
                _serve(theirs, main)
            except BaseException:  # such as no room for another process
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        theirs.close()
        self._told = self._link.makefile("r")

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start ranks with these variables. All that were started before have ended."""
        with suppress(BrokenPipeError):
            _tell(self._link, [dict(one) for one in environments])
        self._told.readline()

    def ends(self) -> Iterator[Ended]:
        """Yield each rank that ends, as it does so, until all have ended. If this process dies, its ranks do so, too,
        in their own time: an end by PREEMPTED follows.
        """
        for line in self._told:  # as long as a rank has its end open
            if not (told := json.loads(line)):
                return
            yield Ended(*told)
        yield Ended(0, 0, PREEMPTED)


def ranks_of(launcher: int) -> list[int]:
    """Return the pids of the ranks that a launcher's warm process has forked."""
    return [rank for warm in children_of(launcher) for rank in children_of(warm)]


def _serve(link: socket.socket, main: Callable[[], int]) -> None:
    gc.freeze()  # ranks need not walk what is loaded, nor copy it
    os.setsid()  # a terminal's Ctrl-C goes to the launcher, which tells the ranks
    leave_signals_to_launcher()
    for line in link.makefile("r"):
        ranks = dict[int, int]()
        for number, environment in enumerate(json.loads(line)):
            if (pid := os.fork()) == 0:
                noted_again()
                os.environ.update(environment)
                end_process(_status_of(main))
            ranks[pid] = number
        _tell(link, "all are up")
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                _tell(link, Ended(ranks.pop(pid), pid, os.waitstatus_to_exitcode(status)))
            elif select.select([link], [], [], _POLL_S)[0]:  # the launcher says nothing meanwhile: it is dead
                os._exit(1)
        _tell(link, [])


def _status_of(main: Callable[[], int]) -> int:
    """Return the exit status of a rank, of which nothing may unwind into the code of its launcher."""
    try:
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def _tell(link: socket.socket, value: object) -> None:
    link.sendall(f"{json.dumps(value)}\n".encode())
