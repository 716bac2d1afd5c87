"""The comparison of the ranks of one job: before the model is built, each rank's settings are compared with all
others'.

Ranks that differ in a seed, a dropout or the data would train on, and end with weights that nobody asked for. Each rank
puts the settings that it was started with into the store in which the ranks have met. The first rank compares them and
tells all ranks the differences. Each rank makes a few requests to the store; the first rank makes one more for each
rank.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # not in its __all__

from megamix.base.console import say
from megamix.comm.topology import Topology, side_store
from megamix.config import ConfigError
from megamix.config.diff import diff, may, without_paths
from megamix.config.toml_text import value_text
from megamix.launch.exit_status import NoAnswerError
from megamix.launch.liveness import Board, names
from megamix.launch.run_folder import RESUME_WORDS
from megamix.train.corpus import JobCorpus
from megamix.train.own_code import DIGITS

_LONGEST_SHOWN = 60  # most characters of a value in a message
_PROBLEM = "problem"  # a key that stands in place of a rank's settings and says why they are not known


class KnownData(NamedTuple):
    fingerprints: dict[str, str]  # by the key that names the data
    identity: str  # of this rank's files before their fingerprints were taken; see `JobCorpus.require_unchanged`


def known_data(started: Mapping[str, str], corpus: JobCorpus, timeout_s: float) -> KnownData:
    """Check that all ranks were started with the same. Return the data's fingerprints. Every rank must call it.

    `started`: see `started_with`. Raises: as `check_same_job`.
    """
    world = Topology.current().world
    store = HashStore() if world.group is None else side_store(world)
    return check_same_job(started, corpus, store, timeout_s, world.rank, world.size)


def check_same_job(
    started: Mapping[str, str], corpus: JobCorpus, store: Store, timeout_s: float, rank: int, size: int
) -> KnownData:
    """Compare what the ranks were started with. Every rank must call it; nothing else uses `store`.

    Raises: ConfigError on every rank, with everything that differs; NoAnswerError on every live rank, naming the ranks
    that do not answer, shortly after `timeout_s`.
    """
    board = Board(store, timeout_s)
    data, problem = _shared_data(corpus, board, rank)
    contents = {f"content of {key} (SHA-256)": digest[:DIGITS] for key, digest in data.fingerprints.items()}
    record = {_PROBLEM: problem} if problem else {**started, **contents}
    board.put(f"record {rank}", record)
    if rank == 0:
        board.put("outcome", _outcome(board, size))
    if not board.wait(["outcome"], Board.grace_s):
        silence = f"no sign of life from rank 0 {board.limit}, before it had said whether all were started alike"
        if rank == 1:  # in place of the silent first rank
            say(f"megamix train: {silence}", sys.stderr)
        raise NoAnswerError(silence)
    problems, silence = board.read("outcome")
    if problems or silence:
        board.leave(rank, size)
        if silence:
            raise NoAnswerError(silence)
        raise ConfigError(problems, "job")
    return data


def _shared_data(corpus: JobCorpus, board: Board, rank: int) -> tuple[KnownData, str]:
    """Return the data's fingerprints, and why they are not known ("" if they are). One rank of each machine reads the
    files.
    """
    nothing = KnownData({}, "")
    try:
        identity = corpus.identity()
        key = f"files {identity}"
        reader = board.claim(f"reader of {key}", rank)
        if reader == rank:
            board.put(key, _read_fingerprints(corpus))
        else:
            board.put(f"waits {rank}", reader)
        if not board.wait([key]):
            return nothing, f"rank {reader} had not read the data {board.limit}"
        answer = board.read(key)
    except (OSError, NoAnswerError) as error:
        return nothing, str(error)
    return KnownData(answer, identity), answer.pop(_PROBLEM, "")


def _read_fingerprints(corpus: JobCorpus) -> dict[str, str]:
    try:
        return corpus.fingerprints()
    except (OSError, ValueError) as error:  # the ranks that wait for this one must learn of the error, too
        return {_PROBLEM: str(error)}


def _outcome(board: Board, size: int) -> tuple[list[str], str]:
    """Return the answer for all ranks: the differences, and why they are not known ("" if they are)."""
    if silent := board.missing([f"record {rank}" for rank in range(size)]):
        to_blame = [rank for rank in silent if not board.has(f"waits {rank}")] or silent
        return [], f"no sign of life from {names(to_blame)} {board.limit} after the ranks had met"
    ranks_of = defaultdict[str, list[int]](list)
    for rank in range(size):
        ranks_of[json.dumps(board.read(f"record {rank}"))].append(rank)
    groups = [RankGroup(ranks, json.loads(record)) for record, ranks in ranks_of.items()]
    failed = [group for group in groups if _PROBLEM in group.started_with]
    who = [f"{names(group.ranks)}: " if size > 1 else "" for group in failed]
    problems = [f"{ranks}{group.started_with[_PROBLEM]}" for ranks, group in zip(who, failed, strict=True)]
    return [*problems, *differences([group for group in groups if group not in failed])], ""


def started_with(values: Mapping[str, Any], code: Mapping[str, str]) -> dict[str, str]:
    """Return every key that must have the same value on all ranks, with its value as text, and the code's.

    `values`: those of the configuration. `code`: see `own_code`.
    """
    settings = {key: value for key, value in values.items() if not may(key).ranks}
    if settings["checkpoint.resume"] not in RESUME_WORDS:  # the first rank's path counts for all
        settings["checkpoint.resume"] = "a path"
    numbers: dict[str | int, int] = {}
    for key in ("data.train", "data.stages", "data.valid"):  # paths that are equal on one rank are so on all
        if key in settings:
            settings[key] = without_paths(settings[key], numbers)
    return {key: value_text(value) for key, value in settings.items()} | dict(code)


_SHOWN_VALUES = 4
_UNSET = "not set"


class RankGroup(NamedTuple):
    """Ranks that were started alike."""

    ranks: list[int]  # ascending
    started_with: dict[str, str]  # see `started_with`


def differences(groups: Sequence[RankGroup]) -> list[str]:
    """Return a line for each key that has several values among the groups."""
    lines = list[str]()
    first, *others = [group.started_with for group in groups] or [{}]
    for key in sorted({change.key for other in others for change in diff(first, other)}):
        if key.startswith("source code of ") and any(key not in group.started_with for group in groups):
            continue  # of a plugin that some do not have, which another line says
        ranks_of = defaultdict[str, list[int]](list)
        for group in groups:
            ranks_of[group.started_with.get(key, _UNSET)] += group.ranks
        lines.append(_line(key, ranks_of))
    return lines


def _line(key: str, ranks_of: dict[str, list[int]]) -> str:
    by_size = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), min(item[1])))
    # Long values are shown from the place where they differ: a common beginning would hide the difference.
    common = next(place for place, letters in enumerate(zip_longest(*ranks_of)) if len(set(letters)) > 1)
    skipped = max(0, common - _LONGEST_SHOWN // 3) if max(map(len, ranks_of)) > _LONGEST_SHOWN else 0
    parts = [f"{_shown(value, skipped)} on {names(ranks)}" for value, ranks in by_size[:_SHOWN_VALUES]]
    if rest := [rank for _, ranks in by_size[_SHOWN_VALUES:] for rank in ranks]:
        parts.append(f"other values on {names(rest)}")
    return f"{key}: {'; '.join(parts)}; {_fix(key)}"


def _shown(value: str, skipped: int) -> str:
    if value == _UNSET:
        return value
    text = f"...{value[skipped:]}" if skipped else value
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def _fix(key: str) -> str:
    if key.startswith("content of "):
        return "give all ranks the same files"
    if key.startswith(("version of ", "source code of ")):
        return "install one version on all nodes"
    return "start all with one configuration"
