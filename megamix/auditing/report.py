"""The page: a row for each pattern of parameters whose numbers are kept alike, and what is wrong."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch

from megamix.auditing.facts import COLUMNS, DTYPES, NOWHERE, UNKNOWN, ParamFacts
from megamix.auditing.judgement import AuditWarning, warnings_of
from megamix.auditing.watch import ESTIMATED, EXACT
from megamix.comm.topology import Topology

WIDTH = 120
_HEADS = ("store", "compute", "grad", "wire", "sum", "master", "moments", "saved", "lost", "zeroed", "room", "upd/w")
_LEGEND = (
    "lost: share of the updates that leave the stored value as it was; zeroed: share of the gradient's elements that\n"
    "underflow (~: an estimate, from zeros in rows and columns that have subnormal numbers); room: doublings of the\n"
    "largest gradient element until its dtype ends; upd/w: rms of the update over rms of the weight, the largest"
)


@dataclass(slots=True)
class Row:
    """Parameters of one pattern, alike in every dtype. `name`: the pattern, or that of the only one."""

    name: str
    members: list[ParamFacts]

    @property
    def first(self) -> ParamFacts:
        return self.members[0]

    @property
    def dtypes(self) -> dict[str, str]:
        return dict(zip(COLUMNS, self.first.kept(COLUMNS), strict=True))

    def share(self, part: str, of: str) -> float | None:
        """Return one count as a share of another over all members; None where nothing was counted."""
        some, all = (sum(one.counts.get(count, 0.0) for one in self.members) for count in (part, of))
        return some / all if all else None

    @property
    def lr(self) -> float:
        return max(one.largest.get("lr", 0.0) for one in self.members)

    @property
    def stuck(self) -> float:
        """Return the share of a half moment's elements that an update left as they were; of several the largest."""
        return max((self.share(f"stuck {name}", f"due {name}") or 0.0 for name in self.first.moments), default=0.0)

    @property
    def lost(self) -> float | None:
        """Return the share of the elements with an update whose stored value did not change."""
        return self.share("lost", "due")

    @property
    def zeroed(self) -> float | None:
        """Return the share of gradient elements that became zero, or look so (`zeroed_is_exact`)."""
        return self.share(EXACT if self.zeroed_is_exact else ESTIMATED, "looked_at")

    @property
    def zeroed_is_exact(self) -> bool:
        return any(EXACT in one.counts for one in self.members)

    @property
    def headroom(self) -> float | None:
        """Return how many times the largest gradient element could double before its dtype, or the sum's, ends."""
        kinds = [DTYPES.get(part) for column in ("gradient", "wire", "sum") for part in self.dtypes[column].split("/")]
        ends = [torch.finfo(kind).max for kind in kinds if kind is not None]
        largest = max(one.largest.get("gradient", 0.0) for one in self.members)
        return math.log2(min(ends) / largest) if ends and 0 < largest < math.inf else None

    @property
    def update_to_weight(self) -> float | None:
        """Return the largest rms of an update over rms of its weight, of the members whose weight is not all zero."""
        squares = [(one.counts.get("update_squares", 0.0), one.counts.get("weight_squares")) for one in self.members]
        return max((math.sqrt(update / weight) for update, weight in squares if weight), default=None)

    def cells(self) -> list[str]:
        """Return the cells of the table behind the name."""
        shares = [NOWHERE if share is None else f"{share:.1%}" for share in (self.lost, self.zeroed)]
        if self.zeroed and not self.zeroed_is_exact:
            shares[1] = f"~{shares[1]}"
        room, moved = self.headroom, self.update_to_weight
        last = [NOWHERE if room is None else f"{room:.1f}", NOWHERE if moved is None else f"{moved:.1e}"]
        return [*(self.dtypes[column].partition(" ")[0] for column in COLUMNS), *shares, *last]

    def as_dict(self) -> dict[str, object]:
        """Return what `to_json` has of it."""
        told = ("name", "dtypes", "lost", "zeroed", "zeroed_is_exact", "headroom", "update_to_weight", "lr")
        own = {"parameters": [one.name for one in self.members], "moments": self.first.moments}
        return {name: getattr(self, name) for name in told} | own


def make_rows(facts: Sequence[ParamFacts]) -> list[Row]:
    """Group them, in the order of their first members."""
    groups: defaultdict[tuple[str, ...], list[ParamFacts]] = defaultdict(list)
    for one in facts:
        groups[one.pattern, one.kind, *one.dtypes.values(), *one.moments, *one.moments.values()].append(one)
    sizes = Counter(one.pattern for one in facts)
    rows = []
    for (pattern, *_), members in groups.items():
        part = "" if len(members) == sizes[pattern] else f" ({len(members)} of {sizes[pattern]})"
        rows.append(Row(members[0].name if len(members) == 1 else pattern + part, members))
    return rows


@dataclass(slots=True)
class AuditReport:
    """What `megamix.audit` found, once its block is left. `print(report)` shows the page."""

    rows: list[Row] = field(default_factory=list)
    warnings: list[AuditWarning] = field(default_factory=list)
    loss_scale: float | None = None

    @property
    def harms(self) -> bool:
        """Return whether something was found that loses numbers, and not only what may be meant so."""
        return any(one.harms for one in self.warnings)

    def fill(self, facts: Sequence[ParamFacts], loss_scale: float | None, *, skipped: bool) -> None:
        """Take what all ranks know of one step."""
        self.rows, self.loss_scale = make_rows(facts), None if loss_scale == 1 else loss_scale
        self.warnings = warnings_of(self.rows, Topology.current().world.size, self.loss_scale is not None, skipped)

    def lines(self) -> Iterator[str]:
        """Yield the page, at most 120 characters wide but for names and warnings."""
        table = [_HEADS, *(tuple(row.cells()) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        names = ["parameters", *(row.name for row in self.rows)]
        room = min(WIDTH - sum(widths) - len(widths), max(map(len, names)))
        for name, cells in zip(names, table, strict=True):
            line = "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            yield f"{name:<{room}}{line}" if len(name) <= room else f"{name}\n{'':<{room}}{line}"
        moments = dict.fromkeys(name for row in self.rows for name in row.first.moments)
        yield _LEGEND
        yield f"moments: {', '.join(moments) or 'none'}; loss scale: {self.loss_scale or 'none seen'}"
        unknown = Counter(cell for row in self.rows for cell in row.dtypes.items() if cell[1][0] == UNKNOWN)
        yield from (f"{name} {why} ({number} row(s))" for (name, why), number in unknown.items())
        yield from (f"{'WRONG' if one.harms else 'look'}: {one}" for one in self.warnings)
        yield "numbers are lost: see WRONG" if self.harms else "no number is lost that should be kept"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> str:
        """Return rows and warnings, every share and dtype in full."""
        rows, warnings = [row.as_dict() for row in self.rows], [asdict(one) for one in self.warnings]
        return json.dumps({"loss_scale": self.loss_scale, "rows": rows, "warnings": warnings}, indent=1)
