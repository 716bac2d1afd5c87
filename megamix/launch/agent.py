"""The launcher of a job's ranks on this machine. It forks them from a warm process, ends with their exit status, and
starts them again after one was killed, if they are the whole job.
"""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from megamix.base.console import say
from megamix.base.machine import kernel_kills
from megamix.base.signals import PREEMPTED, LeaveRequest, send
from megamix.launch.exit_status import EXIT_STATUS
from megamix.launch.ledger import BEGAN, boot_s
from megamix.launch.run_status import read_status
from megamix.launch.torchrun import Ended, status_of
from megamix.launch.warm import WarmProcess, ranks_of

# Seconds that ranks have to end, and to say why, after another one has failed. They notice it within one.
_LEFT_BEHIND_S = 3.0
# Exit statuses of ranks that all end alike, some of them later: these are not hurried.
_ALIKE = (EXIT_STATUS["finished"], EXIT_STATUS["gave_up"], EXIT_STATUS["preempted"])


@dataclass(frozen=True)
class Machines:
    """The machines of a job, as this one sees them."""

    ranks: int  # on each
    number: int = 1
    this: int = 0
    address: str = ""  # of machine 0, if there are several, as the port
    port: int = 0


class Agent:
    """Starts a job's ranks on this machine, and waits for them."""

    def __init__(self, warm: WarmProcess, machines: Machines, request: LeaveRequest, began_s: float):
        """`request`: says whether the job was asked to leave. `began_s`: when this process did, by `boot_s`."""
        self._warm, self._machines, self._request, self._began_s = warm, machines, request, began_s

    def run(self, folder: Path) -> int:
        """Run the ranks to their end, and start them again each time that one is killed. Return the exit status.

        `folder`: the run's. A run that gets no further gives up by itself.
        """
        was_begun = False
        while not self._request.reason:
            before = read_status(folder)
            kills = kernel_kills()
            ended = self._start()
            if not ended:
                return EXIT_STATUS["finished"]
            was_killed = -signal.SIGKILL in (one.code for one in ended)
            status = status_of(ended[0], was_killed, kills, self._request)
            now = read_status(folder)
            had_begun, was_begun = was_begun, now.starts > before.starts
            helps = ended[0].code < 0 and self._machines.number == 1 and (was_begun or had_begun)
            if status != EXIT_STATUS["failed"] or not helps:
                return status
            if not self._request.reason:
                kept = _keep_aside(folder, now.starts)
                say(f"megamix: starting the ranks again after update {now.update}{kept}", sys.stderr)
            self._began_s = boot_s()
        return PREEMPTED

    def _start(self) -> list[Ended]:
        """Run the ranks once. Return how those ended that did not succeed, the first one first."""
        from megamix.launch.rendezvous import leave_meeting, meeting_of  # imports torch

        machines = self._machines
        store = meeting_of(machines.number, machines.this, machines.address, machines.port)
        common = {
            "WORLD_SIZE": machines.ranks * machines.number, "LOCAL_WORLD_SIZE": machines.ranks,
            "GROUP_RANK": machines.this, "GROUP_WORLD_SIZE": machines.number,
            "MASTER_ADDR": store.host, "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "megamix", "TORCHELASTIC_RESTART_COUNT": 0, BEGAN: self._began_s,
        }  # fmt: skip
        first = machines.this * machines.ranks
        places = [common | {"RANK": first + local, "LOCAL_RANK": local} for local in range(machines.ranks)]
        self._warm.start([{name: str(value) for name, value in place.items()} for place in places])
        self._request.begun = True
        failed = list[Ended]()
        hurry = threading.Timer(_LEFT_BEHIND_S, lambda: send(signal.SIGKILL, ranks_of(os.getpid())))
        hurry.daemon = True
        if self._request.reason:  # while there were none to tell
            send(self._request.reason, ranks_of(os.getpid()))
        for ended in self._warm.ends():
            if ended.code not in _ALIKE and all(one.code in _ALIKE for one in failed):
                hurry.start()
                send(signal.SIGTERM, ranks_of(os.getpid()))
            if ended.code:
                failed.append(ended)
        hurry.cancel()
        if not failed and machines.number > 1:
            leave_meeting(store, machines.number, machines.this)
        return failed


def _keep_aside(folder: Path, start: int) -> str:
    """Keep what the ranks of a start have said of its end from the next one. Return words that say where."""
    aside = folder / f"ended_{start}"
    told = [*folder.glob("stacks_rank*.txt"), *folder.glob("collectives_rank*.json")]
    for path in told:
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)
    return f"; stacks and collectives of the last ones: {aside}" if told else ""
