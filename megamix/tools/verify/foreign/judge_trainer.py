"""Every comparison of somebody's own training with one process in FP64, each step from the trainer's own weights.

Updates are compared in `plain_optimizer.py`, by the bound in `core/update_kinds.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megamix.tools.verify.core.bisect import RankTape, culprit
from megamix.tools.verify.core.hypotheses import HALVES, RightStep, factor_of
from megamix.tools.verify.core.norm_kinds import explain_clipping, explain_norm
from megamix.tools.verify.core.reference import Reference, Step, finite, moved
from megamix.tools.verify.core.update_kinds import Halves
from megamix.tools.verify.core.verdict import NOISE, NOISIEST, U32, UNIT, Bounds, Tensors, Verdict, max_abs, norm_of
from megamix.tools.verify.foreign.judge_buffers import check_buffers, check_first_buffers, explain_values
from megamix.tools.verify.foreign.plain_optimizer import PlainUpdates
from megamix.tools.verify.foreign.trainer import ForeignTrainer, alike, autocast_entered
from megamix.tools.verify.foreign.watch import SeenStep


def judge_trainer(trainer: ForeignTrainer, ranks: Sequence[list[SeenStep]]) -> Verdict:
    """Compare a training with one process, step by step. `ranks`: steps of each rank, in rank order."""
    autocast = {dtype for mine in ranks for seen in mine for dtype in seen.autocast}
    verdict = Verdict(attempts=len(ranks[0]) - 1)
    judge = _Judge(trainer, verdict, autocast)
    start, *steps = zip(*([judge.plain.comparable(verdict, one) for one in mine] for mine in ranks), strict=True)
    before = judge.started(start)
    if judge.known != judge.initial.keys():  # no step of the plain model can be taken with these weights
        return verdict
    for number, seen in enumerate(steps):
        verdict.attempt = number
        before = judge.step(before, seen)
        if verdict.differences and not verdict.culprit and before.tape and judge.earlier:
            verdict.culprit = culprit(judge.earlier, [RankTape(rank, one.tape) for rank, one in enumerate(seen)])
    verdict.expect("applied updates", "the run", verdict.attempts > verdict.skipped, "none")
    return verdict


class _Judge:
    def __init__(self, trainer: ForeignTrainer, verdict: Verdict, autocast: set[torch.dtype]):
        self.trainer, self.ranks, self.verdict = trainer, trainer.ranks, verdict
        native = trainer.model()
        exact = copy.deepcopy(native).double()
        self.initial = {name: param.detach().clone() for name, param in native.named_parameters()}
        self.first_buffers = {name: buffer.clone() for name, buffer in native.named_buffers()}
        self.frozen = {name for name, param in native.named_parameters() if not param.requires_grad}

        def exact_loss(model: nn.Module, batch: Any) -> Tensor:
            return trainer.loss(model, moved(batch, torch.float64))

        with autocast_entered() as own, Halves() as halves:  # type: ignore[no-untyped-call]  # its base class is untyped
            trainer.loss(native, moved(next(iter(trainer.batches(0, 0, self.ranks)))))
        # An autocast that `loss` does not enter by itself is around it: in `step`, or in the module's wrapper.
        around = max(autocast - own, key=UNIT.__getitem__, default=None)

        def native_loss(model: nn.Module, batch: Any) -> Tensor:
            with torch.autocast("cpu", around, enabled=around is not None):
                return trainer.loss(model, batch)

        self.reference = Reference(native, exact, native_loss, exact_loss)
        self.unit = max([U32, halves.unit, *map(UNIT.__getitem__, autocast)])
        self.plain = PlainUpdates(trainer, exact, verdict.attempts)
        self.known = set[str]()  # parameters of the plain model that the training has
        self.earlier: RightStep | None = None

    def started(self, seen: Sequence[SeenStep]) -> SeenStep:
        first = seen[0]
        self._names(first.weights)
        for name in filter(self.known.__contains__, self.initial):
            kept = first.weights[name].dtype
            if name not in self.frozen and kept != self.trainer.master_dtype:
                what = f"no FP32 master: the optimizer keeps it in {HALVES.get(kept, kept)}"
                self.verdict.expect("dtype", name, False, what)
            got, want = first.weights[name].double(), self.initial[name].to(kept).double()
            self.verdict.equal("initial weight", name, got, want, partial(explain_values, got, want, self.initial))
        self._copies(seen)
        check_first_buffers(self.verdict, self.first_buffers, seen)
        return first

    def _names(self, weights: Tensors) -> None:
        """Check that the training has the plain model's parameters, and set `known` to those that it has."""
        for name in {**weights, **self.initial}:
            mine, plain = weights.get(name), self.initial.get(name)
            text = "a parameter that only the plain model has"
            if plain is None:
                text = "a parameter that only your training has"
            elif mine is not None and mine.shape == plain.shape:
                self.known.add(name)
                continue
            elif mine is not None:
                text = f"of shape {(*mine.shape,)}, in the plain model of {(*plain.shape,)}"
            elif near := next((other for other in weights if other.endswith(f".{name}")), ""):
                text += f"; yours has {near}: return plain names from weights, gradients, groups and states"
            self.verdict.expect("name", name, False, text)

    def _copies(self, seen: Sequence[SeenStep]) -> None:
        """Check that ranks hold the same weights and states, and took the same number of updates."""
        first = seen[0]
        for rank, other in enumerate(seen[1:], 1):
            text = f"rank {rank} took {other.counted} updates in this step, rank 0 {first.counted}"
            self.verdict.expect("copies", "the optimizer", other.updates == first.updates, text)
            mine, theirs = first.kept, other.kept
            for kind, name in filter(theirs.__contains__, mine):
                got, want = theirs[kind, name], mine[kind, name]
                self.verdict.equal(f"copies ({kind})", f"{name} on rank {rank}", got, want, _DRIFT)

    def step(self, before: SeenStep, seen: Sequence[SeenStep]) -> SeenStep:
        verdict = self.verdict
        after = replace(seen[0], states={key: state for one in reversed(seen) for key, state in one.states.items()})
        by_rank = [[*self.trainer.batches(verdict.attempt, rank, self.ranks)] for rank in range(self.ranks)]
        self._samples(by_rank)
        counted = [[(batch, self.trainer.targets(batch)) for batch in mine] for mine in by_rank]
        total = sum(count for mine in counted for _, count in mine)
        weights = {
            name: weight.to(after.dtypes.get(name, [weight.dtype])[0]) for name, weight in before.weights.items()
        } | {name: one for name, one in before.buffers.items() if one.shape == self.first_buffers.get(name, one).shape}
        right = RightStep(
            self.reference, weights, [[(batch, count / total) for batch, count in mine] for mine in counted],
            loss_scale=after.loss_scale, clip=self.trainer.clip_grad, groups=self.plain.groups,
            earlier=self.earlier, ranks=self.ranks,
        )  # fmt: skip
        exact = right.exact
        # the factor by which a rank multiplies its largest loss
        scale = after.loss_scale * self.ranks * max(share for _, share in right.flat)
        native = right.native(scale)
        if after.loss_scale != 1.0:
            verdict.needs("skipping: no step overflowed; begin at a larger loss scale", not any(after.updates))
        if not any(after.updates):
            verdict.skipped += 1
            self._skipped(before, after, native)
        else:
            text = f"{after.counted} updates in one step, which has {len(by_rank[0])} micro-batches"
            verdict.expect("updates", "the optimizer", {*after.updates} == {1}, text)
            if not finite(native.grads):
                # Ranks round in another order, and may stay just below FP16's end where one process does not.
                native, used = right.finite(scale)
                text = "a step that had to be skipped was applied, or has another loss scale than it tells"
                verdict.expect("overflow", "one process", used >= scale / 2, text)
            unit = max(self.unit, *(UNIT.get(weights[name].dtype, U32) for name in self.initial))
            verdict.note_noise(native.grads, exact.grads, NOISIEST[unit])
            norm = norm_of(exact.grads)
            # Noise over all elements at once: the noise of one number, such as the norm, may be zero by chance.
            noise = norm_of({name: native.grads[name] - grad for name, grad in exact.grads.items()}) / max(norm, 1e-300)
            off, bound, kind = self._loss(seen, right, native, noise)
            is_right = bound > 0 and not off > bound  # without a report the bound is 0
            hint = (lambda: "a wrong backward or reduction: the loss is right") if is_right else kind
            slack = 2 * noise + 64 * U32  # relative: norms differ by no more than the norm of the difference
            clip = self.trainer.clip_grad
            right = replace(right, coefficient=verdict.coefficient(clip, norm))
            unseen = self._gradients(right, after, native, noise, slack, hint)
            verdict.note("loss", "the global batch", off, bound, kind)
            if "grad_norm" in after.told:
                told, roundings = after.told["grad_norm"], math.sqrt(sum(map(torch.numel, exact.grads.values())))
                bound = max(slack, 64 * U32 * roundings) * norm
                explain = partial(explain_norm, right, told, right.whole)
                verdict.note("norm", "all gradients", abs(told - norm), bound, explain)
            self.plain.check(verdict, right, before, after, unseen)
        check_buffers(verdict, right, before, after)
        self._copies(seen)
        for name in self.frozen:
            verdict.equal("frozen weight", name, after.weights[name], before.weights[name])
        self.earlier = replace(right, earlier=None)
        return after

    def _samples(self, by_rank: Sequence[Sequence[Any]]) -> None:
        every = [(f"micro-batch {at} of rank {rank}", moved(batch))
                 for rank, mine in enumerate(by_rank) for at, batch in enumerate(mine)]  # fmt: skip
        for (other, theirs), (where, batch) in combinations(every, 2):
            twice = all(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)) and alike(batch, theirs)
            self.verdict.expect("samples", where, not twice, f"those of {other}")

    def _loss(
        self, seen: Sequence[SeenStep], right: RightStep, native: Step, noise: float
    ) -> tuple[float, float, Callable[[], str]]:
        """Return the loss's error, its bound, and its kind of mistake.

        The loss is that of all ranks if they report the same, else each rank's own part of it. Without a report the
        numbers are zeros.
        """
        exact, told = right.exact, [one.told["loss"] for one in seen if "loss" in one.told]
        rounded = max(abs(one - other) for one, other in zip(exact.losses, native.losses, strict=True))
        bound = NOISE * rounded + (noise + 64 * U32) * abs(exact.loss)
        apart = right.rank_apart([one.losses for one in seen], exact.losses, bound)
        if len(told) != len(seen):
            return 0.0, 0.0, lambda: apart
        loss = sum(one * sum(mine) for one, mine in zip(told, right.shares, strict=True))
        return abs(loss - exact.loss), bound, lambda: apart or right.explain_loss(told, exact.losses, bound)

    def _skipped(self, before: SeenStep, after: SeenStep, native: Step) -> None:
        """Check that nothing changed, and that there was an overflow."""
        verdict = self.verdict
        text = "the optimizer took no step"
        if after.loss_scale == 1.0:
            text += "; if a GradScaler skipped it, set self.scaler to it in setup"
        if verdict.attempt and not any(before.updates):
            text += "; or the step before it was skipped, too, and its gradients, not set to zero, keep the overflow"
        verdict.expect("skipped step", "one process, which has no overflow", not finite(native.grads), text)
        made = "made by a step that is none, and never filled: the next update adds what its memory held before"
        was = before.kept
        for (kind, name), kept in after.kept.items():
            want, text = (was[kind, name], "") if (kind, name) in was else (torch.zeros_like(kept), made)
            verdict.equal(f"{kind} after a skipped step", name, kept, want, text)

    def _gradients(
        self, right: RightStep, after: SeenStep, native: Step, noise: float, slack: float, hint: Callable[[], str]
    ) -> dict[str, float]:
        """Check the gradients that the update used. Return how far they may be from FP64's, if the trainer shows none.

        `noise`: relative error of the native precision over all gradients. `slack`: relative error of the norm by which
        they are clipped.
        """
        whole, coefficient, clip = right.whole, right.coefficient, self.trainer.clip_grad
        roundings, scaled = sum(map(len, right.by_rank)) + 1, after.loss_scale / max(share for _, share in right.flat)
        bounds = {}
        for name, want in whole.items():
            _, sums = after.dtypes.get(name, (torch.float32, torch.float32))
            rounded = max(max_abs(native.grads[name] - want), noise * max_abs(want))
            in_fp16 = right.loss_scale != 1 or right.weights[name].dtype == torch.float16
            limits = Bounds(roundings, UNIT[sums], scaled if in_fp16 else math.inf)
            bound = limits.of_gradient(rounded, right.exact.magnitudes[name]) * coefficient
            bounds[name] = bound + slack * coefficient * max_abs(want) * bool(clip)
        if not after.gradients and type(self.trainer).gradients is not ForeignTrainer.gradients:
            after.gradients |= {name: grad * coefficient for name, grad in whole.items()}
            return bounds
        found = {name: after.gradients.get(name, torch.zeros_like(want)).double() for name, want in whole.items()}
        # One wrong gradient changes the norm by which all are clipped, so it is named before the others.
        factors = {name: factor_of(found[name], want) for name, want in whole.items() if bool(want.any())}
        common = median(factors.values()) if clip and factors else coefficient
        apart = {name: max_abs(found[name] - common * want) > bounds[name] for name, want in whole.items()}
        if not 0 < common < 1.001 or all(apart.values()):
            common, apart = coefficient, dict.fromkeys(apart, True)
        for name in sorted(apart, key=apart.__getitem__, reverse=True):
            off = max_abs(found[name] - coefficient * whole[name])
            step = replace(right, coefficient=common) if apart[name] else right

            def explain(name: str = name, step: RightStep = step) -> str:
                kind = explain_clipping(step, name, found[name], bounds[name])
                return kind or step.explain(name, found, bounds[name]) or hint()

            self.verdict.note("gradient", name, off, bounds[name], explain)
        return {}


_DRIFT = "a rank that draws, reduces or updates by itself"
