"""Kinds of mistakes: the gradient or loss that each kind would have given is computed, and the nearest is named.

It is named only if it explains the numbers within the bound that the right ones have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from megamix.data.loader import Batch
from megamix.mixed_precision.optim.muon import Muon, orthogonalised
from megamix.tools.verify.core.reference import Reference, Step, Work, finite
from megamix.tools.verify.core.verdict import UNIT, Tensors, max_abs

Candidates = Iterable[tuple[str, Tensor]]
Parts = Sequence[Sequence[Tensor]]  # of a sum: each micro-batch's part, by rank
HALVES = {torch.bfloat16: "BF16", torch.float16: "FP16"}


def nearest(found: Tensor, want: Tensor, bound: float, candidates: Candidates) -> str:
    """Return the candidate nearest to `found`, if within the bound and four times as near as `want`; else ""."""
    error = max_abs(found - want)
    best, kind = error / 4 if math.isfinite(error) else math.inf, ""
    for sentence, candidate in candidates:
        size = max(1.0, max_abs(candidate) / max(max_abs(want), 1e-300))
        off = max_abs(found - candidate)
        if off <= bound * size and off < 0.99 * best:  # two candidates may be the same numbers; the first one is kept
            best, kind = off, sentence
    return kind


def _targets_moved(batch: Any, by: int) -> Any:
    """Return a micro-batch with its targets rolled by some positions. In a user's batch the targets are the last entry,
    if that is a tensor of whole numbers; otherwise nothing is rolled.
    """
    if isinstance(batch, Batch):
        return batch._replace(targets=batch.targets.roll(by))
    if isinstance(batch, Mapping):
        return dict(zip(batch, _targets_moved([*batch.values()], by), strict=True))
    if not isinstance(batch, tuple | list) or not isinstance(batch[-1], Tensor) or batch[-1].is_floating_point():
        return batch
    return [*batch[:-1], batch[-1].roll(by)]


def lost(got: Tensor, want: Tensor) -> str:
    """Say how values were lost by accident, "" if they were not; both FP64."""
    if (want.isfinite() & ~got.isfinite()).any():
        return "memory that nobody has filled, as to_empty() leaves it"
    if want.any() and not got.any():
        return "nothing but zeros"
    rounded = (text for dtype, text in HALVES.items() if torch.equal(got, want.to(dtype).double()))
    return next((f"rounded to {text}, as parameters are" for text in rounded), "")


def factor_of(found: Tensor, right: Tensor) -> float:
    """Return the factor of `right` that comes nearest to `found`, in the sum of squares."""
    found, right = found.double(), right.double()
    return float((found * right).sum() / right.square().sum().clamp(min=1e-300))


def _sum(parts: Parts, number: int | None = None) -> Tensor:
    """Add up the parts of the micro-batches with one number, or all."""
    return torch.stack([part for mine in parts for at, part in enumerate(mine) if number in (None, at)]).sum(0)


@dataclass(frozen=True)
class RightStep:
    """One step as it should have been, to explain a gradient that differs."""

    reference: Reference
    weights: Tensors  # weights before the step
    by_rank: Sequence[Work]  # each rank's micro-batches; the sum of their weights is 1
    loss_scale: float = 1.0
    coefficient: float = 1.0  # clip coefficient of the gradient that was found
    clip: float = 0.0
    groups: Mapping[str, int] = field(default_factory=dict)  # a parameter's group of the optimizer
    earlier: RightStep | None = field(default=None, repr=False)
    ranks: int = 1  # number of all ranks; more than those that read data if some divide the model
    owners: Tensors = field(default_factory=dict)  # by parameter: each element's owner
    tp_size: int = 1
    replicated: Collection[str] = ()  # parameters that tensor-parallel ranks replicate

    @cached_property
    def parts(self) -> list[list[Tensors]]:
        """Return each micro-batch's part of the gradient, by rank, FP64."""
        return [[self._of([one]) for one in mine] for mine in self.by_rank]

    def _of(self, work: Work, weights: Tensors | None = None) -> Tensors:
        return self.reference.step(self.reference.exact, weights or self.weights, work).grads

    @property
    def flat(self) -> Work:
        """Return the micro-batches of all ranks."""
        return [*chain.from_iterable(self.by_rank)]

    @property
    def shares(self) -> list[list[float]]:
        """Return the weight of each micro-batch's mean in the loss, by rank."""
        return [[share for _, share in mine] for mine in self.by_rank]

    @cached_property
    def exact(self) -> Step:
        return self.reference.step(self.reference.exact, self.weights, self.flat)

    @property
    def whole(self) -> Tensors:
        return self.exact.grads

    def native(self, loss_scale: float) -> Step:
        """Take the step in the training's own precision."""
        return self.reference.step(self.reference.native, self.weights, self.flat, loss_scale)

    def finite(self, loss_scale: float) -> tuple[Step, float]:
        """Return `native` at the largest scale without overflow, and that scale.

        The scales tried are the given one, its half, its quarter and so on.
        """
        step = self.native(loss_scale)
        while not finite(step.grads) and loss_scale > 1:
            loss_scale /= 2
            step = self.native(loss_scale)
        return step, loss_scale

    def _of_name(self, name: str) -> Parts:
        return [[part[name] for part in mine] for mine in self.parts]

    def explain(self, name: str, found: Tensors, bound: float) -> str:
        """Say which kind of mistake the gradient of `name` looks like, among those `found`; "" for no known one."""
        whole, weight, off = self.whole[name], self.weights[name].double(), found[name]
        want = whole * self.coefficient
        factor, rate = factor_of(off, whole), factor_of(off - want, weight)
        times = f"{factor / self.coefficient:.4g} times the right one"
        added = f"{rate:.4g} times the weights added to it: weight decay in the gradient, or weights left in its buffer"
        factors = ((text, want * factor) for factor, text in self.meanings())
        # A wrong gradient is clipped by a norm of its own.
        others = ((text, grad * (factor_of(off, grad) if self.clip else 1.0)) for text, grad in self._others(name, off))
        kept = factors, self._clips(name, off), [(times, factor * whole)], others, [(added, want + rate * weight)]
        kind = next(filter(None, (nearest(off, want, bound, candidates) for candidates in kept)), "")
        return kind or self._rounded(want, off) or self._orthogonal(name, off)

    def _others(self, name: str, off: Tensor) -> Candidates:
        """Yield gradients that take further steps to know. No step is taken before it is asked for."""
        yield from self._owned(name)
        yield from self._sums(self._of_name(name))
        yield from ((text, grads[name]) for text, grads in self._other_steps.items())
        yield from self._uses(name)
        yield from self._places(name, off)

    def rank_apart(self, losses: Sequence[Sequence[float]], exact: Sequence[float], bound: float) -> str:
        """Return which ranks compute another loss than one process while others do not; "" for all or none of them.

        `losses`: one for each micro-batch of each rank. `exact`: the reference's, in FP64, one for each micro-batch.
        """
        if [*map(len, losses)] != [*map(len, self.by_rank)]:
            return ""
        right = iter(exact)
        errors = [[abs(loss - next(right)) for loss in mine] for mine in losses]
        wrong = [rank for rank, mine in enumerate(errors) if not all(error <= bound for error in mine)]
        if not 0 < len(wrong) < len(losses):
            return ""
        return f"another forward on rank {', '.join(map(str, wrong))} alone: losses elsewhere are right"

    def explain_loss(self, told: Sequence[float], losses: Sequence[float], bound: float) -> str:
        """Say which kind of mistake the loss looks like. `told`: each rank's answer. `losses`: the reference's,
        FP64, one for each micro-batch.
        """
        found = sum(one * sum(mine) for one, mine in zip(told, self.shares, strict=True))
        left = iter(losses)
        parts = [[torch.tensor(next(left) * share, dtype=torch.float64) for share in mine] for mine in self.shares]
        whole, ranks = _sum(parts), [*zip(parts, self.shares, strict=True)]
        factors = ((text, whole * factor) for factor, text in self.meanings())
        alone = [(f"rank {rank}'s own", _sum([mine]) / sum(shares)) for rank, (mine, shares) in enumerate(ranks)]
        last = torch.stack([mine[-1] / shares[-1] * sum(shares) for mine, shares in ranks]).sum(0)
        alone += [("that of the last micro-batch alone", last)]
        alone += [("that of rank 0's last micro-batch alone", parts[0][-1] / self.shares[0][-1])]
        kinds = chain(factors, alone, self._sums(parts))
        if kind := nearest(torch.tensor(found, dtype=torch.float64), whole, bound, kinds):
            return kind
        for dtype, text in HALVES.items():
            kept = all(float(torch.tensor(one).to(dtype)) == one for one in told)
            if kept and abs(found / float(whole) - 1) < 4 * UNIT[dtype]:
                return f"computed or kept in {text}"
        return "another forward, other samples or other weights: those after the last step give another loss"

    def meanings(self) -> Iterator[tuple[float, str]]:
        """Yield every factor that mistakes easily leave in a gradient, with their meanings."""
        ranks, numbers, scale = len(self.by_rank), len(self.by_rank[0]), self.loss_scale
        both = ranks * numbers if min(ranks, numbers) > 1 else 1
        meanings = dict[float, list[str]]()
        for factor, meaning in (
            (2.0, "counted twice"), (0.5, "halved"),
            (ranks, "added up over ranks, not averaged"), (1 / ranks, "divided by the number of ranks twice"),
            (numbers, "added up over micro-batches, not averaged"),
            (1 / numbers, "divided by the number of micro-batches twice"),
            (both, "added up over ranks and micro-batches, not averaged"),
            (1 / both, "divided by the number of ranks and of micro-batches twice"),
            (scale, "the loss scale left in"), (1 / scale, "divided by the loss scale twice"),
            (-1.0, "its sign turned"), (0.0, "lost: nothing but zeros"),
        ):  # fmt: skip
            if factor != 1:
                meanings.setdefault(factor, []).append(meaning)
        for factor, texts in meanings.items():
            yield factor, f"{factor:g} times the right one ({', or '.join(texts)})"

    def _owned(self, name: str) -> Candidates:
        """Yield gradients in which the owners of a parameter's elements lack the other ranks' parts."""
        if name not in self.owners:
            return
        by_part = [grads[name] for grads in self._by_part] if name in self.replicated else []
        by_rank = [_sum([mine]) for mine in self._of_name(name) for _ in range(self.tp_size)]
        parts = torch.stack(by_part or by_rank)
        owner = self.owners[name].clamp(min=0) % len(parts)  # each stage has the same ranks
        text = "each rank's own: the others' parts are missing, or not reduced over the ranks"
        yield text, parts.gather(0, owner.unsqueeze(0))[0]
        for rank in range(self.tp_size if by_part else 0):
            missing = parts[rank :: self.tp_size].sum(0)
            yield f"tensor-parallel rank {rank}'s part is missing", self.whole[name] - missing

    @cached_property
    def _by_part(self) -> list[Tensors]:
        """Return each rank's part of replicated parameters' gradients: data-parallel ranks, each with its tp_size
        parts.
        """
        return [self._part_of(mine, part) for mine in self.by_rank for part in range(self.tp_size)]

    def _part_of(self, work: Work, part: int) -> Tensors:
        """Return the part of each gradient from one of `tp_size` equal parts of the positions, or of the heads.

        The parts divide dim -2 of the output of a parameter's module.
        """

        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            if not (module._parameters and isinstance(out, Tensor) and out.dim() > 1):
                return out
            there = {key: param for key, param in module._parameters.items() if param is not None}
            frozen = {key: nn.Parameter(param.detach(), requires_grad=False) for key, param in there.items()}
            with mock.patch.dict(module._parameters, frozen):
                elsewhere = module.forward(*args, **kwargs)
            places = torch.arange(out.shape[-2], device=out.device) * self.tp_size // out.shape[-2]
            return torch.where((places == part).unsqueeze(-1), out, elsewhere)

        with register_module_forward_hook(hook, with_kwargs=True):
            return self._of(work)

    def _sums(self, parts: Parts) -> Candidates:
        """Yield sums with parts that are missing, or counted as they should not be."""
        ranks, numbers, whole = len(parts), len(parts[0]), _sum(parts)
        by_rank = [_sum([mine]) for mine in parts]
        for rank, mine in enumerate(by_rank if ranks > 1 else ()):
            yield f"rank {rank}'s part is missing", whole - mine
            yield f"rank {rank}'s part is missing from the mean", (whole - mine) * (ranks / (ranks - 1))
            yield f"rank {rank}'s own, not reduced over the ranks, or all ranks read its samples", mine * ranks
            for other in {*range(ranks)} - {rank}:
                yield f"rank {rank} reads the samples of rank {other}", whole - mine + by_rank[other]
        for size in (size for size in range(2, ranks) if ranks % size == 0):  # rows and columns of a mesh
            for group in (range(size), range(0, ranks, ranks // size)):
                mine = torch.stack([by_rank[rank] for rank in group]).sum(0)
                yield f"that of ranks {[*group]} alone, not reduced over the others", mine * (ranks / size)
        # These kinds come before the next ones. If two micro-batches have targets in the ratio 1 to 2, the mean of
        # means is, up to a factor, the gradient in which the first one counts twice.
        if len({share for mine in self.shares for share in mine}) > 1 or len({*map(len, parts)}) > 1:
            pairs = zip(chain(*parts), chain(*self.shares), strict=True)
            text = "a mean of micro-batches' means, though their numbers of targets differ"
            yield text, torch.stack([part / share for part, share in pairs]).mean(0)
            text = "a mean of ranks' means, though their numbers of targets differ"
            means = [mine / sum(shares) for mine, shares in zip(by_rank, self.shares, strict=True)]
            yield text, torch.stack(means).mean(0)
        for number in range(numbers if numbers > 1 else 0):
            part = _sum(parts, number)
            yield f"micro-batch {number} is missing", whole - part
            yield f"micro-batch {number} alone, over the number of micro-batches", part
            yield f"micro-batch {number} alone", part * numbers
            yield f"micro-batch {number} counts twice", whole + part
        for number in range(numbers if ranks > 1 else 0):
            own = [part * ranks for part in parts[0]]
            rest = _sum(parts, number)
            yield f"micro-batch {number} is not reduced over the ranks", whole - rest + own[number]
            if numbers > 2:
                text = f"micro-batch {number} alone is reduced over the ranks"
                yield text, rest + torch.stack(own).sum(0) - own[number]

    @cached_property
    def _other_steps(self) -> dict[str, Tensors]:
        """Return the gradients that other weights, samples or targets would have given."""
        steps = {}
        for by in (1, -1):
            moved = [(_targets_moved(batch, by), share) for batch, share in self.flat]
            steps[f"that of targets moved by {by} position"] = self._of(moved)
        stacks = [name for name, weight in self.weights.items() if weight.dim() == 3]
        for by in (1, -1) if stacks else ():
            turned = dict(self.weights) | {name: self.weights[name].roll(by, 0) for name in stacks}
            grads = self._of(self.flat, turned)
            text = f"that of stacks turned by {by}: each matrix in another's place"
            steps[text] = grads | {name: grads[name].roll(-by, 0) for name in stacks}
        if earlier := self.earlier:
            text = "that of the weights before the last update: stale weights"
            steps[text] = self._of(self.flat, earlier.weights)
            steps["that of the last step's samples"] = self._of(earlier.flat)
            # Clipping writes into the gradient.
            left = {name: grad + earlier.coefficient * earlier.whole[name] for name, grad in self.whole.items()}
            steps["the last step's gradient still in it: not set to zero"] = left
            steps["the last step's gradient"] = earlier.whole
        return steps

    def _uses(self, name: str) -> Candidates:
        """Yield gradients of a parameter that several modules use, with one module's part missing or counted twice."""
        for use, grads in self._by_use.get(name, {}).items():
            yield f"the gradient through {use} is missing: the table is tied", self.whole[name] - grads
            yield f"the gradient through {use} counts twice: the table is tied", self.whole[name] + grads

    @cached_property
    def _by_use(self) -> dict[str, Tensors]:
        """Return, for each parameter that several modules use, the gradient of each use alone, by the use's name."""
        uses = defaultdict[nn.Parameter, list[tuple[str, dict[str, nn.Parameter | None], str]]](list)
        for prefix, module in self.reference.exact.named_modules():
            for key, param in module._parameters.items():
                if param is not None and param.requires_grad:
                    uses[param].append((f"{prefix}.{key}".lstrip("."), module._parameters, key))
        shared, apart = [places for places in uses.values() if len(places) > 1], dict(self.weights)
        with ExitStack() as stack:
            for (first, *_), *others in shared:
                for name, held, key in others:
                    apart[name] = self.weights[first]
                    stack.enter_context(mock.patch.dict(held, {key: nn.Parameter(apart[name].double())}))
            grads = self._of(self.flat, apart) if shared else {}
        return {places[0][0]: {name: grads[name] for name, *_ in places} for places in shared}

    def _places(self, name: str, found: Tensor) -> Candidates:
        whole = self.whole[name]
        for other, grad in self.whole.items():
            if grad.shape == whole.shape:
                yield f"that of {other}", grad
        if whole.dim() == 2 and (whole.size(0) > 1 and whole.size(1) > 1):
            yield "transposed", whole.t().reshape(whole.shape)
        if whole.dim() > 1 and whole.size(0) > 1:
            yield "its rows turned by one", whole.roll(1, 0)
        moved = torch.empty_like(whole).view(-1)
        moved[found.flatten().argsort()] = whole.flatten().sort().values
        yield "the right numbers in other places", moved.view(whole.shape)

    def _clips(self, name: str, found: Tensor) -> Candidates:
        value = max_abs(found)
        yield f"clipped by value, to {value:.4g}", self.whole[name].clamp(-value, value)
        if self.clip and len({len(mine) for mine in self.parts}) == 1:
            at = [*self.whole].index(name)
            for text, parts in self._other_clips.items():
                yield text, parts[at].view_as(self.whole[name])

    @cached_property
    def _other_clips(self) -> dict[str, Sequence[Tensor]]:
        """Return all gradients, flattened, as clipping by the right norm at a wrong time leaves them."""
        sizes = [grad.numel() for grad in self.whole.values()]
        flat = [[torch.cat([part[name].flatten() for name in self.whole]) for part in mine] for mine in self.parts]
        own = torch.stack([torch.stack(mine) for mine in flat]) * len(flat)  # (ranks, micro-batches, elements)

        def in_turn(parts: Tensor) -> Tensor:
            total = torch.zeros_like(parts[0])
            for part in parts:
                total = total + part
                total = total * min(1.0, self.clip / (float(total.norm()) + 1e-6))
            return total

        kinds = {
            "clipped in every micro-batch, not once in a step": in_turn(own.mean(0)),
            "clipped in every micro-batch of each rank, then averaged": torch.stack([*map(in_turn, own)]).mean(0),
            "clipped on each rank, then averaged": torch.stack([*map(in_turn, own.sum(1, keepdim=True))]).mean(0),
        }
        return {text: torch.split(grads, sizes) for text, grads in kinds.items()}

    def _rounded(self, want: Tensor, found: Tensor) -> str:
        """Return a kind if every element is a number of a half dtype, and no further off than that dtype rounds."""
        for dtype, text in HALVES.items():
            near = max_abs(found - want) <= 4 * UNIT[dtype] * max_abs(want)
            if near and torch.equal(found, found.to(dtype).double()):
                return f"rounded to {text}, as by what sends it or adds it up"
        return ""

    def _orthogonal(self, name: str, found: Tensor) -> str:
        """Return a kind if each micro-batch's gradient was made orthogonal, as Muon does with its default coefficients.

        A bound would prove nothing: the iteration amplifies a rounding up to 3.4445^5 times. A gradient of few
        directions is almost orthogonal by itself, so the plain gradient must fit worse.
        """
        whole = self.whole[name]
        if whole.dim() != 2:
            return ""
        parts = [_sum(self._of_name(name), number) for number in range(len(self.parts[0]))]
        made = torch.stack([orthogonalised(part, Muon(lr=1.0)) for part in parts]).sum(0)
        left, plain = (float((found - factor_of(found, one) * one).norm()) for one in (made, whole))
        is_near = left < min(0.4 * float(found.norm()), 0.5 * plain)
        return "made orthogonal in each micro-batch, not once in a step" if is_near else ""
