"""Facts that do harm, or may: each with its amount and its remedy. The texts are in warnings.toml."""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megamix.base.names import first_few
from megamix.tools.audit.facts import ALL, DTYPES, FP8, HALVES, NOWHERE, UNKNOWN, Note, ParamFacts
from megamix.tools.audit.finite import KINDS

_TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("warnings.toml").read_text())

# Shares above which a warning is given. Some elements of FP32 masters always stay: for an embedding's row without a
# gradient, lr times weight decay may be less than 2^-24.
MOST_LOST = 0.5
MOST_ZEROED = 0.05
MOST_STUCK = 0.25  # share of a half moment's elements
LEAST_HEADROOM = 2.0  # powers of two; a loss that grows fourfold uses them up
MOST_MOVED = 0.1  # rms of an update over rms of its weight
MOST_ERROR = 2.0**-4  # error of a sum of n terms: n times the rounding of one


@dataclass(frozen=True, slots=True)
class AuditWarning:
    """One fact that does harm (`harms`), or that may be intended."""

    where: str
    what: str
    fix: str
    harms: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. {self.fix}"


def _warning(rule: str, where: str, more: str = "", **words: object) -> AuditWarning:
    text = _TEXTS[rule]
    return AuditWarning(where, text["what"].format(**words) + more, text["fix"], text["harms"])


def warnings_of(
    facts: Mapping[str, ParamFacts], rows: Sequence[ParamFacts], notes: Sequence[Note], skipped: bool
) -> list[AuditWarning]:
    """Return all warnings, harmful ones first. If several rows have one warning, it names the worst.

    `notes`: one from each rank. `skipped`: whether the step was skipped.
    """
    ranks, scaled = len(notes), bool(notes[0]["loss_scale"])
    rows = [row for row in rows if row.trains]
    trained = [facts[name] for row in rows for name in row.parameters]
    held = [one for one in trained if one.counts.get("held")]
    found = [*_not_finite(notes), *_odd_ones(held)]
    if (number := max(note.get("first", 1) for note in notes)) > 1:
        found.append(_warning("counted before", "the optimizer", number=number))
    if skipped:
        return [*found, _warning("skipped", "all parameters")]
    broken: dict[str, list[tuple[float, ParamFacts]]] = {rule: [] for rule in _TEXTS}
    for row in rows:
        for rule, how_bad in _rules(row, ranks, scaled):
            broken[rule].append((how_bad, row))
    for rule, bad in broken.items():
        if bad:
            _, worst = max(bad, key=lambda one: one[0])
            more = f" ({len(bad) - 1} more row(s) alike)" if len(bad) > 1 else ""
            found.append(_warning(rule, worst.name, more, row=worst, ranks=ranks))
    free = [one.name for one in trained if not one.counts.get("held")]
    silent = [one.name for one in held if not one.largest.get("gradient")]
    # Ranks that send one another activations may each hold a part of the model.
    sent = any(note["sent"] for note in notes)
    apart = [one for one in held if len(one.weight_sums.get(ALL, [])) > 1]
    divided = any(note["divided"] for note in notes) or any(one.dtypes["compute"][0] == UNKNOWN for one in apart)
    drifts = ("parts" if divided else "own") if sent else "ranks alone"
    alone = [one.name for one in apart if not sent or len(apart) < len(held)]
    unequal = [one.name for one in held if any(len(sums) > 1 for of, sums in one.weight_sums.items() if of != ALL)]
    named = {"not held": free, "no gradient": silent, drifts: alone, "replicas apart": unequal}
    for rule, names in named.items():
        found += [_warning(rule, first_few(names, 4), ranks=ranks)] if names else []
    return sorted(found, key=lambda one: not one.harms)


def _not_finite(notes: Sequence[Note]) -> Iterator[AuditWarning]:
    """Yield a warning about the first number that was not finite on any rank, if there is one."""
    found = [note["not_finite"] for note in notes if note["not_finite"]]
    if found:
        first = min(found, key=lambda one: (one["update"], KINDS.index(one["kind"])))
        when = f"update {first['update']}" if first["update"] else "this step"
        yield _warning(f"{first['kind']} not finite", first["where"], when=when)


def _rules(row: ParamFacts, ranks: int, scaled: bool) -> Iterator[tuple[str, float]]:
    if row.lost is not None and row.dtypes["master"] in HALVES:
        yield "no master", row.lost
    elif row.lost is not None and row.lost > MOST_LOST:
        yield "slow master", row.lost
    if row.counts.get("round_masters"):
        yield "rebuilt masters", 1.0
    if row.counts.get("unsaved"):
        yield "unsaved masters", 1.0
    if row.dims > 1 and row.update_to_weight is not None and row.update_to_weight > MOST_MOVED:
        yield "large update", row.update_to_weight
    if half := [name for name, dtype in row.moments.items() if dtype in HALVES]:
        # A moment stays once 1 - beta is less than a rounding: a second moment with beta 0.999 in BF16 moves in its
        # first steps and then no more. A first moment with beta 0.9 goes on.
        stays = any(1 - row.largest.get(f"beta {name}", 0.0) < _rounding(row.moments[name]) for name in half)
        lost = not row.counts.get("by_chance") and (stays or row.stuck > MOST_STUCK)
        yield "moments that stay" if lost else "half moments", row.stuck
    if row.dtypes["wire"] != NOWHERE and row.dtypes["sum"] in HALVES:
        error = ranks * _rounding(row.dtypes["sum"])
        yield "sum that is wrong" if error >= MOST_ERROR else "half sum", error
    if row.zeroed is not None and row.zeroed > MOST_ZEROED:
        yield "underflow", row.zeroed
    if row.headroom is not None and row.headroom < LEAST_HEADROOM:
        yield "little room" if scaled else "no room", -row.headroom


def _rounding(dtype: str) -> float:
    return torch.finfo(DTYPES[dtype]).eps / 2


def _odd_ones(facts: Sequence[ParamFacts]) -> Iterator[AuditWarning]:
    """Yield a warning for each parameter kept otherwise than most of its kind, unless all of its pattern are."""
    # A setting chooses the layers with products in FP8, so they are no odd ones.
    in_fp8 = any(one.dtypes["compute"] == FP8 for one in facts)
    columns = ("storage", *([] if in_fp8 else ["compute"]), "master", "moments")
    alike = defaultdict[tuple[str, str], list[tuple[str, tuple[str, ...]]]](list)
    votes = defaultdict[str, Counter[tuple[str, ...]]](Counter)
    for one in facts:
        kept = tuple(one.dtypes[column] for column in columns)
        alike[one.pattern, one.kind].append((one.name, kept))
        votes[one.kind][kept] += 1
    for (_, kind), members in alike.items():
        usual = votes[kind].most_common(1)[0][0]
        odd = [(name, kept) for name, kept in members if kept != usual]
        for name, kept in odd if len(odd) < len(members) else []:
            pairs = zip(columns, kept, usual, strict=True)
            said = ", ".join(f"{column} {own} (others {theirs})" for column, own, theirs in pairs if own != theirs)
            yield _warning("odd one", name, differs=said)
