"""What became of a layout or of a trainer, and the bounds that every judge shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megamix.mixed_precision.optimizers import MASTER
from megamix.verify.observe import equal_bits

Tensors = dict[str, Tensor]

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}  # the largest rounding, relative
U32 = 2.0**-24
# Ranks add the same products in another order, and each order rounds as one rank does: some give a largest error twice
# that of another one. What is wrong by a factor of two is wrong by hundreds of them.
NOISE = 8.0
EXPLAINED = 8  # differences of one run that are explained: the first ones name the cause


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is further from one rank's than its bound."""

    attempt: int
    check: str
    where: str  # a parameter, or what else was compared
    error: float
    bound: float
    looks_like: str = ""  # the kind of mistake whose numbers are these

    def __str__(self) -> str:
        what = f"{f'attempt {self.attempt}' if self.attempt >= 0 else 'at the start'}: {self.check} of {self.where}"
        if self.looks_like and not self.bound and self.error in (1.0, math.inf):  # a yes or no: there is no distance
            return f"{what}: {self.looks_like}"
        kind = f"; it looks like {self.looks_like}" if self.looks_like else ""
        return f"{what} is off by {self.error:.3g}, bound {self.bound:.3g}{kind}"


@dataclass(slots=True)
class Verdict:
    """What became of one layout."""

    attempts: int = 0
    skipped: int = 0
    worst: dict[str, float] = field(default_factory=dict)  # by check: the largest error, as a share of its bound
    differences: list[Difference] = field(default_factory=list)
    culprit: str = ""  # the first module that is wrong, where modules are recorded

    def note(
        self, attempt: int, check: str, where: str, error: float, bound: float, explain: Callable[[], str] | str = ""
    ) -> None:
        """Add a comparison. `explain`: what kind of mistake it looks like, asked of the first ones only."""
        share = 0.0 if error == 0 else error / bound if bound else math.inf
        if not (math.isfinite(error) and math.isfinite(bound)):  # what overflows, here or there, proves nothing
            share = math.inf
        self.worst[check] = max(self.worst.get(check, 0.0), share)
        if share > 1:
            if not isinstance(explain, str):
                explain = explain() if len(self.differences) < EXPLAINED else ""
            self.differences.append(Difference(attempt, check, where, error, bound, explain))

    def equal(
        self, attempt: int, check: str, where: str, got: Tensor, want: Tensor, explain: Callable[[], str] | str = ""
    ) -> None:
        """Compare bit for bit, in FP32."""
        same = equal_bits(got.float(), want.float())
        gap = 0.0 if same else float((got.double() - want.double()).abs().max())
        self.note(attempt, check, where, gap, 0.0, explain)


def norm_of(grads: Tensors) -> float:
    """Return that of all of them, FP64."""
    return math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))


def gradient_bound(noise: float, magnitude: float, roundings: int, unit: float, divisor: float | None) -> float:
    """Return how far a gradient may be from FP64's at the same weights.

    NOISE times what rounding does on one rank, the largest over the parameter. And for the sums over micro-batches
    and ranks, which one rank does not round, a rounding of the sums' dtype for each of them, of a partial sum that is
    at most the sum of magnitudes; scaled gradients below FP16's normal numbers round to multiples of 2^-24.
    `divisor`: of a scaled FP16 gradient, else None.
    """
    tiny = 2.0**-25 * roundings / divisor if divisor else 0.0
    return NOISE * noise + roundings * unit * magnitude + tiny


def note_update(
    verdict: Verdict, attempt: int, name: str, updated: Callable[[Tensor], Tensors], grad: Tensor, before: Tensors,
    after: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], lr: float,
    explain: Callable[[str, float], str], unseen: float = 0.0,
) -> None:  # fmt: skip
    """Compare master and states with the optimizer's equation in FP64, `updated`, of this gradient.

    Bound: 64 FP32 roundings of the largest number that enters. The norm in the clip coefficient has 34 of them,
    unscaling and the equation fewer than 16; a square has the gradient's twice. A step of the master is at most about
    4 lr in AdamW, whatever the gradient, and lr times gradient and momentum in NAG. A half state is rounded once more,
    in its dtype. Where an equation jumps, as a sign does, 64 roundings of the gradient may decide. `unseen`: how far
    the gradient may be from the one that the update used; the update may be off by what that moves it, looked at in
    four places. Shapes: grad FP64, each of `before` and `after` like the parameter. `explain`: of a state's name and
    bound.
    """
    for state, new in updated(grad).items():
        error = (after[state].double() - new).abs()
        bound = 64 * U32 * max(_sizes(state, new, before[state], grad, lr))
        if dtypes[state] != torch.float32:
            bound += UNIT[dtypes[state]] * float(new.abs().max()) + 2.0**-25  # FP16's subnormals
        if error.max() > bound:
            others = [grad * (1 - 64 * U32), grad * (1 + 64 * U32)]
            others += [grad + unseen * part for part in (-1.0, -0.5, 0.5, 1.0) if unseen]
            spread = sum(((updated(other)[state] - new).abs() for other in others), torch.zeros_like(error))
            error = error - spread
        check, worst = "weight" if state == MASTER else state, max(0.0, float(error.max()))
        if not torch.isfinite(after[state]).all():
            worst = math.inf
        verdict.note(attempt, check, name, worst, bound, partial(explain, state, bound))


def _sizes(state: str, new: Tensor, old: Tensor, grad: Tensor, lr: float) -> Iterator[float]:
    yield from (float(old.abs().max()), float(new.abs().max()))
    largest = float(grad.abs().max())
    if state == MASTER:
        yield lr * max(8.0, largest)
    else:
        yield 2 * max(largest, largest**2) if state == "exp_avg_sq" else largest
