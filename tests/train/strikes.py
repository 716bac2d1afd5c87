"""Faults that may strike a run while it trains: signals, death in a save, a full disk, a damaged newest checkpoint."""

import errno
import os
import signal
import threading
from typing import NamedTuple

from megamix.checkpoint.folder import Files, checkpoints
from tests.checkpoint.faults import CALLS

RANKS = 2
LATEST_S = 0.05  # seconds between a fault's attempt and its signal: a step or a few
FULL_FOR = 2  # number of saves that a full disk fails

ASKED = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGUSR1": signal.SIGUSR1}
SIGNALS = ASKED | {"a rank killed": signal.SIGKILL, "a rank stopped": signal.SIGSTOP}
DAMAGES = ("a bit flipped", "a file cut short")  # damage of the newest checkpoint, once all ranks are dead
KILLED_IN_A_SAVE, DISK_FULL, ALL_KILLED = "a rank killed in a save", "disk full", "all ranks killed"
KINDS = (*SIGNALS, KILLED_IN_A_SAVE, DISK_FULL, ALL_KILLED, *DAMAGES)


class Fault(NamedTuple):
    kind: str
    attempt: int  # attempt before which the fault strikes
    victim: int
    after_s: float
    call: str  # call of a save; the fault strikes at the first one of that name

    def __str__(self):
        return f"{self.kind} (rank {self.victim}, attempt {self.attempt})"

    def ends_as_told(self, statuses):
        """Return whether all ranks ended as docs/reliability.md says."""
        if self.kind in ASKED:
            return set(statuses) == {75}
        if self.kind in (ALL_KILLED, *DAMAGES):  # a rank may notice another one's death before its own comes
            return -signal.SIGKILL in statuses and set(statuses) <= {-signal.SIGKILL, 1}
        return list(statuses) == [-signal.SIGKILL if rank == self.victim else 1 for rank in range(RANKS)]


def draw_faults(rng, steps, every):
    """Return faults at about one in `every` attempts, each kind as often as any other.

    None strikes before there are two checkpoints, or so late that the run's last save could fail.
    """
    faults = []
    kinds = []
    attempt = every
    while attempt < steps - every:
        kinds = kinds or rng.sample(KINDS, len(KINDS))
        victim = rng.randrange(RANKS)
        calls = CALLS if victim == 0 else ("create", "write", "sync_file")  # other ranks only write their file
        faults.append(Fault(kinds.pop(), attempt, victim, rng.uniform(0, LATEST_S), rng.choice(calls)))
        attempt += rng.randrange(every // 2, every + every // 2 + 1)
    return faults


class Strikes:
    """Callable for every rank before each attempt; a line in `log` tells of each fault that struck."""

    def __init__(self, faults, log):
        self.faults, self.log = list(faults), log

    def __call__(self, rank, number):
        if not self.faults or number < self.faults[0].attempt:
            return
        fault = self.faults.pop(0)
        if rank == fault.victim:
            with self.log.open("a") as log:
                log.write(f"{fault}\n")
        if fault.kind in (ALL_KILLED, *DAMAGES):
            _send(signal.SIGKILL, fault.after_s)
        elif rank != fault.victim:
            return
        elif fault.kind in SIGNALS:
            _send(SIGNALS[fault.kind], fault.after_s)
        elif fault.kind == KILLED_IN_A_SAVE:
            _before_calls([fault.call], lambda: os.kill(os.getpid(), signal.SIGKILL))
        else:
            refusals = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))] * FULL_FOR  # then it takes files again

            def refuse():
                if refusals:
                    raise refusals.pop()

            _before_calls(["make_directory", "create"], refuse)


def _send(number, after_s):
    timer = threading.Timer(after_s, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _before_calls(names, strike):
    """Call `strike` before these calls from now on, in this process.

    The first such call is of a save that is under way, or of the next one.
    """
    for name in names:
        setattr(Files, name, _struck(vars(Files)[name], strike))


def _struck(call, strike):
    def strike_and_call(files, *arguments):
        strike()
        return call.__get__(files)(*arguments)  # a method or a static one

    return strike_and_call


def damage_newest(folder, kind, rng):
    file = rng.choice(sorted(checkpoints(folder)[0].iterdir()))
    content = bytearray(file.read_bytes())
    place = rng.randrange(len(content))
    if kind == DAMAGES[0]:
        content[place] ^= 1 << rng.randrange(8)
    else:
        del content[place:]
    file.write_bytes(content)
