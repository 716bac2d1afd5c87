"""The watchdog of a rank. When another rank is dead or hung, it names that rank and ends its own. When the launcher has
died, it asks the run to leave.

A collective whose peer is dead or hung ends by the process group's time limit at best, with an error that does not name
the peer. Here each rank has a thread that gives signs of life. A rank whose main thread has stood still for `timeout_s`
looks for silent ranks or, if there are none, for ranks that are behind. All ranks end for that reason, and each writes
its stacks to a file. As long as any rank makes progress, the others wait for it, and no rank counts as hung. A rank
that waits for its checkpoint makes progress with every chunk that the disk takes.

There are two threads. One looks at this process and its launcher. The other talks through the store: its calls hang
while the launcher that holds the store is stopped, and that must not delay a run that makes progress or ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO

from torch.distributed import DistNetworkError

from megamix.base.console import drop_unwritten, say
from megamix.base.signals import PARENT_DIED, LeaveRequest
from megamix.comm.host import tell_collectives
from megamix.config import ConfigError
from megamix.data.steady_file import DataError
from megamix.launch.exit_status import (
    NO_MEMORY,
    WRONG_INPUT,
    EndedEarlyError,
    NoMemoryError,
    PeerLostError,
    WrongDataError,
)
from megamix.launch.journal import Journal
from megamix.launch.liveness import EndReason, Position, RollCall, Sign, names

_WAITING_PLACES = ("/torch/distributed/", "/torch/cuda/", "/megamix/comm/")
_SHOWN = 8  # most ranks whose last places an end reason lists
_GRACE_S = 2.0  # most seconds to wait for the end of a thread, or for the signs of a dead peer
_LAST_RESORT_S = 1.5  # seconds after the time limit at which faulthandler ends a process whose threads are stuck


_OF_ONE_RANK: dict[int, type[EndedEarlyError]] = {WRONG_INPUT: WrongDataError, NO_MEMORY: NoMemoryError}


def early_end(error: BaseException) -> EndedEarlyError | None:
    """Return the error by which all ranks end after one rank's `error`, with a message of one line. Return None if
    `error` is of no kind that has an exit status of its own.
    """
    if isinstance(error, DataError | WrongDataError):
        return WrongDataError(str(error))
    words = str(error).partition("\n")[0].rpartition("DefaultCPUAllocator: ")[2]
    signs = ("tried to allocate", "out of memory", "bad_alloc", "annot allocate memory")
    if isinstance(error, MemoryError) or (isinstance(error, Exception) and any(sign in words for sign in signs)):
        return NoMemoryError(words if "out of memory" in words else f"ran out of memory: {words}")
    return None


class Watchdog:
    """Watches until the end of a `with` block.

    `roll`: None for a single rank. `launcher`: the launcher's pid; its death is a request to leave. None: the parent is
    a shell, which a run may outlive. `position`: returns the main thread's position, on any thread.
    """

    def __init__(
        self,
        roll: RollCall | None,
        timeout_s: float,
        journal: Journal,
        leave: LeaveRequest,
        launcher: int | None,
        position: Callable[[], Position],
    ):
        self._position = position
        self._roll, self._timeout_s = roll, timeout_s
        self._journal, self._leave = journal, leave
        self._launcher = launcher
        self._tick_s = min(0.25, timeout_s / 12)  # seconds from one sign to the next
        self._window_s = timeout_s / 4  # seconds within which a living rank of another host gives a sign
        self._grace_s = min(_GRACE_S, self._window_s)
        self._moved_s = time.monotonic()  # time of the last progress of the main thread
        self._since_s = self._moved_s  # time of the last progress of any rank, as far as this rank knows
        self._rank = roll.rank if roll is not None else 0
        self._collectives = journal.folder / f"collectives_rank{self._rank}.json"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._talker = threading.Thread(target=self._talk, name="roll call", daemon=True)
        self._stacks: IO[str] | None = None

    def __enter__(self) -> Watchdog:
        if self._roll is not None:
            try:
                self._journal.folder.mkdir(parents=True, exist_ok=True)  # this host may have no such folder yet
                stacks = self._journal.folder / f"stacks_rank{self._rank}.txt"
                self._stacks = stacks.open("w", encoding="utf-8")
            except OSError as error:
                say(f"megamix train: stacks of rank {self._rank} would go to stderr: {error}", sys.stderr)
            with contextlib.suppress(RuntimeError):
                self._beat(self._roll)  # first of all, so that the others know this rank's host and pid
            self._arm()
            self._talker.start()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._closing.set()
        self._thread.join()
        if self._roll is not None:
            # A talker that takes longer is stuck in the store. It can no longer end this process, because `_closing` is
            # set.
            self._talker.join(self._grace_s)
        try:
            alike = error is None or isinstance(error, EndedEarlyError | ConfigError)  # the same on all ranks
            if not alike and isinstance(error, Exception) and self._roll is not None:
                with contextlib.suppress(OSError):
                    traceback.print_exception(error, file=self._stacks or sys.stderr)
                tell_collectives(self._collectives)
                if not self._store_is_gone():
                    self._explain(error, self._roll)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if self._stacks is not None:
                with contextlib.suppress(OSError):
                    self._stacks.close()
                    if alike:
                        Path(self._stacks.name).unlink()

    def _watch(self) -> None:
        position = self._position()
        while not self._closing.wait(self._tick_s):
            if self._is_orphan():
                self._leave.ask(PARENT_DIED)
            last, position = position, self._position()
            if position != last:
                self._moved_s = self._since_s = time.monotonic()
                self._arm()

    def _talk(self) -> None:
        assert self._roll is not None
        suspicion: _Suspicion | None = None
        moved_s = self._moved_s
        while not self._closing.wait(self._tick_s) and not self._store_is_gone():
            if self._moved_s != moved_s:
                suspicion, moved_s = None, self._moved_s
            try:
                suspicion = self._look(self._roll, suspicion)
            except DistNetworkError:  # the store is gone, and each further try would print a C++ stack
                return
            except RuntimeError:  # somebody removed a key; faulthandler's timer still stands
                continue

    def _is_orphan(self) -> bool:
        return self._launcher is not None and os.getppid() != self._launcher

    def _store_is_gone(self) -> bool:
        """Return whether the store died with the launcher. If there are several launchers, another one may hold the
        store.
        """
        return self._is_orphan() and os.environ.get("GROUP_WORLD_SIZE", "1") == "1"

    def _look(self, roll: RollCall, suspicion: _Suspicion | None) -> _Suspicion | None:
        """Give a sign of life. End this process if there is an end reason, or if one is due. Return the search for
        missing ranks, if there is one, for the next call.
        """
        self._beat(roll)
        if (reason := roll.reason()) is not None:
            self._end(reason, roll)
            return None
        if suspicion is None:
            return _Suspicion(roll) if self._stood_s() > self._timeout_s - self._window_s - self._tick_s else None
        # The age of the search counts, too: a process that was stopped finds the limit passed as soon as it goes on.
        if suspicion.age_s() <= self._window_s or self._stood_s() <= self._timeout_s:
            return suspicion
        missing, idle_s = suspicion.missing(), suspicion.idle_s()
        if not missing and idle_s < self._timeout_s:  # some rank makes progress, and the others wait for it
            self._since_s = time.monotonic() - idle_s
            self._arm()
            return None
        reason = roll.decide(self._judge(missing, roll))
        say(f"megamix train: {reason.text}", sys.stderr)
        self._end(reason, roll)
        return None

    def _beat(self, roll: RollCall) -> None:
        roll.beat(self._position(), time.monotonic() - self._moved_s, waits=_main_thread_waits())

    def _stood_s(self) -> float:
        return time.monotonic() - self._since_s

    def _arm(self) -> None:
        """Start faulthandler's timer again. The timer ends the process if both threads are stuck, as in the store or in
        a wait for the interpreter's lock.
        """
        if self._roll is not None:
            to = self._stacks or sys.stderr
            faulthandler.dump_traceback_later(self._timeout_s + _LAST_RESORT_S, exit=True, file=to)

    def _judge(self, missing: list[int], roll: RollCall) -> EndReason:
        """Return the end reason, which names the ranks because of which this rank stands still."""
        signs = roll.signs()
        # The ranks that do not wait are behind. If all seem to wait or none does (as on a GPU), the ranks with the
        # fewest spans are behind. Spans count only then, because the stages of a pipeline enter different numbers of
        # spans.
        behind = [rank for rank, sign in signs.items() if not sign.waits]
        if len(behind) in (0, len(signs)):
            fewest = min((sign.spans for sign in signs.values()), default=0)
            behind = [rank for rank, sign in signs.items() if sign.spans == fewest]
        if missing:
            what = f"no sign of life from {names(missing)}"
        elif len(behind) < len(signs):
            what = f"{names(behind)} fell behind"
        else:
            what = "all ranks are at the same place"
        lines = [f"no progress for {self._timeout_s:g} s (parallelism.timeout_s): {what}"]
        return EndReason("\n".join([*lines, *_last_places([*(missing or behind), roll.rank], signs)]), missing)

    def _explain(self, error: Exception, roll: RollCall) -> None:
        """Find out whether this rank or another one has caused the error. Tell the others, and add a note to it."""
        with contextlib.suppress(RuntimeError):
            # A dying peer breaks the connection, which is a RuntimeError of torch, before the system says that it is
            # dead.
            early = early_end(error)
            missing = self._wait_for_missing(roll) if isinstance(error, RuntimeError) and early is None else []
            position = self._position()
            where = f"in {position.doing}, attempt {position.attempt}"
            if self._stood_s() > self._timeout_s:  # the collective's own limit came before ours
                reason = self._judge(missing, roll)
            elif missing:
                lines = [f"{names(missing)} died; rank {roll.rank} was {where}", *_last_places(missing, roll.signs())]
                reason = EndReason("\n".join(lines), missing)
            elif early is not None:
                reason = EndReason(f"rank {roll.rank}, attempt {position.attempt}: {early}", [], early.exit_status)
            else:
                reason = EndReason(f"rank {roll.rank} failed {where}: {type(error).__name__}: {error}", [])
            own, reason = reason, roll.decide(reason)
            if reason.exit_status in _OF_ONE_RANK:
                raise _OF_ONE_RANK[reason.exit_status](reason.text) from error
            if reason == own:
                say(f"megamix train: {reason.text}", sys.stderr)
            # The end reason comes first: a collective's own note is about the consequence, and may name another cause.
            error.__notes__ = [reason.text, *getattr(error, "__notes__", [])]
            _end_missing(reason, roll)
            if roll.rank == _speaker(reason, roll) and (roll.rank != 0 or reason.missing):
                self._journal.end(PeerLostError(reason.text))
            if reason.missing:  # this rank's traceback would bury the reason: it shows the consequence
                where = self._stacks.name if self._stacks is not None else "stderr"
                raise PeerLostError(f"ended without {names(reason.missing)}; this rank's traceback: {where}") from error

    def _wait_for_missing(self, roll: RollCall) -> list[int]:
        suspicion = _Suspicion(roll)
        while not (missing := suspicion.missing_here()) and suspicion.age_s() < self._grace_s:
            time.sleep(self._tick_s / 5)
            self._beat(roll)  # other ranks may be looking for missing ones, too
        return missing or suspicion.missing()

    def _end(self, reason: EndReason, roll: RollCall) -> None:
        """End this process now, because its main thread may never come back. Whatever fails on the way, it ends."""
        if self._closing.is_set():  # the main thread has come back while this thread was stuck in the store
            return
        try:
            faulthandler.dump_traceback(file=self._stacks or sys.stderr)
            _end_missing(reason, roll)
            if roll.rank == _speaker(reason, roll):
                self._journal.end(_OF_ONE_RANK.get(reason.exit_status, PeerLostError)(reason.text))
            if reason.exit_status in _OF_ONE_RANK and roll.rank == 0:  # as the command line prints errors
                say(f"megamix train: {reason.text}", sys.stderr)
            drop_unwritten()
            tell_collectives(self._collectives)
        finally:
            os._exit(reason.exit_status)


def _main_thread_waits() -> bool:
    """Return whether the main thread is in code that communicates, and so waits for another rank."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and any(place in frame.f_code.co_filename for place in _WAITING_PLACES)


