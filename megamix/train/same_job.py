"""Ranks of one job: before the model is built, what each rank was started with is held against all others'.

Ranks that differ in a seed, a dropout or the data would train on, and end with weights that nobody asked for. Each puts
what it was started with into the store in which the ranks have met, under its digest. The first rank compares the
digests and tells all what differs. A rank makes a handful of requests, the first one two more for each rank.

What comes from the store is JSON of a known form; anything else was not written by a rank of this job.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter
from torch.distributed import Store  # type: ignore[attr-defined]

from megamix.checkpoint.record import printable
from megamix.comm.topology import Topology, side_store
from megamix.config import Config, ConfigError
from megamix.supervise.console import say
from megamix.supervise.started_with import RankGroup, differences, names, started_with
from megamix.supervise.status import EndedEarlyError, State
from megamix.train.build_data import data_fingerprints, data_identity

LARGEST = 64 << 20  # bytes: what is larger, no rank has written
_LONGEST = 2000  # characters of a line out of the store, to which others may write, too
_GRACE_S = 2.0  # in which the first rank's outcome reaches the others, and they have read it
_PROBLEM = "problem"  # in place of what a rank was started with: why that is not known

_T = TypeVar("_T")
_RANK = TypeAdapter(Annotated[int, Field(ge=0)])
_DIGEST = TypeAdapter(Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")])
_TEXTS = TypeAdapter(dict[str, str])
_OUTCOME = TypeAdapter(tuple[list[str], str])  # what differs; why nothing could be compared


class NoAnswerError(EndedEarlyError):
    """A rank died or hung before all had agreed, or the store holds what no rank has written."""

    state: State = "failed"


class KnownData(NamedTuple):
    fingerprints: dict[str, str]  # by the key that names the data
    identity: str  # of this rank's files, from before the fingerprints were taken: see `check_unchanged`


def known_data(config: Config) -> KnownData:
    """Return what the data are, once all ranks are known to be of one job. Every rank must call it.

    Raises: as `check_same_job`; alone, ConfigError for data that cannot be read.
    """
    world = Topology.current().world
    if world.group is not None:
        return check_same_job(config, side_store(world), world.rank, world.size)
    try:
        identity = data_identity(config)
    except OSError as error:
        raise ConfigError([str(error)], "job") from error
    fingerprints = _read_fingerprints(config)
    if problem := fingerprints.get(_PROBLEM):
        raise ConfigError([problem], "job")
    return KnownData(fingerprints, identity)


def check_same_job(config: Config, store: Store, rank: int, size: int) -> KnownData:
    """Compare what the ranks were started with. Every rank must call it; `store` is for this alone.

    Raises: ConfigError on every rank, with everything that differs; NoAnswerError on every rank that lives, naming one
    that does not answer, within `parallelism.timeout_s` and a moment.
    """
    board = _Board(store, config.parallelism.timeout_s)
    data, problem = _shared_data(config, board, rank)
    record = {_PROBLEM: problem} if problem else started_with(config, data.fingerprints)
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    board.put(f"record {digest}", record)
    board.put(f"digest {rank}", digest)
    if rank == 0:
        board.put("outcome", _outcome(board, size))
    if not board.wait(["outcome"], _GRACE_S):
        silence = f"no sign of life from rank 0 {board.limit}, before it had said whether all were started alike"
        if rank == 1:  # it is the first rank that speaks, else
            say(f"megamix train: {silence}", sys.stderr)
        raise NoAnswerError(silence)
    problems, silence = board.read("outcome", _OUTCOME)
    if problems or silence:
        board.leave(rank, size)
        if silence:
            raise NoAnswerError(printable(silence, _LONGEST))
        raise ConfigError([printable(problem, _LONGEST) for problem in problems], "job")
    return data


def _shared_data(config: Config, board: _Board, rank: int) -> tuple[KnownData, str]:
    """What the data are, and why that is not known, if it is not. One rank reads for its machine."""
    nothing = KnownData({}, "")
    try:
        identity = data_identity(config)
        key = f"files {hashlib.sha256(identity.encode()).hexdigest()}"
        reader = board.claim(f"reader of {key}", rank)
        if reader == rank:
            board.put(key, _read_fingerprints(config))
        else:
            board.put(f"waits {rank}", reader)
        if not board.wait([key]):
            return nothing, f"rank {reader} had not read the data {board.limit}"
        answer = board.read(key, _TEXTS)
    except (OSError, NoAnswerError) as error:
        return nothing, str(error)
    return KnownData(answer, identity), answer.pop(_PROBLEM, "")


def _read_fingerprints(config: Config) -> dict[str, str]:
    try:
        return data_fingerprints(config)
    except (OSError, ValueError) as error:  # those that wait for it must learn that, too
        return {_PROBLEM: str(error)}


def _outcome(board: _Board, size: int) -> tuple[list[str], str]:
    """What all ranks are told: what differs, or why that cannot be known."""
    if not board.wait([f"digest {rank}" for rank in range(size)]):
        return [], _silence(board, size)
    ranks_of: dict[str, list[int]] = defaultdict(list)
    try:
        for rank in range(size):
            ranks_of[board.read(f"digest {rank}", _DIGEST)].append(rank)
        groups = [RankGroup(ranks, board.read(f"record {digest}", _TEXTS)) for digest, ranks in ranks_of.items()]
    except NoAnswerError as error:
        return [], str(error)
    failed = [group for group in groups if _PROBLEM in group.started_with]
    problems = [f"{names(group.ranks)}: {group.started_with[_PROBLEM]}" for group in failed]
    return [*problems, *differences([group for group in groups if group not in failed])], ""


def _silence(board: _Board, size: int) -> str:
    silent = [rank for rank in range(size) if not board.has(f"digest {rank}")]
    to_blame = [rank for rank in silent if not board.has(f"waits {rank}")] or silent
    return f"no sign of life from {names(to_blame)} {board.limit} after the ranks had met"


class _Board:
    """JSON in a store, until the time is over. Raises: NoAnswerError for what no rank has written."""

    def __init__(self, store: Store, timeout_s: float):
        self._store, self._end_s = store, time.monotonic() + timeout_s
        self.limit = f"within {timeout_s:g} s (parallelism.timeout_s)"

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def claim(self, key: str, rank: int) -> int:
        """Which rank was the first to claim this."""
        return self._checked(key, self._store.compare_set(key, "", json.dumps(rank)), _RANK)

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def wait(self, keys: Sequence[str], grace_s: float = 0.0) -> bool:
        """Whether all of them came in time."""
        end_s = self._end_s + grace_s
        try:
            self._store.wait(list(keys), datetime.timedelta(seconds=max(0.1, end_s - time.monotonic())))
        except RuntimeError as error:
            if time.monotonic() < end_s - 0.1:  # a store is early by what it rounds
                first_line = str(error).partition("\n")[0]
                raise NoAnswerError(f"the store in which the ranks have met is gone: {first_line}") from None
            return False
        return True

    def read(self, key: str, form: TypeAdapter[_T]) -> _T:
        """What is there already."""
        return self._checked(key, self._store.get(key), form)

    def leave(self, rank: int, size: int) -> None:
        """Where the first rank holds the store, it would take the outcome with it before the others have read it."""
        if self._store.add("have read", 1) == size:
            self._store.set("all have read", "")
        elif rank == 0:
            with contextlib.suppress(RuntimeError):
                self._store.wait(["all have read"], datetime.timedelta(seconds=_GRACE_S))

    def _checked(self, key: str, content: bytes, form: TypeAdapter[_T]) -> _T:
        try:
            if len(content) <= LARGEST:
                return form.validate_json(content, strict=True)
        except ValueError:
            pass
        raise NoAnswerError(f"{key!r} in the store of the ranks is nothing that a rank of this job has written")
