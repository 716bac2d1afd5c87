"""Which kind of mistake a difference looks like: what each kind would have given is computed, and the nearest is named
if it explains the numbers within the bound that the right ones have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megamix.mixed_precision.optimizers import MASTER
from megamix.verify.reference import Reference
from megamix.verify.verdict import Tensors

Candidates = Iterator[tuple[str, Tensor]]
Rule = Callable[..., Tensors]  # of an optimizer: (name, grad, before, lr=, weight_decay=, update=) -> master and states
HALVES = {torch.bfloat16: "BF16", torch.float16: "FP16"}


def nearest(found: Tensor, want: Tensor, bound: float, candidates: Candidates) -> str:
    """Return the candidate nearest to `found`, if within the bound and four times as near as `want`; else ""."""
    error = float((found - want).abs().max())
    best, kind = min(error / 4, math.inf) if math.isfinite(error) else math.inf, ""
    for sentence, candidate in candidates:
        size = max(1.0, float(candidate.abs().max()) / max(float(want.abs().max()), 1e-300))
        off = float((found - candidate).abs().max())
        if off <= bound * size and off < best:
            best, kind = off, sentence
    return kind


def _factor(found: Tensor, right: Tensor) -> float:
    """Return what `right` must be multiplied by to come nearest to `found`, in the sum of squares."""
    return float((found * right).sum() / right.square().sum().clamp(min=1e-300))


@dataclass(frozen=True)
class AskedStep:
    """One step as it should have been: whose gradient is to be explained."""

    reference: Reference
    weights: Mapping[str, Tensor]  # before it
    by_rank: Sequence[Sequence[Any]]  # each rank's micro-batches
    shares: Sequence[Sequence[float]]  # what each counts in the loss; their sum is 1
    loss_scale: float = 1.0
    coefficient: float = 1.0  # of clipping: of the gradient that was found
    clip: float = 0.0
    earlier: AskedStep | None = field(default=None, repr=False)

    @cached_property
    def parts(self) -> list[list[Tensors]]:
        """What each micro-batch of each rank adds to the gradient, FP64."""
        return [[self._of([batch], [share]) for batch, share in zip(*both, strict=True)]
                for both in zip(self.by_rank, self.shares, strict=True)]  # fmt: skip

    def _of(self, batches: Sequence[Any], shares: Sequence[float]) -> Tensors:
        return self.reference.exact_step(self.weights, batches, shares).grads

    @cached_property
    def whole(self) -> Tensors:
        return {name: self._sum(name) for name in self.parts[0][0]}

    def _sum(self, name: str, rank: int | None = None, number: int | None = None) -> Tensor:
        """Add up the parts of a rank, of the micro-batches of a number, or all."""
        ranks = self.parts if rank is None else [self.parts[rank]]
        chosen = [part[name] for mine in ranks for at, part in enumerate(mine) if number in (None, at)]
        return torch.stack(chosen).sum(0)

    def explain(self, name: str, found: Mapping[str, Tensor], bound: float) -> str:
        """Say what kind of mistake the gradient of `name` looks like, among those `found`; "" for no known one."""
        want, off = self.whole[name] * self.coefficient, found[name]
        if kind := self._clipping(name, off, bound):
            return kind
        factors = ((text, grad * self.coefficient) for text, grad in self._factors(name))
        kinds = (*self._sums(name), *self._steps(name), *self._places(name, off))
        # A wrong gradient is clipped by a norm of its own.
        others = ((text, grad * (_factor(off, grad) if self.clip else 1.0)) for text, grad in kinds)
        kind = nearest(off, want, bound, chain(factors, others))
        return kind or self._decay(off - want, self.weights[name], bound) or self._times(name, off, bound)

    def _factors(self, name: str) -> Candidates:
        ranks, numbers, scale = len(self.parts), len(self.parts[0]), self.loss_scale
        meanings: dict[float, list[str]] = {}
        for factor, meaning in (
            (2.0, "counted twice"), (0.5, "halved"),
            (ranks, "added up over ranks, not averaged"), (1 / ranks, "divided by the number of ranks twice"),
            (numbers, "added up over micro-batches, not averaged"),
            (1 / numbers, "divided by the number of micro-batches twice"),
            (ranks * numbers, "added up over ranks and micro-batches, not averaged"),
            (1 / (ranks * numbers), "divided by the number of ranks and of micro-batches twice"),
            (scale, "the loss scale left in"), (1 / scale, "divided by the loss scale twice"),
            (-1.0, "its sign turned"), (0.0, "lost: nothing but zeros"),
        ):  # fmt: skip
            if factor != 1:
                meanings.setdefault(factor, []).append(meaning)
        for factor, texts in meanings.items():
            yield f"{factor:g} times the right one ({', or '.join(texts)})", self.whole[name] * factor

    def _sums(self, name: str) -> Candidates:
        """Parts that are missing, or counted as they should not be."""
        ranks, numbers, whole = len(self.parts), len(self.parts[0]), self.whole[name]
        for rank in range(ranks if ranks > 1 else 0):
            mine = self._sum(name, rank)
            yield f"rank {rank}'s part is missing", whole - mine
            yield f"rank {rank}'s part is missing from the mean", (whole - mine) * (ranks / (ranks - 1))
            yield f"rank {rank}'s own, not reduced over the ranks, or all ranks read its samples", mine * ranks
            for other in range(ranks):
                if other != rank:
                    text = f"rank {rank} reads the samples of rank {other}"
                    yield text, whole - mine + self._sum(name, other)
        for number in range(numbers if numbers > 1 else 0):
            part = self._sum(name, number=number)
            yield f"micro-batch {number} is missing", whole - part
            yield f"micro-batch {number} alone, over the number of micro-batches", part
            yield f"micro-batch {number} alone", part * numbers
            yield f"micro-batch {number} counts twice", whole + part
        if len({share for mine in self.shares for share in mine}) > 1:
            means = [[part[name] / share for part, share in zip(*both, strict=True)]
                     for both in zip(self.parts, self.shares, strict=True)]  # fmt: skip
            text = "a mean of micro-batches' means, though their numbers of targets differ"
            yield text, torch.stack([mean for mine in means for mean in mine]).mean(0)
            text = "a mean of ranks' means, though their numbers of targets differ"
            by_rank = [self._sum(name, rank) / sum(self.shares[rank]) for rank in range(ranks)]
            yield text, torch.stack(by_rank).mean(0)

    def _steps(self, name: str) -> Candidates:
        if (earlier := self.earlier) is None:
            return
        here = self.whole[name]
        shares = [share for mine in self.shares for share in mine]
        batches = [batch for mine in self.by_rank for batch in mine]
        old = self.reference.exact_step(earlier.weights, batches, shares)
        yield "that of the weights before the last update: stale weights", old.grads[name]
        before = [batch for mine in earlier.by_rank for batch in mine]
        kept = [share for mine in earlier.shares for share in mine]
        yield "that of the last step's samples", self.reference.exact_step(self.weights, before, kept).grads[name]
        yield "the last step's gradient still in it: not set to zero", here + earlier.whole[name]
        yield "the last step's gradient", earlier.whole[name]

    def _places(self, name: str, found: Tensor) -> Candidates:
        """The right numbers in wrong places."""
        whole = self.whole[name]
        if whole.dim() == 2 and (whole.size(0) > 1 and whole.size(1) > 1):
            yield "transposed", whole.t().reshape(whole.shape)
        if whole.dim() > 1 and whole.size(0) > 1:
            yield "its rows turned by one", whole.roll(1, 0)
        moved = torch.empty_like(whole).view(-1)
        moved[found.flatten().argsort()] = whole.flatten().sort().values
        yield "the right numbers in other places", moved.view(whole.shape)

    def _times(self, name: str, found: Tensor, bound: float) -> str:
        factor = _factor(found, self.whole[name])
        if float((found - factor * self.whole[name]).abs().max()) > bound:
            return ""
        return f"{factor / self.coefficient:.4g} times the right one"

    def _clipping(self, name: str, found: Tensor, bound: float) -> str:
        """Explain a gradient that is off by one factor: by the norm with which it was clipped."""
        factor = _factor(found, self.whole[name])
        if not self.clip or factor <= 0 or float((found - factor * self.whole[name]).abs().max()) > bound:
            return ""
        squares = {other: float(grad.square().sum()) for other, grad in self.whole.items()}
        norm, used = math.sqrt(sum(squares.values())), self.clip / factor
        told = f"clipped by a norm of {used:.4g}, where that of all gradients is {norm:.4g}"

        def near(other: float) -> bool:
            return abs(used / other - 1) < 1e-3

        if abs(factor - 1) < 1e-3:
            return "not clipped"
        if self.loss_scale != 1 and near(norm * self.loss_scale):
            return f"{told}: of the gradient with the loss scale in it"
        if len(squares) > 1 and near(math.sqrt(squares[name])):
            return f"{told}: its own"
        for times in {len(self.parts), len(self.parts[0])} - {1}:
            for text, by in (("", float(times)), ("the root of ", math.sqrt(times))):
                if near(norm * by) or near(norm / by):
                    return f"{told}: {'times' if used > norm else 'over'} {text}{times}, the ranks or micro-batches"
        for other, square in squares.items():
            for verb, more in (("leaves out", -1), ("counts twice", 1)):
                if square > 1e-2 * norm**2 and abs(used**2 - norm**2 - more * square) < 1e-3 * square:
                    return f"{told}: it {verb} {other}"
        return ""

    def _decay(self, error: Tensor, weight: Tensor, bound: float) -> str:
        weight = weight.double()
        rate = _factor(error, weight)
        if float((error - rate * weight).abs().max()) <= bound:
            return f"{rate:.4g} times the weights added to it: weight decay in the gradient"
        return ""


@dataclass(frozen=True, kw_only=True)
class AskedUpdate:
    """One parameter's update as it should have been."""

    rule: Rule
    name: str
    grad: Tensor  # FP64, as the update uses it: unscaled, clipped
    before: Tensors  # master and states
    lr: float
    weight_decay: float
    update: int  # its number
    attempts: int  # updates and skipped steps so far, with this one
    lrs: Mapping[str, float] = field(default_factory=dict)  # other learning rates, by whose they are
    decays: Mapping[str, float] = field(default_factory=dict)
    coefficient: float = 1.0  # of clipping, in the gradient
    loss_scale: float = 1.0

    def updated(self, grad: Tensor, before: Tensors | None = None, **other: Any) -> Tensors:
        at = {"lr": self.lr, "weight_decay": self.weight_decay, "update": self.update} | other
        return self.rule(self.name, grad, self.before if before is None else before, **at)

    def explain(self, state: str, after: Tensor, bound: float) -> str:
        """Say what kind of mistake `after`, which is master or a state, looks like; "" for no known one."""
        want, found = self.updated(self.grad)[state], after.double()
        for dtype, text in HALVES.items():
            if bool((found.to(dtype).double() == found).all()) and bool((want.to(dtype).double() != want).any()):
                lost = float(((found == self.before[state].double()) & (want != found)).double().mean())
                which = "no FP32 master" if state == MASTER else "no FP32 state"
                return f"kept in {text}: {which}; {lost:.0%} of its elements' updates round to nothing"
        return nearest(found, want, bound, ((text, one[state]) for text, one in self._kinds()))

    def _kinds(self) -> Iterator[tuple[str, Tensors]]:
        grad, before, once = self.grad, self.before, self.updated(self.grad)
        moments = [state for state in before if state != MASTER]
        yield "never updated", before
        yield "updated twice", self.updated(grad, once, update=self.update + 1)
        yield "updated twice with one number", self.updated(grad, once)
        for text, lr in self.lrs.items():
            yield f"updated with {text}, {lr:.4g}, not {self.lr:.4g}", self.updated(grad, lr=lr)
        for text, decay in {"no weight decay": 0.0, **self.decays}.items():
            yield f"{text}, {decay:.4g}, not {self.weight_decay:.4g}", self.updated(grad, weight_decay=decay)
        decayed = grad + self.weight_decay * before[MASTER].double()
        yield "weight decay added to the gradient, not to the weights", self.updated(decayed, weight_decay=0.0)
        for count in {self.update - 1, self.update + 1, self.attempts} - {self.update, 0}:
            text = "the skipped steps are counted" if count == self.attempts else f"that of update {count}"
            yield f"bias correction: {text}, where this is update {self.update}", self.updated(grad, update=count)
        yield "no bias correction", self.updated(grad, update=10**9)
        if moments:
            empty = {state: before[state] if state == MASTER else torch.zeros_like(before[state]) for state in before}
            yield "states lost: this update began with zeros", self.updated(grad, empty)
            yield "states and their count lost: updated as if it were the first", self.updated(grad, empty, update=1)
        for dtype, text in HALVES.items():
            rounded = before | {MASTER: before[MASTER].to(dtype).to(before[MASTER].dtype)}
            yield f"masters made from the {text} copy before this update", self.updated(grad, rounded)
            states = {state: before[state].to(dtype).to(before[state].dtype) for state in moments}
            yield f"states rounded to {text} before this update", self.updated(grad, before | states)
        for text, factor in (
            ("the gradient was not clipped", 1 / self.coefficient), ("the loss scale is left in", self.loss_scale),
            ("the gradient was divided by the loss scale twice", 1 / self.loss_scale),
            ("the gradient was clipped twice", self.coefficient), ("its sign is turned", -1.0),
            ("the gradient is zeros", 0.0),
        ):  # fmt: skip
            if factor != 1:
                yield text, self.updated(grad * factor)
