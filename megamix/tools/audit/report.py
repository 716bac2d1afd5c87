"""Page of an audit: a row for each name pattern whose parameters have equal dtypes, then the warnings."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from megamix.tools.audit.facts import COLUMNS, NOWHERE, UNKNOWN, Note, ParamFacts, join_facts
from megamix.tools.audit.warnings import AuditWarning, warnings_of

WIDTH = 120
_NUMBERS = ("lost", "zeroed", "zeroed_is_exact", "headroom", "update_to_weight", "lr", "at_largest", "at_zero")
_TOLD = ("name", "dtypes", *_NUMBERS, "parameters", "moments", "direction")  # fields of a row in JSON
_HEADS = ("store", "compute", "grad", "wire", "sum", "master", "moments", "saved", "lost", "zeroed", "room", "upd/w")
_SOME = ("direct", "at max", "at 0")  # columns that are left out if no row has them
_LEGEND = (
    "lost: share of the updates that leave the stored value as it was; zeroed: share of the gradient's elements that\n"
    "underflow (~: an estimate, from zeros in rows and columns that have subnormal numbers); room: doublings of the\n"
    "largest gradient element until its dtype ends; upd/w: rms of the update over rms of the weight, the largest"
)
_LEGENDS = {  # by the column that they need
    "direct": "direct: dtype in which Muon multiplies matrices and sends them; AdamW moves the parameters without one",
    "at 0": (
        "compute fp8, at max, at 0: products of codes of one byte, and the shares of codes that are the largest or zero"
    ),
}
_TOO_EARLY = "audit: nothing is known before the step is over; read the report after the block of megamix.audit"


def make_rows(facts: Collection[ParamFacts]) -> list[ParamFacts]:
    """Return a row for each pattern of parameters that are alike in every dtype, in the order of their first ones."""
    groups = defaultdict[tuple[str, ...], list[ParamFacts]](list)
    for one in facts:
        groups[one.pattern, one.kind, *one.dtypes.values(), *one.moments, *one.moments.values()].append(one)
    sizes, rows = Counter(one.pattern for one in facts), []
    for (pattern, *_), members in groups.items():
        part = "" if len(members) == sizes[pattern] else f" ({len(members)} of {sizes[pattern]})"
        name = members[0].name if len(members) == 1 else pattern + part
        names = [one.name for one in members]
        rows.append(row := replace(members[0], name=name, parameters=names, counts={}, largest={}))
        for one in members:
            row.count(**one.counts)
            row.note_largest(**one.largest)
    return rows


def _cells(row: ParamFacts) -> list[str]:
    about = "" if row.zeroed_is_exact or not row.zeroed else "~"
    numbers = row.lost, row.zeroed, row.headroom, row.update_to_weight, row.at_largest, row.at_zero
    forms = "{:.1%}", about + "{:.1%}", "{:.1f}", "{:.1e}", "{:.1%}", "{:.1%}"
    told = [NOWHERE if number is None else form.format(number) for form, number in zip(forms, numbers, strict=True)]
    return [*(row.dtypes[column].partition(" ")[0] for column in COLUMNS), *told[:4], row.direction, *told[4:]]


@dataclass(slots=True)
class AuditReport:
    """Result of `megamix.audit`, filled once its block is left. `print(report)` shows the page."""

    rows: list[ParamFacts] = field(default_factory=list)
    warnings: list[AuditWarning] = field(default_factory=list)
    loss_scale: float | None = None

    @property
    def harms(self) -> bool:
        """Return whether any warning is of harm, not only of a setting that may be intended.

        Raises: RuntimeError within the block, where nothing is known yet.
        """
        if not (self.rows or self.warnings):
            raise RuntimeError(_TOO_EARLY)
        return any(one.harms for one in self.warnings)

    def fill(self, notes: Sequence[Note], *, skipped: bool) -> None:
        """Take the notes of all ranks on one step."""
        facts, self.loss_scale = join_facts(note["facts"] for note in notes), notes[0]["loss_scale"]
        self.rows = make_rows(facts.values())
        self.warnings = warnings_of(facts, self.rows, notes, skipped)

    def lines(self) -> Iterator[str]:
        """Yield the page, at most 120 characters wide but for names and warnings."""
        if not (self.rows or self.warnings):
            yield _TOO_EARLY
            return
        every = zip((*_HEADS, *_SOME), *map(_cells, self.rows), strict=True)
        columns = [column for column in every if column[0] in _HEADS or {*column[1:]} - {NOWHERE}]
        widths = [max(map(len, column)) for column in columns]
        names = ["parameters", *(row.name for row in self.rows)]
        room = min(WIDTH - sum(widths) - len(widths), max(map(len, names)))
        for name, *cells in zip(names, *columns, strict=True):
            line = "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            yield f"{name:<{room}}{line}" if len(name) <= room else f"{name}\n{'':<{room}}{line}"
        moments = dict.fromkeys(name for row in self.rows for name in row.moments)
        yield _LEGEND
        yield from (_LEGENDS[head] for head, *_ in columns if head in _LEGENDS)
        yield f"moments: {', '.join(moments) or 'none'}; loss scale: {self.loss_scale or 'none seen'}"
        unknown = Counter(cell for row in self.rows for cell in row.dtypes.items() if cell[1][0] == UNKNOWN)
        yield from (f"{name} {why} ({number} row(s))" for (name, why), number in unknown.items())
        yield from (f"{'WRONG' if one.harms else 'look'}: {one}" for one in self.warnings)
        wrong = sum(one.harms for one in self.warnings)
        right = "no number is lost that should be kept"
        if all(row.lost is None for row in self.rows):
            right = "not judged: no weight was due to move, as the step was skipped or lr is 0"
        yield f"{wrong} WRONG: see above" if wrong else right

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> str:
        """Return rows and warnings, every share and dtype in full."""
        rows = [{name: getattr(row, name) for name in _TOLD} for row in self.rows]
        warnings = [asdict(one) for one in self.warnings]
        return json.dumps({"loss_scale": self.loss_scale, "rows": rows, "warnings": warnings}, indent=1)
