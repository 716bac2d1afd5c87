"""Signs of life: messages that a run's ranks send to each other, beside their collectives."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

from megamix.checkpoint.manifest import printable
from megamix.supervise.processes import Siblings, process, process_start
from megamix.supervise.status import NoAnswerError

LARGEST = 64 << 20  # bytes: no rank writes a larger value
_SHOWN_RUNS = 8  # most runs of consecutive ranks that a message lists
_T = TypeVar("_T")
_LONGEST = 10_000  # most characters of an end reason
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Words = Annotated[str, Field(max_length=256, pattern="^[ -~]*$")]  # printable ASCII: no terminal escapes


def read_strictly(form: TypeAdapter[_T], content: bytes) -> _T | None:
    """Return a value that a rank has written as JSON. Return None for anything else: others can write to the store,
    too.
    """
    with contextlib.suppress(ValueError):
        if len(content) <= LARGEST:
            return form.validate_json(content, strict=True)
    return None


class Position(NamedTuple):
    """The place of a rank's main thread in its work."""

    spans: int  # number of spans entered since the start; of two ranks that wait, the one with fewer spans is behind
    doing: str
    attempt: int
    written: int  # bytes that the save under way has written, or that a start has drawn and loaded; growth is progress


class Sign(NamedTuple):
    """A rank's last sign of life."""

    beat: _Count
    idle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # seconds since the last progress of its main thread
    spans: _Count
    doing: _Words
    attempt: _Count
    written: _Count
    host: _Words
    pid: Annotated[int, Field(gt=1, le=2**22)]  # Linux's largest; kill(0 or less) means groups
    start: _Words
    waits: bool = False  # its main thread waits for another rank

    @staticmethod
    def read(value: bytes) -> Sign | None:
        return read_strictly(_SIGN, value)

    def __str__(self) -> str:
        return f"{self.doing}, attempt {self.attempt} (pid {self.pid} on {self.host})"

    @property
    def is_here(self) -> bool:
        """Return whether the rank runs on this host, so that its process can be looked at."""
        return self.host == socket.gethostname()

    @property
    def runs(self) -> bool:
        """Return whether the process of a rank on this host is neither dead nor stopped."""
        found = process(self.pid)
        return found is not None and found.start == self.start and not found.is_stopped


class EndReason(NamedTuple):
    """The reason why all ranks must end."""

    text: str
    missing: list[int]  # ranks that are dead or stopped
    exit_status: Annotated[int, Field(ge=1, le=4)] = 1  # exit status of all ranks

    @staticmethod
    def read(value: bytes, size: int) -> EndReason | None:
        """Return the end reason that a rank has written; None for a value that no rank writes. `size`: number of
        ranks.
        """
        reason = read_strictly(_END_REASON, value)
        return reason.fit() if reason is not None and set(reason.missing) < set(range(size)) else None

    def fit(self) -> EndReason:
        """Return the reason with a text that is safe on a terminal: an error, or the store, may have any bytes."""
        lines = self.text[:_LONGEST].split("\n")
        return self._replace(text="\n".join(printable(line, _LONGEST) for line in lines))


_SIGN, _END_REASON = TypeAdapter(Sign), TypeAdapter(EndReason)


class RollCall:
    """Every rank's last sign of life, and the end reason of all ranks, in the store in which the ranks have met.

    A call makes only a few requests, and waits for no rank. Raises: RuntimeError if the store is gone, as when the
    launcher that held it has died.
    """

    def __init__(self, store: Store, rank: int, size: int):
        self.rank, self.size = rank, size
        self._store = store
        self.siblings = Siblings()
        self._beat = 0
        self._me = (socket.gethostname(), os.getpid(), process_start(os.getpid()))

    def beat(self, position: Position, idle_s: float, *, waits: bool = False) -> None:
        self._beat += 1
        self._store.set(f"rank {self.rank}", json.dumps([self._beat, idle_s, *position, *self._me, waits]))

    def signs(self) -> dict[int, Sign]:
        """Return the signs by rank. Ranks that have given no sign so far are left out."""
        given = [rank for rank in range(self.size) if self._store.check([f"rank {rank}"])]
        signs = {rank: Sign.read(self._store.get(f"rank {rank}")) for rank in given}
        return {rank: sign for rank, sign in signs.items() if sign is not None}

    def reason(self) -> EndReason | None:
        return EndReason.read(self._store.get("end reason"), self.size) if self._store.check(["end reason"]) else None

    def decide(self, reason: EndReason) -> EndReason:
        """Return the end reason of all ranks: the first that any rank has written. If there is none yet, write
        `reason`.
        """
        reason = reason.fit()
        return EndReason.read(self._store.compare_set("end reason", "", json.dumps(reason)), self.size) or reason


def names(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2, 4 to 9`. A long list is cut: it ends with the number of ranks left out."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown, left = runs[:_SHOWN_RUNS], sum(map(len, runs[_SHOWN_RUNS:]))
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in shown]
    plural = "s" if sum(map(len, runs)) > 1 else ""
    return f"rank{plural} {', '.join(words)}" + (f" and {left} more" if left else "")


class Board:
    """JSON values that ranks exchange in a store, within a time limit. Raises: NoAnswerError for a value that no rank
    of this job has written.
    """

    grace_s = 2.0  # seconds within which the others read the first rank's outcome

    def __init__(self, store: Store, timeout_s: float):
        self._store, self._end_s = store, time.monotonic() + timeout_s
        self.limit = f"within {timeout_s:g} s (parallelism.timeout_s)"

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def claim(self, key: str, rank: int) -> int:
        """Return the rank that was the first to claim `key`."""
        return self._checked(key, self._store.compare_set(key, "", json.dumps(rank)), TypeAdapter(_Count))

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def wait(self, keys: Sequence[str], grace_s: float = 0.0) -> bool:
        """Wait for all keys. Return whether they came in time."""
        end_s = self._end_s + grace_s
        try:
            self._store.wait(list(keys), datetime.timedelta(seconds=max(0.1, end_s - time.monotonic())))
        except RuntimeError as error:
            if time.monotonic() < end_s - 0.1:  # the store rounds its limit, and may give up 0.1 s early
                first_line = str(error).partition("\n")[0]
                raise NoAnswerError(f"the store in which the ranks have met is gone: {first_line}") from None
            return False
        return True

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of the keys that have not come in time."""
        return [] if self.wait(keys) else [place for place, key in enumerate(keys) if not self.has(key)]

    def read(self, key: str, form: TypeAdapter[_T]) -> _T:
        """Return the value of a key that is there already."""
        return self._checked(key, self._store.get(key), form)

    def leave(self, rank: int, size: int) -> None:
        """Note that this rank has read. The first rank waits for the others: it may hold the store, and the outcome
        would end with it.
        """
        if self._store.add("have read", 1) == size:
            self._store.set("all have read", "")
        elif rank == 0:
            with contextlib.suppress(RuntimeError):
                self._store.wait(["all have read"], datetime.timedelta(seconds=Board.grace_s))

    def _checked(self, key: str, content: bytes, form: TypeAdapter[_T]) -> _T:
        found = read_strictly(form, content)
        if found is None:
            raise NoAnswerError(f"{key!r} in the store of the ranks has a value that no rank of this job has written")
        return found
