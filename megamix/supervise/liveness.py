"""Signs of life: what the ranks of a run tell each other beside their collectives."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from torch.distributed import Store  # type: ignore[attr-defined]

from megamix.checkpoint.record import printable
from megamix.supervise.processes import Siblings, process, process_start

_LONGEST = 10_000  # characters of a verdict
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Words = Annotated[str, Field(max_length=256, pattern="^[ -~]*$")]  # a terminal shows these as they are


class Position(NamedTuple):
    """Where a rank's main thread stands."""

    spans: int  # entered since the start: of two ranks that wait for each other, the one with fewer is behind
    doing: str
    attempt: int
    written: int  # bytes of the checkpoint for which it waits: a slow disk is not a hang


class Sign(NamedTuple):
    """A rank's last sign of life."""

    beat: _Count
    idle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # since its main thread was last seen to move
    spans: _Count
    doing: _Words
    attempt: _Count
    written: _Count
    host: _Words
    pid: Annotated[int, Field(gt=1, le=2**22)]  # the system's largest; 0 and below would be a group, or all there are
    start: _Words

    @staticmethod
    def read(value: bytes) -> Sign | None:
        """What a rank has written; None for anything else, for others can write to the store, too."""
        with contextlib.suppress(ValidationError):
            return _SIGN.validate_json(value, strict=True)
        return None

    def __str__(self) -> str:
        return f"{self.doing}, attempt {self.attempt} (pid {self.pid} on {self.host})"

    @property
    def is_here(self) -> bool:
        """On this host, so that its process can be looked at."""
        return self.host == socket.gethostname()

    @property
    def runs(self) -> bool:
        """Of a rank of this host: its process is neither dead nor stopped."""
        found = process(self.pid)
        return found is not None and found.start == self.start and found.state not in "ZXT"


class Judgement(NamedTuple):
    """Why all ranks must end."""

    text: str
    missing: list[int]  # ranks that are dead or stopped
    exit_status: Literal[1, 2] = 1  # of all ranks

    @staticmethod
    def read(value: bytes, size: int) -> Judgement | None:
        """As a rank has written it; None for what none of `size` ranks writes."""
        with contextlib.suppress(ValidationError):
            verdict = _VERDICT.validate_json(value, strict=True)
            if set(verdict.missing) < set(range(size)):
                return verdict.fit()
        return None

    def fit(self) -> Judgement:
        """For a terminal: the words of an error, or of somebody else's store, may hold anything."""
        lines = self.text[:_LONGEST].split("\n")
        return self._replace(text="\n".join(printable(line, _LONGEST) for line in lines))


_SIGN, _VERDICT = TypeAdapter(Sign), TypeAdapter(Judgement)


class RollCall:
    """Every rank's last sign of life, and one verdict for all, in the store in which the ranks have met.

    A call costs a request or two, and nobody waits for anybody. Raises: RuntimeError where the store is gone, as it is
    when the launcher that held it died.
    """

    def __init__(self, store: Store, rank: int, size: int):
        self.rank, self.size = rank, size
        self._store = store
        self.siblings = Siblings()
        self._beat = 0
        self._me = (socket.gethostname(), os.getpid(), process_start(os.getpid()))

    def beat(self, position: Position, idle_s: float) -> None:
        self._beat += 1
        self._store.set(f"rank {self.rank}", json.dumps([self._beat, idle_s, *position, *self._me]))

    def signs(self) -> dict[int, Sign]:
        """By rank; without those that have given none so far."""
        given = [rank for rank in range(self.size) if self._store.check([f"rank {rank}"])]
        signs = {rank: Sign.read(self._store.get(f"rank {rank}")) for rank in given}
        return {rank: sign for rank, sign in signs.items() if sign is not None}

    def verdict(self) -> Judgement | None:
        return Judgement.read(self._store.get("verdict"), self.size) if self._store.check(["verdict"]) else None

    def decide(self, verdict: Judgement) -> Judgement:
        """The first verdict is everybody's: returns that one."""
        verdict = verdict.fit()
        return Judgement.read(self._store.compare_set("verdict", "", json.dumps(verdict)), self.size) or verdict

    def end(self, sign: Sign) -> None:
        """Kill a rank of this launcher: a stopped process notices nothing, and would keep its memory and its GPU."""
        if sign.is_here:
            self.siblings.end(sign.pid)
