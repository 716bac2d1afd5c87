"""Result of a layout or of a trainer, and the bounds that every judge shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
ByState = dict[tuple[str, str], Tensor]  # by state and parameter
Explanation = Callable[[], str] | str  # kind of a mistake, or a function that finds it

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}  # the largest rounding, relative
U32, U8 = 2.0**-24, 2.0**-4  # of FP32, and of FP8's codes, which have 3 or 2 digits
# Ranks add the same products in another order, and each order rounds as one rank does. The largest error of one order
# may be twice that of another. A result that is wrong by a factor of two is wrong by hundreds of these errors.
NOISE = 8.0
# Rounding on one rank may be at most this share of the largest gradient, by the coarsest rounding of the step. A
# mistake as large as that would pass. Right runs came to 0.18 of it; in FP8 to 0.09, with norms behind blocks to 0.25.
NOISIEST = {U8: 0.3, UNIT[torch.bfloat16]: 0.1, UNIT[torch.float16]: 0.03, U32: 1e-3}
EXPLAINED = 8  # differences of one run that are explained; the first ones name the cause


@dataclass(frozen=True, slots=True)
class Difference:
    """Result that is further from the result on one rank than its bound allows."""

    attempt: int
    check: str
    where: str  # a parameter, or another thing that was compared
    error: float
    bound: float
    looks_like: str = ""  # kind of mistake that gives these numbers

    def __str__(self) -> str:
        what = f"{f'attempt {self.attempt}' if self.attempt >= 0 else 'at the start'}: {self.check} of {self.where}"
        if self.looks_like and not self.bound and self.error == math.inf:  # a yes or no has no distance
            return f"{what}: {self.looks_like}"
        kind = f"; it looks like {self.looks_like}" if self.looks_like else ""
        return f"{what} is off by {self.error:.3g}, bound {self.bound:.3g}{kind}"


@dataclass(slots=True)
class Verdict:
    """Result of one layout."""

    attempts: int = 0
    attempt: int = -1  # the one that is compared; -1: the state at the start
    skipped: int = 0
    worst: dict[str, float] = field(default_factory=dict)  # by check: the largest error, as a share of its bound
    differences: list[Difference] = field(default_factory=list)
    left: dict[tuple[str, str], set[str]] = field(default_factory=dict)  # (kind of tensor, message) -> names of tensors
    tokens: int = 0  # routed by a layer's router, over all layers and steps
    elsewhere: int = 0  # of these: tokens that FP64 would have routed otherwise
    missed: dict[str, bool] = field(default_factory=dict)  # by what no step has shown so far: whether that still holds
    culprit: str = ""  # first module that is wrong, if modules are recorded

    def note(self, check: str, where: str, error: float, bound: float, explain: Explanation = "") -> None:
        """Add a comparison of the present attempt.

        `explain`: a function is called for the first differences only.
        """
        share = 0.0 if error == 0 else error / bound if bound else math.inf
        if not (math.isfinite(error) and math.isfinite(bound)):  # an overflow, here or there, proves nothing
            share = math.inf
        self.worst[check] = max(self.worst.get(check, 0.0), share)
        if share > 1:
            if not isinstance(explain, str):
                explain = explain() if len(self.differences) < EXPLAINED else ""
            self.differences.append(Difference(self.attempt, check, where, error, bound, explain))

    def expect(self, check: str, where: str, holds: bool, explain: Explanation = "wrong") -> None:
        """Add a comparison that only passes or fails."""
        self.note(check, where, 0.0 if holds else math.inf, 0.0, explain)

    def equal(self, check: str, where: str, got: Tensor, want: Tensor, explain: Explanation = "") -> None:
        """Compare bit for bit, in FP32."""
        gap = 0.0
        if not equal_bits(got.float(), want.float()):
            gap = max_abs(torch.where(got == want, 0.0, got.double() - want.double()))  # equal infinities are not apart
        self.note(check, where, gap, 0.0, explain)

    def note_noise(self, native: Tensors, exact: Tensors, noisiest: float) -> None:
        """Check that the rounding error of the gradients on one rank is too small to hide a mistake.

        `noisiest`: the largest error that may be, as a share of the largest gradient.
        """
        largest = max(map(max_abs, exact.values()))
        noises = {name: max_abs(native[name] - grad) for name, grad in exact.items()}
        name = max(noises, key=noises.__getitem__)
        text = "a model or a loss that is not the same in FP64, or rounding too coarse to judge by: even one process, "
        text += "without ranks, is this far from FP64"
        self.note("noise", name, noises[name], noisiest * largest, text)

    def needs(self, told: str, shown: bool) -> None:
        """Note whether a step has shown what a check needs: one that no step gave anything to judge has passed, too."""
        self.missed[told] = self.missed.get(told, True) and not shown

    def coefficient(self, clip: float, norm: float) -> float:
        """Return the factor of a gradient of this norm that is clipped to `clip`, 0 for none."""
        told = f"clipping: no gradient was longer than clip_grad {clip:g}; verify with a smaller one"
        self.needs(told, not clip or norm > clip)
        return min(1.0, clip / (norm + 1e-6)) if clip else 1.0

    def leave(self, what: str, name: str, told: str) -> None:
        """Add a message on a tensor that is no difference, such as why it cannot be compared."""
        self.left.setdefault((what, told), set()).add(name)


def max_abs(x: Tensor) -> float:
    return float(x.abs().max())


def norm_of(grads: Tensors) -> float:
    return math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))


class Bounds(NamedTuple):
    """Bounds of gradients that ranks sum. `divisor`: the factor in a scaled FP16 gradient."""

    roundings: int
    unit: float  # of the sums' dtype
    divisor: float = math.inf

    def of_gradient(self, noise: float, magnitudes: Tensor) -> float:
        """Return how far a gradient may be from FP64's at the same weights.

        It is NOISE times the rounding error on one rank, the largest over the parameter. One rank does not round the
        sums over micro-batches and ranks. Each of these adds one rounding, in the sums' dtype, of a partial sum that is
        at most the sum of `magnitudes`. Scaled gradients below FP16's normal numbers round to multiples of 2^-24.
        """
        return NOISE * noise + self.roundings * (self.unit * float(magnitudes.max()) + 2.0**-25 / self.divisor)

    def of_factor(self, noise: float, right: Tensor, magnitudes: Tensor) -> float:
        """Return how far from 1 the factor of a gradient along FP64's may be.

        `noise`: the largest error of a factor on one rank. Each sum adds an independent rounding to each element, as in
        `of_gradient`. In the factor they add up to one number, whose deviation is the root of their squares' sum.
        """
        norm = right.norm()
        deviation = self.unit * (right * magnitudes).norm() / norm**2 + 2.0**-25 / self.divisor / norm
        return NOISE * (noise + self.roundings * float(deviation))


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Compare two FP32 tensors bit for bit; NaN equals the same NaN."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
