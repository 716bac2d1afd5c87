"""What a rank was started with, as far as all ranks must have it alike. No torch here: it may be the wrong one."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from megamix.config import Config, DataSource, config_to_toml, effective_tables
from megamix.config.toml_text import value_text
from megamix.config.unread import part_read

# How long a rank waits is its own affair. What a path leads to may lie elsewhere on each node: of data and tokenizer
# the fingerprints count, and the run's folder is looked at once it is taken.
MAY_DIFFER = ("parallelism.timeout_s", "checkpoint.folder", "data.tokenizer")
PATHS_MAY_DIFFER = ("data.train", "data.stages", "data.valid")  # but not which of them are one
# A path in place of these words: the first rank's is everybody's.
RESUME_WORDS = ("auto", "never")

NOT_READ = "not read"  # in place of the value of a key that another one of the configuration makes so
PACKAGE = Path(__file__).parents[1]
_LONGEST = 1000  # characters of a value; of a longer one the rest is told by a hash
_DIGITS = 16  # of a hash, in hexadecimal: enough against chance


def started_with(config: Config, fingerprints: dict[str, str]) -> dict[str, str]:
    """Every key that must be alike, and its value as text. `fingerprints`: of the data, by the key that names it."""
    found = {key: _bounded(value_text(value)) for key, value in _settings(config).items()}
    found |= {item.key: NOT_READ for item in part_read(config.model_dump())[1]}
    found |= {f"content of {key} (SHA-256)": digest[:_DIGITS] for key, digest in fingerprints.items()}
    versions = {f"version of {name}": _version(name) for name in ("megamix", "torch")}
    return found | versions | {"source code of megamix (SHA-256)": _sources()}


def flat(config: str) -> dict[str, Any]:
    """Take an effective configuration apart, by `section.key`, to compare it with another one: a key that is not read
    has its default, one that is not set is not there. Raises: ValueError if it is no TOML.
    """
    tables = effective_tables(config)
    return {f"{section}.{key}": value for section, keys in tables.items() for key, value in keys.items()}


def _settings(config: Config) -> dict[str, Any]:
    settings = {key: value for key, value in flat(config_to_toml(config)).items() if key not in MAY_DIFFER}
    if settings["checkpoint.resume"] not in RESUME_WORDS:
        settings["checkpoint.resume"] = "a path"
    numbers: dict[str | int, int] = {}
    for key in PATHS_MAY_DIFFER:
        if key in settings:
            settings[key] = _without_paths(settings[key], numbers)
    return settings


def _without_paths(value: Any, numbers: dict[str | int, int]) -> Any:
    """Each path as the number of its file, in the order in which files first come: a file that comes again goes on
    where it was, so which ones are the same must be alike.
    """
    if isinstance(value, list):
        return [_without_paths(item, numbers) for item in value]
    if not isinstance(value, dict):
        return value
    named = {key: _without_paths(item, numbers) for key, item in value.items()}
    if "path" in named:
        name = DataSource(path=named.pop("path")).name
        named = {"file": numbers.setdefault(name, len(numbers) + 1)} | named
    return named


def _bounded(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} and more (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def _sources() -> str:
    """Two nodes may have one version and other code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:_DIGITS]


_SHOWN_KEYS, _SHOWN_VALUES, _SHOWN_RUNS = 40, 4, 8
_LONGEST = 60  # characters of a value
_UNSET = "not set"


class RankGroup(NamedTuple):
    """Ranks that were started alike."""

    ranks: list[int]  # ascending
    started_with: dict[str, str]  # value by key


def differences(groups: Sequence[RankGroup]) -> list[str]:
    """A line for each key of which the groups that read it have several values. Where one does not, the key that makes
    it so differs, too.
    """
    lines = []
    for key in sorted({key for group in groups for key in group.started_with}):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for group in groups:
            ranks_of[group.started_with.get(key, _UNSET)] += group.ranks
        ranks_of.pop(NOT_READ, None)
        if len(ranks_of) > 1:
            lines.append(_line(key, ranks_of))
    more = len(lines) - _SHOWN_KEYS
    return lines if more <= 0 else [*lines[:_SHOWN_KEYS], f"and {more} more keys differ"]


def names(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0, 2, 4 to 9`; of many runs of neighbours the first ones, and how many ranks are left."""
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


def _line(key: str, ranks_of: dict[str, list[int]]) -> str:
    by_size = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), min(item[1])))
    # What long values have in common at their beginning says nothing, and would hide where they differ.
    common = next(place for place, letters in enumerate(zip_longest(*ranks_of)) if len(set(letters)) > 1)
    skipped = max(0, common - _LONGEST // 3) if max(map(len, ranks_of)) > _LONGEST else 0
    parts = [f"{_shown(value, skipped)} on {names(ranks)}" for value, ranks in by_size[:_SHOWN_VALUES]]
    if rest := [rank for _, ranks in by_size[_SHOWN_VALUES:] for rank in ranks]:
        parts.append(f"other values on {names(rest)}")
    return f"{key}: {'; '.join(parts)}; {_fix(key)}"


def _shown(value: str, skipped: int) -> str:
    if value == _UNSET:
        return value
    text = f"...{value[skipped:]}" if skipped else value
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _fix(key: str) -> str:
    if key.startswith("content of "):
        return "give all ranks the same files"
    if key.startswith(("version of ", "source code of ")):
        return "install one version on all nodes"
    return "start all with one configuration"
