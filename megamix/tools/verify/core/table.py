"""The table that `verify` prints: a row for each layout, or for each number of ranks, with the differences below it."""

from __future__ import annotations

from collections.abc import Iterator

from megamix.base.console import Failed
from megamix.mixed_precision.observer import DIRECTION, SOURCE
from megamix.tools.verify.core.verdict import Verdict

DEADLINE_S = 1800.0  # seconds of one call of the ranks
# Columns of the table, with the checks that each one counts.
COLUMNS = {
    "loss": ("loss",),
    "gradients": ("gradient", "factor of the gradient"),
    "norm": ("norm", "largest"),
    "weights": ("weight", "initial weight", DIRECTION, f"{DIRECTION} in FP64"),
    "moments": ("exp_avg", "exp_avg_sq", "momentum_buffer", "velocity", "row_var", "col_var", "variance", SOURCE),
}


def result_lines(name: str, where: str, verdict: Verdict, bisect: bool = False) -> Iterator[str]:
    """Yield a row, and below it the differences, the tensors left out and the first module that is wrong.

    `name`: a layout's, or a number of ranks. `where`: where they computed.
    """
    worst = [max(verdict.worst.get(check, -1.0) for check in checks) for checks in COLUMNS.values()]
    cells = ["-" if one < 0 else f"{one:.3f}" if one < 1000 else f"{one:.3g}" for one in worst]
    ends = "differs" if verdict.differences else "passes"
    yield row(name, where, str(verdict.attempts), str(verdict.skipped), *cells, ends)
    if verdict.tokens:
        scores, choices = (verdict.worst[check] for check in ("scores", "choice of experts"))
        yield (
            f"  routing: {verdict.tokens} choices of experts at most {choices:.3g} of the bound, {verdict.elsewhere} "
            f"not FP64's own; router scores {scores:.3g}; counts and biases bit for bit"
        )
    if verdict.differences:
        yield Failed(f"  first: {verdict.differences[0]}")
        more = dict.fromkeys(f"{one.check} of {one.where}" for one in verdict.differences[1:])
        yield f"  and {len(more)} more: {', '.join([*more][:8])}" if more else "  and nothing else"
    for (what, told), names in verdict.left.items():
        yield f"  {what} of {len(names)} tensor(s): {told}"
    yield from (f"  not judged: {told}" for told, missed in verdict.missed.items() if missed)
    if verdict.culprit:
        yield Failed(f"  first module: {verdict.culprit}")
    elif bisect and verdict.differences:
        yield "  first module: none, up to a factor: look after backward (hooks, reduction, clipping) or at the update"


def row(*cells: str) -> str:
    return f"{cells[0]:<14}" + "".join(f"{cell:>10}" for cell in cells[1:-1]) + f"  {cells[-1]}".rstrip()
