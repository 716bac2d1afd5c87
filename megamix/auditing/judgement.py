"""What of the facts does harm, or may: each with how much, and what to do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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


def warnings_of(rows: Sequence[Row], ranks: int, scale: float | None, skipped: bool) -> list[AuditWarning]:
    """Return what there is to say, what does harm first. `ranks`: that summed; `scale`: of a scaler, if any."""
    trained = [row for row in rows if row.first.trains]
    facts = [one for row in trained for one in row.members]
    found = [*_about_update(trained), *_about_moments(trained), *_about_gradients(trained, ranks, scale)]
    found += [*_odd_ones(facts), *([] if skipped else _left_out(facts))]
    if skipped:
        what = "this step was skipped, for a gradient is not finite: nothing is known of its update"
        found.append(AuditWarning("all parameters", what, "Audit a later step, once the loss scale has settled", False))
    return sorted(found, key=lambda one: not one.harms)


def _worst(
    rows: Sequence[Row], how_bad: Callable[[Row], float | None], what: Callable[[Row], str], fix: str,
    harms: bool = True,
) -> Iterator[AuditWarning]:  # fmt: skip
    """Tell the worst of these rows, and how many more there are. `how_bad`: None where nothing is wrong."""
    bad = [(badness, row) for row in rows if (badness := how_bad(row)) is not None]
    if bad:
        _, worst = max(bad, key=lambda one: one[0])
        more = f" ({len(bad) - 1} more row(s) alike)" if len(bad) > 1 else ""
        yield AuditWarning(worst.name, what(worst) + more, fix, harms)


def _about_update(rows: Sequence[Row]) -> Iterator[AuditWarning]:
    def lost(row: Row) -> str:
        lr = row.largest("lr")
        return "" if row.lost is None else f"; {row.lost:.0%} of this step's updates round to nothing at lr {lr:.3g}"

    half = [row for row in rows if row.dtypes["master"] in HALVES]
    fix = (
        "Keep the parameters in FP32 and compute in half: autocast, MixedPrecisionPolicy(param_dtype=torch.bfloat16) "
        "of fully_shard, or megamix.ShardedEngine"
    )
    yield from _worst(half, lambda row: row.lost or 0.0, lambda row: f"no FP32 master{lost(row)}", fix)
    slow = [row for row in rows if row not in half and (row.lost or 0.0) > MOST_LOST]
    fix = "The learning rate is too small for these weights, or weight decay alone moves them"
    yield from _worst(slow, lambda row: row.lost, lambda row: f"an FP32 truth{lost(row)}", fix, harms=False)
    what = "the FP32 masters hold nothing that half would not: they were rebuilt from a half copy, and the rest is lost"
    fix = "Save and load the FP32 masters, not the half weights"
    yield from _worst(rows, lambda row: row.share("round_masters", "masters") or None, lambda row: what, fix)
    what, fix = "no state dict has the FP32 masters", "Save the masters as well, or each resume rounds them"
    yield from _worst(
        rows, lambda row: row.total("lost_at_resume") or None,
        lambda row: f"the checkpoint has {row.dtypes['checkpoint']}, and {what}", fix,
    )  # fmt: skip
    moved = [row for row in rows if (row.update_to_weight or 0.0) > MOST_MOVED and row.first.dims > 1]
    fix = "Of weights that begin near zero that is as it should be; else lower the learning rate"
    yield from _worst(
        moved, lambda row: row.update_to_weight,
        lambda row: f"the update is {row.update_to_weight:.2g} of the weight (rms)", fix, harms=False,
    )  # fmt: skip


def _about_moments(rows: Sequence[Row]) -> Iterator[AuditWarning]:
    """A half moment stays where it is, as seen, or later, where 1 - beta is less than a rounding: a second moment with
    beta 0.999 in BF16 moves in its first steps and then no more, a first one with 0.9 goes on.
    """

    def half(row: Row) -> dict[str, str]:
        return {name: dtype for name, dtype in row.first.moments.items() if dtype in HALVES}

    def stuck(row: Row) -> float:
        return max(row.share(f"stuck {name}", f"due {name}") or 0.0 for name in half(row))

    def sticks(row: Row) -> bool:
        rounding = {name: torch.finfo(DTYPES[dtype]).eps / 2 for name, dtype in half(row).items()}
        return stuck(row) > MOST_STUCK or any(
            1 - row.first.largest.get(f"beta {name}", 0.0) < unit for name, unit in rounding.items()
        )

    for harms in (True, False):
        yield from _worst(
            [row for row in rows if half(row) and sticks(row) == harms], stuck,
            lambda row: f"{', '.join(half(row))} in {row.dtypes['moments']}; {stuck(row):.0%} of the elements stay",
            "Keep the moments in FP32: make the optimizer from FP32 parameters", harms,
        )  # fmt: skip


def _about_gradients(rows: Sequence[Row], ranks: int, scale: float | None) -> Iterator[AuditWarning]:
    def error(row: Row) -> float:
        return ranks * torch.finfo(DTYPES[row.dtypes["sum"]]).eps / 2

    summed = [row for row in rows if row.dtypes["wire"] != NOWHERE and row.dtypes["sum"] in HALVES]
    fix = (
        "Sum in FP32: reduce_dtype=torch.float32 of fully_shard, no compressing hook of DDP, or "
        'megamix.Precision(reduce_dtype="half_fp32_sum")'
    )
    for harms in (True, False):
        told = [row for row in summed if (error(row) >= MOST_ERROR) == harms]
        yield from _worst(
            told, error, lambda row: f"gradients are summed in {row.dtypes['sum']} over {ranks} ranks", fix, harms
        )
    yield from _worst(
        [row for row in rows if (row.zeroed or 0.0) > MOST_ZEROED], lambda row: row.zeroed,
        lambda row: f"{'' if row.zeroed_is_exact else 'about '}{row.zeroed:.0%} of the gradient's elements underflow",
        "Raise the loss scale, or send gradients in a dtype with more exponents, as BF16 or FP32",
    )  # fmt: skip
    yield from _worst(
        rows, lambda row: None if row.headroom is None or row.headroom >= LEAST_HEADROOM else -row.headroom,
        lambda row: f"headroom is {row.headroom:.1f} powers of two: the largest gradient nears the end of its dtype",
        "A scaler that skips steps lives with it" if scale else "Scale the loss with a GradScaler, or less",
        harms=scale is None,
    )  # fmt: skip


def _odd_ones(facts: Sequence[ParamFacts]) -> Iterator[AuditWarning]:
    """Name those that are kept otherwise than most of their kind, where others of their pattern are not."""
    columns = ("storage", "compute", "master")

    def signature(one: ParamFacts) -> tuple[str, ...]:
        return (*(one.dtypes[column] for column in columns), "/".join(one.moments.values()))

    alike: defaultdict[tuple[str, str], list[ParamFacts]] = defaultdict(list)
    votes: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for one in facts:
        alike[one.pattern, one.kind].append(one)
        votes[one.kind][signature(one)] += 1
    for (_, kind), members in alike.items():
        usual = votes[kind].most_common(1)[0][0]
        odd = [one for one in members if signature(one) != usual]
        for one in odd if len(odd) < len(members) else []:
            pairs = zip((*columns, "moments"), signature(one), usual, strict=True)
            said = ", ".join(f"{column} {own} (others {theirs})" for column, own, theirs in pairs if own != theirs)
            fix = "A cast, a policy or a wrapper has left it out, or taken it alone"
            yield AuditWarning(one.name, f"differs from the {len(members) - len(odd)} like it: {said}", fix, True)


def _left_out(facts: Sequence[ParamFacts]) -> Iterator[AuditWarning]:
    free = [one.name for one in facts if not one.counts.get("held")]
    silent = [one.name for one in facts if one.counts.get("held") and not one.largest.get("gradient")]
    what = "requires a gradient, and the optimizer does not hold it: it never changes"
    fix = "Make the optimizer from model.parameters(), after the last call that replaces them"
    for names, said, do, harms in (
        (free, what, fix, True),
        (
            silent,
            "got no gradient in this step",
            "Look whether the forward uses it, and whether detach() cuts it",
            False,
        ),
    ):
        if names:
            where = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            yield AuditWarning(where, said, do, harms)