class _Suspicion:
    """A search for ranks that give no sign of life after its start."""

    def __init__(self, roll: RollCall):
        self._roll, self._before, self._since_s = roll, roll.signs(), time.monotonic()

    def age_s(self) -> float:
        return time.monotonic() - self._since_s

    def idle_s(self) -> float:
        """Return the seconds since the last progress of any rank's main thread."""
        return min((sign.idle_s for sign in self._roll.signs().values()), default=0.0)

    def missing_here(self) -> list[int]:
        """Return the missing ranks of this host, as the system knows them, at once and under any load. This rank itself
        is never missing, whatever the store says.
        """
        here = [rank for rank, sign in self._before.items() if sign.is_here and not sign.runs]
        return [rank for rank in here if rank != self._roll.rank]

    def missing(self) -> list[int]:
        """Return the missing ranks of all hosts. On another host these are the ranks with no new sign since this search
        began, so call it only after some time.
        """
        after = self._roll.signs()
        elsewhere = [
            rank
            for rank in range(self._roll.size)
            if rank != self._roll.rank
            if rank not in after or (not after[rank].is_here and after[rank] == self._before.get(rank))
        ]
        return sorted({*self.missing_here(), *elsewhere})


def _end_missing(reason: EndReason, roll: RollCall) -> None:
    """Kill the missing ranks of this host. A stopped process would not notice the end, and would keep its memory
    and its GPU.
    """
    for rank, sign in roll.signs().items():
        if rank in reason.missing:
            sign.end()


def _speaker(reason: EndReason, roll: RollCall) -> int:
    """Return the lowest living rank, which writes the run's end."""
    return min(rank for rank in range(roll.size) if rank not in reason.missing)


def _last_places(ranks: list[int], signs: dict[int, Sign]) -> list[str]:
    shown = dict.fromkeys([*ranks[:_SHOWN], *ranks[-1:]])
    return [f"  rank {rank}: last in {signs[rank]}" for rank in shown if rank in signs]
