"""The comparison of the ranks of one job: before the model is built, each rank's settings are compared with all
others'.

Ranks that differ in a seed, a dropout or the data would train on, and end with weights that nobody asked for. Each rank
puts the settings that it was started with into the store in which the ranks have met, under the settings' digest. The
first rank compares the digests and tells all ranks the differences. Each rank makes a few requests to the store; the
first rank makes two more for each rank.
"""

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

from megamix.builders.data import data_fingerprints, data_identity
from megamix.comm.topology import Topology, side_store
from megamix.config import Config, ConfigError, DataSource
from megamix.config.toml_text import value_text
from megamix.config.unread import drop_unread
from megamix.run.own_code import DIGITS, own_code
from megamix.run.resume_rules import flat, flat_keys
from megamix.run.run_folder import RESUME_WORDS
from megamix.supervise.console import say
from megamix.supervise.liveness import Board, names
from megamix.supervise.status import NoAnswerError

_LONGEST_TOLD = 1000  # most characters of a value in the store; a hash stands for the rest of a longer value
_LONGEST_SHOWN = 60  # most characters of a value in a message
_PROBLEM = "problem"  # a key that stands in place of a rank's settings and says why they are not known


class KnownData(NamedTuple):
    fingerprints: dict[str, str]  # by the key that names the data
    identity: str  # identity of this rank's files before their fingerprints were taken; see `check_unchanged`


def known_data(config: Config) -> KnownData:
    """Check that all ranks were started with the same job. Return the data's fingerprints. Every rank must call it.

    Raises: as `check_same_job`; with a single rank, ConfigError for data that cannot be read.
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
    """Compare the settings that the ranks were started with. Every rank must call it; nothing else uses `store`.

    Raises: ConfigError on every rank, with everything that differs; NoAnswerError on every live rank, naming the ranks
    that do not answer, shortly after `parallelism.timeout_s`.
    """
    board = Board(store, config.parallelism.timeout_s)
    data, problem = _shared_data(config, board, rank)
    record = {_PROBLEM: problem} if problem else started_with(config, data.fingerprints)
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    board.put(f"record {digest}", record)
    board.put(f"digest {rank}", digest)
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


def _shared_data(config: Config, board: Board, rank: int) -> tuple[KnownData, str]:
    """Return the data's fingerprints, and why they are not known ("" if they are). One rank of each machine reads the
    files.
    """
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
        answer = board.read(key)
    except (OSError, NoAnswerError) as error:
        return nothing, str(error)
    return KnownData(answer, identity), answer.pop(_PROBLEM, "")


def _read_fingerprints(config: Config) -> dict[str, str]:
    try:
        return data_fingerprints(config)
    except (OSError, ValueError) as error:  # the ranks that wait for this one must learn of the error, too
        return {_PROBLEM: str(error)}


def _outcome(board: Board, size: int) -> tuple[list[str], str]:
    """Return the answer for all ranks: the differences, and why they are not known ("" if they are)."""
    if silent := board.missing([f"digest {rank}" for rank in range(size)]):
        to_blame = [rank for rank in silent if not board.has(f"waits {rank}")] or silent
        return [], f"no sign of life from {names(to_blame)} {board.limit} after the ranks had met"
    ranks_of = defaultdict[str, list[int]](list)
    for rank in range(size):
        ranks_of[board.read(f"digest {rank}")].append(rank)
    groups = [RankGroup(ranks, board.read(f"record {digest}")) for digest, ranks in ranks_of.items()]
    failed = [group for group in groups if _PROBLEM in group.started_with]
    problems = [f"{names(group.ranks)}: {group.started_with[_PROBLEM]}" for group in failed]
    return [*problems, *differences([group for group in groups if group not in failed])], ""


# Each rank may have its own time limit. Paths may differ between nodes: for data and tokenizer the fingerprints are
# compared, and the run's folder is checked once it is taken.
MAY_DIFFER = ("parallelism.timeout_s", "checkpoint.folder", "data.tokenizer")
PATHS_MAY_DIFFER = ("data.train", "data.stages", "data.valid")  # but paths that are equal on one rank are so on all

_UNSET = "not set"
NOT_READ = "not read"  # stands for the value of a key that another key disables


def started_with(config: Config, fingerprints: dict[str, str]) -> dict[str, str]:
    """Return every key that must have the same value on all ranks, with its value as text.

    `fingerprints`: digests of the data, by the key that names the data.
    """
    found = {key: _bounded(value_text(value)) for key, value in _settings(config).items()}
    tree = config.model_dump()
    found |= {key: _UNSET for key, value in flat_keys("", tree) if value is None and key not in MAY_DIFFER}
    found |= {item.key: NOT_READ for item in drop_unread(tree)[1]}
    found |= {f"content of {key} (SHA-256)": digest[:DIGITS] for key, digest in fingerprints.items()}
    return found | own_code(config.plugins)


def _settings(config: Config) -> dict[str, Any]:
    settings = {key: value for key, value in flat(config.text).items() if key not in MAY_DIFFER}
    if settings["checkpoint.resume"] not in RESUME_WORDS:  # the first rank's path counts for all
        settings["checkpoint.resume"] = "a path"
    numbers: dict[str | int, int] = {}
    for key in PATHS_MAY_DIFFER:
        if key in settings:
            settings[key] = _without_paths(settings[key], numbers)
    return settings


def _without_paths(value: Any, numbers: dict[str | int, int]) -> Any:
    """Return the value with each path replaced by the number of its file, counted in the order of first appearance.

    A file that is named twice continues where it was, so all ranks must repeat the same files.
    """
    if isinstance(value, list):
        return [_without_paths(item, numbers) for item in value]
    if not isinstance(value, dict):
        return value
    # A plugin's own table is compared as it is.
    named: dict[str, Any] = {
        key: item if isinstance(item, dict) else _without_paths(item, numbers) for key, item in value.items()
    }
    if "path" in named:
        name = DataSource(path=named.pop("path")).name
        named = {"file": numbers.setdefault(name, len(numbers) + 1)} | named
    return named


def _bounded(text: str) -> str:
    if len(text) <= _LONGEST_TOLD:
        return text
    return f"{text[:_LONGEST_TOLD]} and more (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:DIGITS]})"


_SHOWN_KEYS, _SHOWN_VALUES = 40, 4


class RankGroup(NamedTuple):
    """Ranks that were started alike."""

    ranks: list[int]  # ascending
    started_with: dict[str, str]  # value by key


def differences(groups: Sequence[RankGroup]) -> list[str]:
    """Return a line for each key that has several values among the groups that read the key.

    Groups that do not read a key are left out: the key that disables it differs, too, and has a line of its own.
    """
    lines = []
    for key in sorted({key for group in groups for key in group.started_with}):
        ranks_of = defaultdict[str, list[int]](list)
        missing = _UNSET if key.startswith("content of ") else NOT_READ  # meaning of a key that a group lacks
        for group in groups:
            ranks_of[group.started_with.get(key, missing)] += group.ranks
        ranks_of.pop(NOT_READ, None)
        if len(ranks_of) > 1:
            lines.append(_line(key, ranks_of))
    more = len(lines) - _SHOWN_KEYS
    return lines if more <= 0 else [*lines[:_SHOWN_KEYS], f"and {more} more keys differ"]


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
