"""Every comparison of a layout with one rank, each within a bound that is derived beside it.

Each step is judged by itself, from the weights and states that the layout itself had before it: what one step gets
wrong is not carried into the next one, and no bound has to grow with the steps. A run whose every step is right is
right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megamix.config import Config
from megamix.mixed_precision.optimizers import MASTER, Optimizer
from megamix.train.build import DTYPES, build_optimizer
from megamix.verify.observe import GRADIENT, Fragment, ObservedStep, Whole, assemble, batches, equal_bits
from megamix.verify.reference import MicroBatches, Reference, Step, exact_update

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}  # the largest rounding, relative
U32 = 2.0**-24
# A layout adds the same products in another order, and each order rounds as one rank does: some give a largest error
# twice that of another one. What is wrong by a factor of two is wrong by hundreds of them.
NOISE = 8.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is further from one rank's than its bound."""

    attempt: int
    check: str
    where: str  # a parameter, or what else was compared
    error: float
    bound: float

    def __str__(self) -> str:
        return (
            f"attempt {self.attempt}: {self.check} of {self.where} is off by {self.error:.3g}, bound {self.bound:.3g}"
        )


@dataclass(slots=True)
class Verdict:
    """What became of one layout."""

    attempts: int = 0
    skipped: int = 0
    worst: dict[str, float] = field(default_factory=dict)  # by check: the largest error, as a share of its bound
    differences: list[Difference] = field(default_factory=list)

    def note(self, attempt: int, check: str, where: str, error: float, bound: float) -> None:
        share = 0.0 if error == 0 else error / bound if bound else math.inf
        if not math.isfinite(error):
            share = math.inf
        self.worst[check] = max(self.worst.get(check, 0.0), share)
        if share > 1:
            self.differences.append(Difference(attempt, check, where, error, bound))

    def equal(self, attempt: int, check: str, where: str, got: Tensor, want: Tensor) -> None:
        """Compare bit for bit, in FP32."""
        gap = 0.0 if equal_bits(got, want) else float((got.double() - want.double()).abs().max())
        self.note(attempt, check, where, gap, 0.0)


def judge(
    config: Config, ranks: Sequence[list[ObservedStep]], device: torch.device, updates: int, overflow_at: int | None
) -> Verdict:
    """Compare a layout's run with one rank's, step by step.

    `config` of the layout; `ranks`: what each rank observed, in rank order; `updates`: how many steps had to be
    applied; `overflow_at`: the attempt in which one rank's gradient was made infinite.
    """
    (start, *attempts), dtype = zip(*ranks, strict=True), DTYPES[config.precision.dtype]
    verdict = Verdict(attempts=len(attempts))
    reference, optimizer = Reference(config, device), build_optimizer(config.optimizer, [config.optimizer.lr])
    before = assemble([rank.owned for rank in start])
    _ownership(verdict, -1, before)
    for name, initial in reference.initial.items():
        verdict.equal(-1, "initial weight", name, before.tensors[MASTER, name], initial.cpu())
    _copies(verdict, -1, [rank.copies for rank in start], before, dtype)
    for number, seen in enumerate(attempts):
        after = assemble([attempt.owned for attempt in seen])
        _ownership(verdict, number, after)
        step = _Judged(config, optimizer, number, before, after, [attempt.scalars for attempt in seen])
        step.scalars(verdict)
        if number == overflow_at:
            verdict.note(number, "overflow flag", "the planted overflow", float(not step.found_inf), 0.0)
        if step.found_inf:
            verdict.skipped += 1
            step.nothing_changed(verdict)
            if number != overflow_at:
                step.overflow(verdict, reference)
        else:
            step.gradients(verdict, reference)
            step.norm(verdict)
            step.update(verdict)
        _copies(verdict, number, [attempt.copies for attempt in seen], after, dtype)
        before = after
    # A step that overflows has nothing to compare: where all of them do, every check above has passed.
    applied = verdict.attempts - verdict.skipped
    missing = float(max(0, updates - applied))
    verdict.note(verdict.attempts, "applied updates", f"the run, {applied} of {updates},", missing, 0.0)
    return verdict


