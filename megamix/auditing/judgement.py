"""What of the facts does harm, or may: each with how much, and what to do. The texts stand in warnings.toml."""

from __future__ import annotations

import functools
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megamix.auditing.facts import DTYPES, HALVES, NOWHERE, ParamFacts

if TYPE_CHECKING:
    from megamix.auditing.report import Row

# Shares from which on something is said. Of FP32 masters some elements always stay: where an embedding's row had no
# gradient, lr times weight decay may be less than 2^-24.
MOST_LOST = 0.5
MOST_ZEROED = 0.05
MOST_STUCK = 0.25  # of a half moment's elements
LEAST_HEADROOM = 2.0  # powers of two: what a loss that is four times larger takes
MOST_MOVED = 0.1  # rms of an update over rms of its weight
MOST_ERROR = 2.0**-4  # of a sum of n terms, n times the rounding of one


@dataclass(frozen=True, slots=True)
class AuditWarning:
    """One thing that is wrong (`harms`), or that may be meant so."""

    where: str
    what: str
    fix: str
    harms: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. {self.fix}"


@functools.cache
def _texts() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("warnings.toml").read_text())


def _warning(rule: str, where: str, more: int = 0, **words: object) -> AuditWarning:
    text = _texts()[rule]
    rest = f" ({more} more row(s) alike)" if more else ""
    return AuditWarning(where, text["what"].format(**words) + rest, text["fix"], text["harms"])


def warnings_of(rows: Sequence[Row], ranks: int, scaled: bool, skipped: bool) -> list[AuditWarning]:
    """Return what there is to say, what does harm first; of several rows the worst is told. `ranks`: that summed."""
    trained = [row for row in rows if row.first.trains]
    facts = [one for row in trained for one in row.members]
    found = [*_odd_ones(facts)]
    if skipped:
        return [*found, _warning("skipped", "all parameters")]
    for rule, bad in _rules(trained, ranks, scaled):
        if bad:
            worst = max(bad, key=lambda one: one[0])[1]
            found.append(_warning(rule, worst.name, len(bad) - 1, row=worst, ranks=ranks))
    free = [one.name for one in facts if not one.counts.get("held")]
    silent = [one.name for one in facts if one.name not in free and not one.largest.get("gradient")]
    for rule, names in (("not held", free), ("no gradient", silent)):
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        found += [_warning(rule, ", ".join(names[:4]) + more)] if names else []
    return sorted(found, key=lambda one: not one.harms)


def _rules(rows: Sequence[Row], ranks: int, scaled: bool) -> Iterator[tuple[str, list[tuple[float, Row]]]]:
    """Yield each rule with the rows that it finds, and how bad they are."""
    lost = [(row.lost, row) for row in rows if row.lost is not None]
    yield "no master", [(share, row) for share, row in lost if row.dtypes["master"] in HALVES]
    slow = [(share, row) for share, row in lost if share > MOST_LOST]
    yield "slow master", [(share, row) for share, row in slow if row.dtypes["master"] not in HALVES]
    yield "rebuilt masters", [(1.0, row) for row in rows if row.share("round_masters", "masters")]
    yield "unsaved masters", [(1.0, row) for row in rows if row.share("unsaved", "held")]
    moved = [(row.update_to_weight or 0.0, row) for row in rows if row.first.dims > 1]
    yield "large update", [(share, row) for share, row in moved if share > MOST_MOVED]
    half = [(row.stuck, row) for row in rows if {*row.first.moments.values()} & {*HALVES}]
    yield "moments that stay", [(share, row) for share, row in half if share > MOST_STUCK or _will_stay(row.first)]
    yield "half moments", [(share, row) for share, row in half if share <= MOST_STUCK and not _will_stay(row.first)]
    summed = [row for row in rows if row.dtypes["wire"] != NOWHERE and row.dtypes["sum"] in HALVES]
    errors = [(ranks * _rounding(row.dtypes["sum"]), row) for row in summed]
    yield "sum that is wrong", [(error, row) for error, row in errors if error >= MOST_ERROR]
    yield "half sum", [(error, row) for error, row in errors if error < MOST_ERROR]
    yield "underflow", [(row.zeroed, row) for row in rows if row.zeroed is not None and row.zeroed > MOST_ZEROED]
    rooms = [(-row.headroom, row) for row in rows if row.headroom is not None and row.headroom < LEAST_HEADROOM]
    yield "little room" if scaled else "no room", rooms


def _rounding(dtype: str) -> float:
    return torch.finfo(DTYPES[dtype]).eps / 2


def _will_stay(one: ParamFacts) -> bool:
    """Return whether 1 - beta of a half moment is less than a rounding. A second one with beta 0.999 in BF16 moves in
    its first steps and then no more; a first one with 0.9 goes on.
    """
    half = ((name, dtype) for name, dtype in one.moments.items() if dtype in HALVES)
    return any(1 - one.largest.get(f"beta {name}", 0.0) < _rounding(dtype) for name, dtype in half)


def _odd_ones(facts: Sequence[ParamFacts]) -> Iterator[AuditWarning]:
    """Name those that are kept otherwise than most of their kind, where others of their pattern are not."""
    kept = ("storage", "compute", "master", "moments")
    alike: defaultdict[tuple[str, str], list[ParamFacts]] = defaultdict(list)
    votes: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for one in facts:
        alike[one.pattern, one.kind].append(one)
        votes[one.kind][one.kept(kept)] += 1
    for (_, kind), members in alike.items():
        usual = votes[kind].most_common(1)[0][0]
        odd = [one for one in members if one.kept(kept) != usual]
        for one in odd if len(odd) < len(members) else []:
            pairs = zip(kept, one.kept(kept), usual, strict=True)
            said = ", ".join(f"{column} {own} (others {theirs})" for column, own, theirs in pairs if own != theirs)
            yield _warning("odd one", one.name, differs=said)
