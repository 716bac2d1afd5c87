"""What differs between ranks, in lines for a person: the key, each value and the ranks that have it, and what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from megamix.supervise.started_with import NOT_READ

_SHOWN_KEYS, _SHOWN_VALUES, _SHOWN_RUNS = 40, 4, 8
_LONGEST = 60  # characters of a value
_UNSET = "not set"


class Group(NamedTuple):
    """Ranks that were started alike."""

    ranks: list[int]  # ascending
    started_with: dict[str, str]  # value by key


def differences(groups: Sequence[Group]) -> list[str]:
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