def _ownership(verdict: Verdict, number: int, whole: Whole) -> None:
    for name, problem in whole.problems:
        verdict.note(number, f"copies ({problem})", name, math.inf, 0.0)


def _copies(
    verdict: Verdict, number: int, ranks: Sequence[Sequence[Fragment]], whole: Whole, dtype: torch.dtype
) -> None:
    """Check that every rank's next forward reads the cast of the masters, bit for bit: else a gather is stale."""
    for rank, fragments in enumerate(ranks):
        for part in fragments:
            want = whole.tensors[MASTER, part.spec.name][part.spec.block].to(dtype).float()
            got = torch.from_numpy(part.values).view(part.spec.shape)
            verdict.equal(number, "half copy", f"{part.spec.name} on rank {rank}", got, want)


class _Judged:
    """One attempt."""

    def __init__(
        self, config: Config, optimizer: Optimizer, number: int, before: Whole, after: Whole,
        scalars: Sequence[dict[str, float]],
    ):  # fmt: skip
        self.config, self.optimizer, self.number = config, optimizer, number
        self.before, self.after, self.by_rank, self.of = before, after, scalars, scalars[0]
        self.dtype = DTYPES[config.precision.dtype]
        self.found_inf = bool(self.of["found_inf"])
        dp_size = config.parallelism.dp_size or 1
        self.batches: MicroBatches = [batch for rank in range(dp_size) for batch in batches(config, number, rank)]
        self.divisor = self.of["loss_scale"] * len(self.batches)

    def scalars(self, verdict: Verdict) -> None:
        """Check that every rank has the same numbers, and calls an overflow exactly what is one."""
        for rank, other in enumerate(self.by_rank):
            for name, value in other.items():
                same = value == self.of[name] or (math.isnan(value) and math.isnan(self.of[name]))
                verdict.note(self.number, "agreement", f"{name} on rank {rank}", float(not same), 0.0)
        finite = all(bool(grad.isfinite().all()) for grad in self.after.of(GRADIENT).values())
        verdict.note(self.number, "overflow flag", "all gradients", float(finite == self.found_inf), 0.0)

    def nothing_changed(self, verdict: Verdict) -> None:
        for (state, name), tensor in self.before.tensors.items():
            if state != GRADIENT:
                verdict.equal(self.number, f"{state} after an overflow", name, self.after.tensors[state, name], tensor)

    def overflow(self, verdict: Verdict, reference: Reference) -> None:
        """Check, where a layout overflows, that one rank's gradient at the same scale comes near its dtype's end."""
        native = reference.native_step(self._weights(), self.batches, self.of["loss_scale"])
        largest = max(float(grad.abs().max()) * self.divisor for grad in native.grads.values())
        near = not largest < 0.5 * torch.finfo(self.dtype).max
        verdict.note(self.number, "overflow flag", "one rank, which has none", float(not near), 0.0)

    def _weights(self) -> dict[str, Tensor]:
        return {name: master.to(self.dtype) for name, master in self.before.of(MASTER).items()}

    def gradients(self, verdict: Verdict, reference: Reference) -> None:
        """Compare the gradient with FP64's at the same weights.

        Bound: NOISE times what rounding does on one rank, the largest over the parameter. And for the sums over
        micro-batches and ranks, which one rank does not round, a rounding of the gradient's dtype for each of them,
        of a partial sum that is at most the sum of magnitudes; scaled gradients below FP16's normal numbers round to
        multiples of 2^-24.
        """
        weights = self._weights()
        exact = reference.exact_step(weights, self.batches)
        native = reference.native_step(weights, self.batches, self.of["loss_scale"])
        half_sums = self.config.precision.grad_dtype == "half"
        unit, roundings = UNIT[self.dtype] if half_sums else U32, len(self.batches) + 1
        tiny = 2.0**-25 * roundings / self.divisor if self.dtype == torch.float16 else 0.0
        for name, grad in self.after.of(GRADIENT).items():
            want = exact.grads[name]
            noise = float((native.grads[name] - want).abs().max())
            error = float((grad.double() / self.divisor - want).abs().max())
            bound = NOISE * noise + roundings * unit * exact.magnitudes[name] + tiny
            verdict.note(self.number, "gradient", name, error, bound)
        self._loss(verdict, exact, native)

    def _loss(self, verdict: Verdict, exact: Step, native: Step) -> None:
        """Bound: as for gradients, the micro-batch that rounding has taken furthest, and one rounding of the loss."""
        noise = max(abs(one - other) for one, other in zip(exact.losses, native.losses, strict=True))
        want = sum(exact.losses) / len(exact.losses)
        bound = NOISE * noise + UNIT[self.dtype] * want
        verdict.note(self.number, "loss", "the global batch", abs(self.of["loss"] - want), bound)

    def norm(self, verdict: Verdict) -> None:
        """Check that the reported norm is that of the gathered gradient.

        Bound: the squares of a row of 64 are summed in FP32, 64 roundings at most, all else in FP64; the root halves
        a relative error; and the report is rounded once.
        """
        squares = sum(float(grad.double().square().sum()) for grad in self.after.of(GRADIENT).values())
        self.norm_scaled = math.sqrt(squares)
        want = self.norm_scaled / self.divisor
        verdict.note(self.number, "norm", "all gradients", abs(self.of["grad_norm"] - want), 34 * U32 * want)
        largest = max(float(grad.abs().max()) for grad in self.after.of(GRADIENT).values())
        verdict.note(self.number, "largest", "all gradients", abs(self.of["max_abs"] - largest), 0.0)

    def update(self, verdict: Verdict) -> None:
        """Check masters and states by the optimizer's equation in FP64, of the gathered gradient and of those before.

        Bound: 64 FP32 roundings of the largest number that enters. The norm in the clip coefficient has 34 of them,
        unscaling and the equation fewer than 16; a square has the gradient's twice. A step of the master is at most
        about 4 lr in AdamW, whatever the gradient, and lr times gradient and momentum in NAG. A half state is rounded
        once more, in its dtype. Where an equation jumps, as a sign does, 64 roundings of the gradient may decide.
        """
        clip, norm = self.config.optimizer.clip_grad, self.norm_scaled / self.divisor
        coefficient = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        lr, count = self.of["lr"], int(self.of["applied_updates"])
        for name, scaled in self.after.of(GRADIENT).items():
            grad = scaled.double() * (coefficient / self.divisor)
            dtypes = {MASTER: torch.float32, **dict(self.optimizer.group_of(name, tuple(grad.shape)).states)}
            before = {state: self.before.tensors[state, name] for state in dtypes}
            updated = partial(exact_update, self.optimizer, name, before=before, lr=lr, update=count)
            for state, new in updated(grad).items():
                error = (self.after.tensors[state, name].double() - new).abs()
                bound = 64 * U32 * max(_sizes(state, new, before[state], grad, lr))
                if dtypes[state] != torch.float32:
                    bound += UNIT[dtypes[state]] * float(new.abs().max()) + 2.0**-25  # FP16's subnormals
                if error.max() > bound:
                    for nearly in (1 - 64 * U32, 1 + 64 * U32):
                        error = error - (updated(grad * nearly)[state] - new).abs()
                check, worst = "weight" if state == MASTER else state, max(0.0, float(error.max()))
                verdict.note(self.number, check, name, worst, bound)


def _sizes(state: str, new: Tensor, old: Tensor, grad: Tensor, lr: float) -> Iterator[float]:
    yield from (float(old.abs().max()), float(new.abs().max()))
    largest = float(grad.abs().max())
    if state == MASTER:
        yield lr * max(8.0, largest)
    else:
        yield 2 * max(largest, largest**2) if state == "exp_avg_sq" else largest
