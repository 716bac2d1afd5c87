"""Ends this rank when another one is dead or hung, saying which; and asks the run to leave when its launcher died.

A collective whose peer is dead or hung ends by the process group's time limit at best, with an error that names
neither. Here each rank has a thread that gives signs of life. A rank whose main thread has stood still for `timeout_s`
looks who is silent, or else who is behind, and all ranks end with that verdict, each with its stacks in a file.
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
from types import TracebackType
from typing import TextIO

from megamix.train.liveness import Place, RollCall, Sign, Verdict, end_here
from megamix.train.signals import PARENT_DIED, LeaveRequest
from megamix.train.status import EXIT_STATUS, RunStatus

_BEATS_HEARD = 3  # in which a rank that lives gives a sign
_SHOWN = 8  # ranks in a verdict
_LAST_RESORT_S = 1.5  # after the time limit faulthandler's own thread ends a process whose threads are all stuck


class Watchdog:
    """Watches between `with` and the end of the block.

    `roll`: None for a rank alone, which nobody waits for. `launched`: there is a launcher, whose death is a request to
    leave; without one the parent is a shell, and a run may outlive that.
    """

    def __init__(
        self, roll: RollCall | None, timeout_s: float, place: Callable[[], Place],
        status: RunStatus, leave: LeaveRequest, *, launched: bool,
    ):  # fmt: skip
        self._roll, self._timeout_s, self._place = roll, timeout_s, place
        self._status, self._leave = status, leave
        self._parent = os.getppid() if launched else None
        self._tick_s = min(0.5, timeout_s / 12)
        self._rank = roll.rank if roll is not None else 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._stacks: TextIO | None = None

    def __enter__(self) -> Watchdog:
        if self._roll is not None:
            self._status.folder.mkdir(
                parents=True, exist_ok=True
            )  # a folder that only the first rank's host has so far
            self._stacks = (self._status.folder / f"stacks_rank{self._rank}.txt").open("w", encoding="utf-8")
            with contextlib.suppress(RuntimeError):
                self._roll.beat(self._place())  # before anything can go wrong: the others know at least who we are
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and self._roll is not None:
                self._explain(error, self._roll)
        finally:
            self._closing.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
            if self._stacks is not None:
                self._stacks.close()
                if error is None:
                    Path(self._stacks.name).unlink()

    def _watch(self) -> None:
        place, since_s, before = self._place(), time.monotonic(), None
        self._arm()
        while not self._closing.wait(self._tick_s):
            if self._parent is not None and os.getppid() != self._parent:
                self._leave.ask(PARENT_DIED)
            if self._roll is None:
                continue
            last, place = place, self._place()
            if place != last:
                since_s, before = time.monotonic(), None
                self._arm()
            stood_s = time.monotonic() - since_s
            with contextlib.suppress(RuntimeError):  # the store is gone: the last resort holds
                self._roll.beat(place)
                if before is None and stood_s > self._timeout_s - _BEATS_HEARD * self._tick_s:
                    before = self._roll.signs()
                if (verdict := self._roll.verdict()) is not None:
                    self._end(verdict, self._roll)
                if before is not None and stood_s > self._timeout_s:
                    verdict = self._roll.decide(self._judge(before, self._roll))
                    print(f"megamix train: {verdict.text}", file=sys.stderr)
                    self._end(verdict, self._roll)

    def _arm(self) -> None:
        """Should this thread be stuck as well, in the store or without the interpreter's lock."""
        if self._stacks is not None:
            faulthandler.dump_traceback_later(self._timeout_s + _LAST_RESORT_S, exit=True, file=self._stacks)

    def _judge(self, before: dict[int, Sign], roll: RollCall) -> Verdict:
        """Who is to blame for this rank's standing still. `before`: the signs of a few beats ago."""
        signs = roll.signs()
        silent = _silent(before, signs, roll)
        behind = [rank for rank, sign in signs.items() if sign.spans == min(sign.spans for sign in signs.values())]
        if silent:
            what = f"no sign of life from {_names(silent)}"
        elif len(behind) < len(signs):
            what = f"{_names(behind)} fell behind"
        else:
            what = "all ranks stand in the same place"
        lines = [f"no progress for {self._timeout_s:g} s (parallelism.timeout_s): {what}"]
        shown = [*(silent or behind)[:_SHOWN], roll.rank]
        lines += [f"  rank {rank}: last in {signs[rank]}" for rank in dict.fromkeys(shown) if rank in signs]
        return Verdict("\n".join(lines), silent)

    def _explain(self, error: Exception, roll: RollCall) -> None:
        """Say to the others, and in a note to the error, whether it is this rank's own or a dead peer's."""
        traceback.print_exception(error, file=self._stacks)
        with contextlib.suppress(RuntimeError):
            place, silent = self._place(), []
            if isinstance(error, RuntimeError):  # torch's; a peer that died breaks the connection at once
                before = roll.signs()
                time.sleep(_BEATS_HEARD * self._tick_s)
                silent = _silent(before, roll.signs(), roll)
            where = f"in {place.doing}, attempt {place.attempt}"
            text = f"rank {roll.rank} failed {where}: {type(error).__name__}: {error}"
            if silent:
                signs = roll.signs()
                lasts = [f"\n  rank {rank}: last in {signs[rank]}" for rank in silent[:_SHOWN] if rank in signs]
                text = f"{_names(silent)} died; rank {roll.rank} was {where}" + "".join(lasts)
            verdict = roll.decide(Verdict(text, silent))
            error.add_note(verdict.text)
            if roll.rank != 0 and roll.rank == _speaker(verdict, roll):
                self._status.write("failed", verdict.text)

    def _end(self, verdict: Verdict, roll: RollCall) -> None:
        """End this process now: its main thread may never come back."""
        faulthandler.dump_traceback(file=self._stacks or sys.stderr)
        signs = roll.signs()
        for rank in verdict.silent:
            if rank in signs:
                end_here(signs[rank])
        if roll.rank == _speaker(verdict, roll):
            self._status.write("failed", verdict.text)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(EXIT_STATUS["failed"] or 1)


def _silent(before: dict[int, Sign], after: dict[int, Sign], roll: RollCall) -> list[int]:
    """The other ranks that have given no sign between the two."""
    heard = {rank for rank, sign in after.items() if rank not in before or sign.beat != before[rank].beat}
    return [rank for rank in range(roll.size) if rank != roll.rank and rank not in heard]


def _speaker(verdict: Verdict, roll: RollCall) -> int:
    """The lowest rank that lives."""
    return min(rank for rank in range(roll.size) if rank not in verdict.silent)


def _names(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank {', '.join(map(str, ranks[:_SHOWN]))}{more}"
