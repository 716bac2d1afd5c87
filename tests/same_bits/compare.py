"""Whether two trees have told the same of a configuration, and if not, where they part first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

Told = Sequence[Sequence[str]]  # (what, its bits), in order


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return where two answers differ first, by attempt, and how many places differ in all; None where none does.

    An answer is `ranks`, of each what it has told, or an `error`, which is a difference even if both have the same.
    """
    for side, answer in (("old", old), ("new", new)):
        if "error" in answer:
            return f"the {side} tree failed:\n" + "\n".join(answer["error"].strip().splitlines()[-12:])
    differences = []
    for rank, (before, after) in enumerate(zip_longest(old["ranks"], new["ranks"], fillvalue=())):
        for place, (one, other) in enumerate(zip_longest(before, after)):
            if one != other:
                differences.append((place, rank, _said(one, other)))
    if not differences:
        return None
    place, rank, said = min(differences)
    return f"rank {rank}, {said}; places that differ: {len(differences)}"


def _said(one: Sequence[str] | None, other: Sequence[str] | None) -> str:
    if one is None or other is None or one[0] != other[0]:
        return f"the old tree tells {_name(one)}, the new one {_name(other)}"
    return f"{one[0]}: {one[1]} -> {other[1]}"


def _name(told: Sequence[str] | None) -> str:
    return "no more" if told is None else repr(told[0])
