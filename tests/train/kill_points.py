"""A plugin of a job that kills a rank at a point of its step, before which the run's checkpoints are moved away.

MEGAMIX_TEST_FOLDER is the job's folder, in which the ranks note their attempts. MEGAMIX_TEST_KILLS are
RANK:ATTEMPT:POINT,...: from that attempt on (-1: from the start) the point is awaited, until it has killed a rank.
MEGAMIX_TEST_NODES has a letter for each rank, its node; each node's shared memory is a folder in FOLDER/shm.
"""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megamix.checkpoint import in_memory, mirror, slots
from megamix.checkpoint.folder import Files
from megamix.checkpoint.mirror import SharedSlot
from megamix.checkpoint.save import Saver
from megamix.cli import train
from megamix.comm.collectives import Collectives
from megamix.comm.host import HostMessages
from megamix.mixed_precision import engine
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.module_state import Tallies
from megamix.mixed_precision.param_gather import ParamGather
from megamix.mixed_precision.unit_gather import UnitGather
from megamix.train.batch_plan import BatchPlan
from megamix.train.resume import Resume
from megamix.train.trainer import Trainer

_GATHERS = (ParamGather, UnitGather)


class Point(NamedTuple):
    """A call before which a rank dies, or behind which."""

    owners: tuple[object, ...]
    name: str
    call: int = 1  # the first one that is awaited, the second...
    after: bool = False
    slot: int | None = None  # the slot that is being written; None: any


POINTS = {
    "launch": Point((BatchPlan,), "launch", after=True),
    "unit wait": Point(_GATHERS, "before_forward", call=2),
    "gradient": Point((GradReduce,), "_on_grad", call=3),
    "sum launched": Point((Bucket,), "launch_sum", after=True),
    "sum arrived": Point((Bucket,), "wait_for_sum", after=True),
    "before agree": Point((engine,), "agree"),
    "in agree": Point((Collectives,), "table", after=True),
    "after agree": Point((engine,), "agree", after=True),
    "tallies summed": Point((Tallies,), "take", after=True),
    "first update": Point(_GATHERS, "updated"),
    "first gather": Point(_GATHERS, "updated", after=True),
    "second update": Point(_GATHERS, "updated", call=2),
    "second gather": Point(_GATHERS, "updated", call=2, after=True),
    "tallies moved": Point((Tallies,), "move", after=True),
    "copy to slot 0": Point((mirror,), "sum_words", call=4, slot=0),
    "copy to slot 1": Point((mirror,), "sum_words", call=4, slot=1),
    "copy to slot 2": Point((mirror,), "sum_words", call=4, slot=2),
    "no record": Point((SharedSlot,), "close"),
    "mirrored": Point((SharedSlot,), "close", after=True),
    "log row": Point((Trainer,), "_log", after=True),
    "validated": Point((Trainer,), "_validate", after=True),
    "save begun": Point((Saver,), "start", after=True),
    "save chunk": Point((Files,), "write", call=2),
}
SENDS = {  # only with several nodes
    "sent": Point((HostMessages,), "send", after=True),
    "received": Point((HostMessages,), "receive"),
}
AT_A_START = {
    "loading": Point((Resume,), "load_into"),
    "loaded": Point((Resume,), "load_into", after=True),
}


class _Kill:
    """Awaits a point in this process."""

    def __init__(self, point: Point, attempt: int, folder: Path, mark: Path):
        self._point, self._attempt, self._folder, self._mark = point, attempt, folder, mark
        self._left, self._awaited, self._slot = point.call, attempt < 0, ""

    def arm(self) -> None:
        _wrap(BatchPlan, "launch", after=self._launched)
        _wrap(SharedSlot, "open", before=self._opened)
        for owner in self._point.owners:
            place = {"after": self._strike} if self._point.after else {"before": self._strike}
            _wrap(owner, self._point.name, **place)
        if self._point.slot == 2:  # a save that never ends keeps another one
            Files.write = lambda *_: threading.Event().wait()

    def _launched(self, arguments, attempt):
        self._awaited |= attempt.number >= self._attempt

    def _opened(self, arguments):
        self._slot = arguments[0]._record.stem
        self._left = self._point.call if self._point.slot is not None else self._left

    def _strike(self, *_):
        if not self._awaited or (self._point.slot is not None and not self._slot.endswith(f"slot_{self._point.slot}")):
            return
        self._left -= 1
        if self._left == 0:
            with suppress(FileNotFoundError):
                (self._folder / "run/checkpoints").rename(self._mark.with_suffix(".checkpoints"))
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _wrap(owner, name, before=lambda arguments: None, after=lambda arguments, value: None):
    """Have calls of a function or method told, before and after."""
    kept = vars(owner)[name]
    call = kept.__func__ if isinstance(kept, staticmethod) else kept

    def told(*arguments, **keys):
        before(arguments)
        value = call(*arguments, **keys)
        after(arguments, value)
        return value

    setattr(owner, name, staticmethod(told) if isinstance(kept, staticmethod) else told)


def _arm(folder):
    rank, nodes = int(os.environ["RANK"]), os.environ["MEGAMIX_TEST_NODES"]
    for module in (slots, in_memory):
        module.SHARED = folder / "shm" / nodes[rank]
    mirror._CHUNK = 1 << 12  # shares of tests are small
    if rank == 0:
        with (folder / "attempts.txt").open("a") as told:
            told.write("start\n")
        _wrap(BatchPlan, "launch", after=lambda arguments, attempt: _note(folder, attempt))
    for kill in os.environ["MEGAMIX_TEST_KILLS"].split(","):
        victim, attempt, name = kill.split(":")
        mark = folder / f"{kill}.mark"
        if not mark.exists():
            if rank == int(victim):
                _Kill((POINTS | SENDS | AT_A_START)[name], int(attempt), folder, mark).arm()
            return


def _note(folder, attempt):
    with (folder / "attempts.txt").open("a") as told:
        told.write(f"{attempt.number}\n")


def _armed(run_warm):
    def run(*arguments):
        _arm(Path(os.environ["MEGAMIX_TEST_FOLDER"]))
        return run_warm(*arguments)

    return run


train.run_warm = _armed(train.run_warm)  # ranks are forked from the process that has imported this
