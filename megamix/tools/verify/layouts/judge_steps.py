"""Judge of a layout: every comparison of our engine's steps with one rank, each within a bound derived beside it.

Each step is judged by itself, from the weights and states that the layout itself had before it. So an error of one step
is not carried into the next one, and no bound has to grow with the steps. A run whose every step is right is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamix.config import Config, ranks_along, reading_ranks
from megamix.mixed_precision.observer import DIRECTION, GRADIENT, SOURCE
from megamix.mixed_precision.optim.muon import Muon
from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.mixed_precision.update_slice import AVERAGE, MASTER, Table, UpdateGroup, UpdateScalars, number_at, table_of
from megamix.tools.verify.core.bisect import RankTape, culprit
from megamix.tools.verify.core.hypotheses import RightStep, factor_of, lost
from megamix.tools.verify.core.norm_kinds import explain_norm
from megamix.tools.verify.core.observed_step import ObservedStep, Whole, assemble, assemble_choices
from megamix.tools.verify.core.reference import Reference, Step, finite
from megamix.tools.verify.core.update_kinds import RightUpdate, Rule
from megamix.tools.verify.core.verdict import NOISE, NOISIEST, U8, U32, UNIT, Bounds, Tensors, Verdict, max_abs, norm_of
from megamix.tools.verify.layouts.judge_matrices import judge_matrices
from megamix.tools.verify.layouts.judge_routing import judge_choices, judge_scores, judge_tallies, tallies
from megamix.tools.verify.layouts.observe import batches, set_biases
from megamix.train.objects import DTYPES, build_optimizer, lr_table

# How much further from FP64 the gradient of a loss may be than that of logits; right families come to 1.4 times.
LOSS_PATH = 4.0
# Roundings of a token's loss in FP32, relative to it. Three: of the target's logit less the row's largest, of the
# logarithm, and of their difference. The sum of exponentials, of V / 8 additions in each of 8 lanes and 8 more over the
# lanes, is off by as many units, which its logarithm shows as an absolute error. The mean over tokens: torch adds in a
# cascade of 4 levels of 16 (ATen/native/cpu/SumKernel.cpp), 64 additions, and 8 over lanes and micro-batches.
LOSS_ROUNDINGS = 3 + 64 + 8


def judge(
    config: Config, ranks: Sequence[list[ObservedStep]], device: torch.device, updates: int, overflow_at: int | None
) -> Verdict:
    """Compare a layout's run with one rank's, step by step.

    `config`: the layout's. `ranks`: steps that each rank observed, in rank order. `updates`: number of steps that had
    to be applied. `overflow_at`: the attempt in which one rank's gradient was made infinite.
    """
    reference = Reference.of_config(config, device)
    set_biases(config, reference.native)
    (start, *attempts), dtype = zip(*ranks, strict=True), DTYPES[config.precision.dtype]
    verdict = Verdict(attempts=len(attempts))
    optimizer = build_optimizer(config)
    before, earlier = _whole(verdict, start), None
    for name, weight in reference.native.named_parameters():
        verdict.equal("initial weight", name, before.tensors[MASTER, name], weight.detach().cpu())
    buffers = {name: buffer.to("cpu", copy=True) for name, buffer in reference.native.named_buffers()}
    _held(verdict, start, before, dtype, buffers)
    biases = {name: buffers.pop(name) for name in tallies(reference.native)}
    for number, seen in enumerate(attempts):
        verdict.attempt = number
        step = _Judged(config, reference, optimizer, verdict, seen, before, earlier, biases)
        step.scalars()
        if verdict.attempt == overflow_at:
            verdict.expect("overflow flag", "the planted overflow", step.found_inf)
        if step.found_inf:
            verdict.skipped += 1
            step.nothing_changed()
            if verdict.attempt != overflow_at:
                step.overflow()
        else:
            judge_scores(verdict, step.right, seen)
            step.gradients()
            step.norm()
            step.update()
            step.average()
        _held(verdict, seen, step.after, dtype, buffers)
        biases = judge_tallies(verdict, reference.native, biases, seen, step.choices, step.found_inf)
        if verdict.differences and not verdict.culprit and seen[0].tape:
            tapes = [RankTape(one.dp_rank, one.tape, one.span) for one in seen]
            verdict.culprit = culprit(step.right, tapes)
        before, earlier = step.after, replace(step.right, earlier=None)
    # A step that overflows has nothing to compare: if all of them do, every check above has passed.
    applied = verdict.attempts - verdict.skipped
    verdict.expect("applied updates", "the run", applied >= updates, f"{applied} of {updates}")
    return verdict


def _whole(verdict: Verdict, ranks: Sequence[ObservedStep]) -> Whole:
    """Return the full tensors that ranks own parts of, of which every element must be there, and its copies equal."""
    whole = assemble([rank.owned for rank in ranks])
    for name, problem in whole.problems:
        verdict.expect(f"copies ({problem})", name, False)
    return whole


def _held(verdict: Verdict, ranks: Sequence[ObservedStep], whole: Whole, dtype: torch.dtype, buffers: Tensors) -> None:
    """Check, bit for bit, that every rank's next forward reads the cast of the masters, else a gather is stale, and
    that its buffers equal one rank's. A job saves no buffers, so no step may move them.
    """
    for rank, seen in enumerate(ranks):
        for part in seen.copies:
            want = whole.tensors[MASTER, part.spec.name][part.spec.block].to(dtype).float()
            got = part.values.view(part.spec.shape)
            verdict.equal("half copy", f"{part.spec.name} on rank {rank}", got, want)
        for name in filter(buffers.__contains__, seen.buffers):
            got, want = seen.buffers[name], buffers[name]
            explain = partial(lost, got.double(), want.double())
            verdict.equal("buffer", f"{name} on rank {rank}", got, want, explain)


class _Matrix(NamedTuple):
    """Gradients of a parameter, or of one matrix of a stack, FP64."""

    name: str
    of: str  # the parameter
    grad: Tensor
    want: Tensor  # FP64's at the same weights
    near: Tensor  # one rank's in the precision of the layout
    magnitudes: Tensor  # the sums of the micro-batches' magnitudes

    @property
    def noise(self) -> float:
        return max_abs(self.near - self.want)


class _Judged:
    """One attempt and all its comparisons."""

    def __init__(
        self, config: Config, reference: Reference, optimizer: Optimizer, verdict: Verdict,
        ranks: Sequence[ObservedStep], before: Whole, earlier: RightStep | None, biases: Tensors,
    ):  # fmt: skip
        self.config, self.optimizer, self.verdict = config, optimizer, verdict
        self.before, self.after = before, _whole(verdict, ranks)
        self.by_rank = [one.scalars for one in ranks]
        self.of = self.by_rank[0]
        self.dtype = DTYPES[config.precision.dtype]
        self.found_inf = bool(self.of["found_inf"])
        by_rank = [[*batches(config, verdict.attempt, rank)] for rank in range(reading_ranks(config.parallelism))]
        # If no target counts, the engine divides by 1, too.
        weight = sum(batch.weight for mine in by_rank for batch in mine) or 1.0
        self.divisor = self.of["loss_scale"] * weight
        # In the order of backward: a wrong gradient makes those behind it wrong.
        names, grads = reversed([*dict(reference.native.named_parameters())]), self.after.of(GRADIENT)
        self.grads = {name: grads[name].double() / self.divisor for name in names if name in grads}
        number = int(self.of["applied_updates"]) + self.found_inf
        factors = {name: optimizer.group_of(name, tuple(grad.shape)).lr_factor for name, grad in self.grads.items()}
        # those of groups that the update does not freeze
        self.counted = {name: grad for name, grad in self.grads.items() if number_at(factors[name], number)}
        self.choices = assemble_choices(ranks, by_rank)
        chosen = zip(chain(*by_rank), chain(*self.choices), strict=True)
        tp_size = ranks_along(config.parallelism, "tp")
        divided = {part.spec.name for one in ranks for part in one.owned if part.spec.shape != part.spec.full_shape}
        self.right = RightStep(
            replace(reference, choices={id(batch.tokens): of for batch, of in chosen}),
            {name: master.to(self.dtype) for name, master in before.of(MASTER).items()} | biases,
            [[(batch, 1 / weight) for batch in mine] for mine in by_rank],
            loss_scale=self.of["loss_scale"],
            earlier=earlier,
            ranks=len(ranks),
            owners={name: self.after.owners[GRADIENT, name] for name in self.grads},
            tp_size=tp_size,
            replicated=self.grads.keys() - divided if tp_size > 1 else (),
        )

    @cached_property
    def native(self) -> Step:
        """Return the step of one rank in the precision of the layout."""
        return self.right.native(self.of["loss_scale"])

    def scalars(self) -> None:
        """Check that every rank has the same numbers, and that the overflow flag is set exactly by an overflow."""
        for rank, other in enumerate(self.by_rank):
            for name, value in other.items():
                same = value == self.of[name] or (math.isnan(value) and math.isnan(self.of[name]))
                self.verdict.expect("agreement", f"{name} on rank {rank}", same)
        self.verdict.expect("overflow flag", "all gradients", finite(self.counted) != self.found_inf)

    def nothing_changed(self) -> None:
        for (state, name), tensor in self.before.tensors.items():
            if state not in (GRADIENT, SOURCE, DIRECTION):
                got, text = self.after.tensors[state, name], "moved by a step that is none"
                self.verdict.equal(f"{state} after an overflow", name, got, tensor, text)

    def overflow(self) -> None:
        """Check, if a layout overflows, that one rank's gradient at the same scale comes near its dtype's end."""
        largest = max(map(max_abs, self.native.grads.values())) * self.divisor
        near = not largest < 0.5 * torch.finfo(self.dtype).max
        self.verdict.expect("overflow flag", "one rank, which has none", near)

    def gradients(self) -> None:
        """Compare the gradient with FP64's at the same weights."""
        verdict, roundings = self.verdict, sum(map(len, self.right.by_rank)) + 1
        exact, native = self.right.exact, self.native
        judge_choices(verdict, self.right.reference.native, self.choices, exact, native)
        noisiest = NOISIEST[UNIT[self.dtype] if self.config.precision.fp8 is None else U8]
        verdict.note_noise(native.grads, exact.grads, noisiest)
        self._loss_path()
        unit = UNIT[self.dtype] if self.config.precision.grad_dtype == "half" else U32
        rounded = Bounds(roundings, unit, self.divisor if self.dtype == torch.float16 else math.inf)
        known = len(verdict.differences)
        matrices = [*self._matrices()]
        bounds = {one.name: rounded.of_gradient(one.noise, one.magnitudes) for one in matrices}
        for one in matrices:
            loosest = max(bounds[other.name] for other in matrices if other.of == one.of)
            explain = partial(self.right.explain, one.of, self.grads, loosest)
            verdict.note("gradient", one.name, max_abs(one.grad - one.want), bounds[one.name], explain)
        # A gradient that is mostly noise has no factor, such as that of a bias which the softmax takes out again.
        judged = [one for one in matrices if (one.near - one.want).norm() < noisiest * one.want.norm()]
        # One rank's factor may be right by chance, so each is held against the noise of all.
        noise = max((abs(factor_of(one.near, one.want) - 1) for one in judged), default=0.0)
        for one in judged if len(verdict.differences) == known else ():
            bound, factor = rounded.of_factor(noise, one.want, one.magnitudes), factor_of(one.grad, one.want)
            text = f"{factor:.6g} times the right one, as a whole"
            verdict.note("factor of the gradient", one.name, abs(factor - 1), bound, text)
        self._loss()

    def _matrices(self) -> Iterator[_Matrix]:
        """Yield the gradients. The matrices of a stack come one by one: an expert's may be a twentieth of another's,
        whose rounding is no measure of its own.
        """
        exact, native = self.right.exact, self.native.grads
        for name, grad in self.grads.items():
            tensors, is_stack = (grad, exact.grads[name], native[name], exact.magnitudes[name]), grad.dim() > 2
            for number, matrix in enumerate(zip(*tensors, strict=True) if is_stack else [tensors]):
                yield _Matrix(f"{name}[{number}]" if is_stack else name, name, *matrix)

    def _loss_path(self) -> None:
        """Check that the model's loss, given targets, is no further from FP64 than its logits are.

        FP64 computes its loss from logits. Without this check, a wrong loss would pass for noise.
        """
        reference, exact = self.right.reference, self.right.whole
        by_logits = replace(self.right, reference=replace(reference, native_loss=reference.exact_loss))
        logits, _ = by_logits.finite(self.of["loss_scale"])
        off, near = ({name: step.grads[name] - want for name, want in exact.items()} for step in (self.native, logits))
        relative = norm_of(near) / max(norm_of(exact), 1e-300)
        for name, want in exact.items():
            bound = LOSS_PATH * (float(near[name].norm()) + relative * float(want.norm()))
            text = "a model whose loss, given targets, is not the cross entropy of the logits that it gives without"
            self.verdict.note("loss path", name, float(off[name].norm()), bound, text)

    def _loss(self) -> None:
        """Check the loss of the global batch.

        Bound: as for gradients, the micro-batch that rounding has taken furthest, and one rounding of the loss. One
        rank's own error is a sum that may cancel, so the roundings in FP32 from logits to the mean are added
        (`LOSS_ROUNDINGS`).
        """
        exact, told = self.right.exact, self.of["loss"]
        noise = max(abs(one - other) for one, other in zip(exact.losses, self.native.losses, strict=True))
        fp32 = U32 * (LOSS_ROUNDINGS * exact.loss + self.config.model.vocab_size / 8 + 8)
        bound = NOISE * noise + UNIT[self.dtype] * exact.loss + fp32
        explain = partial(self.right.explain_loss, [told] * len(self.right.by_rank), exact.losses, bound)
        self.verdict.note("loss", "the global batch", abs(told - exact.loss), bound, explain)

    def norm(self) -> None:
        """Check that the reported norm is that of the gathered gradient.

        Bound: the squares of a row of 64 are summed in FP32, 64 roundings at most, all else in FP64; the root halves a
        relative error; and the report is rounded once.
        """
        want, told = norm_of(self.counted), self.of["grad_norm"]
        explain = partial(explain_norm, self.right, told, self.counted, slack=2 * U32)
        self.verdict.note("norm", "all gradients", abs(told - want), 34 * U32 * want, explain)
        largest = max(max_abs(self.after.tensors[GRADIENT, name]) for name in self.counted)
        self.verdict.note("largest", "all gradients", abs(self.of["max_abs"] - largest), 0.0)

    def average(self) -> None:
        """Check the average of the weights by its equation, from its values before and the masters after the step.

        Bound: roundings in FP32 of the distance to the masters, of its share and of the sum.
        """
        if self.config.training.average is None:
            return
        share = 1 - table_of(self.config.training.average.decay)[0]
        for name, after in self.after.of(AVERAGE).items():
            before, master = self.before.tensors[AVERAGE, name].double(), self.after.tensors[MASTER, name]
            want = torch.lerp(before, master.double(), share)
            bound = U32 * float((2 * share * (master - before).abs() + want.abs()).max())
            self.verdict.note(AVERAGE, name, max_abs(after - want), bound)

    def update(self) -> None:
        """Check masters and states by the optimizer's equation, from the gathered gradient and the values before."""
        clip = self.config.optimizer.clip_grad
        coefficient = self.verdict.coefficient(clip, norm_of(self.counted))
        count = int(self.of["applied_updates"])
        lr = number_at(tuple(lr_table(self.config.lr_schedule, self.config.optimizer, self.config.pace)), count)
        told = f"{self.of['lr']:.4g}, where the schedule has {lr:.4g} for update {count}"
        self.verdict.note("lr", "the update", abs(self.of["lr"] - lr), U32 * lr, told)
        for name, unclipped in self.grads.items():
            grad = unclipped * coefficient
            group = self.optimizer.group_of(name, tuple(grad.shape))
            dtypes = {MASTER: torch.float32, **dict(group.states)}
            kept = {state for state, of in self.after.tensors if of == name} - {GRADIENT, SOURCE, DIRECTION}
            needed = dtypes.keys() | self.optimizer.state_lengths(name, tuple(grad.shape)).keys()
            needed |= {AVERAGE} if self.config.training.average else set()
            if kept != needed:
                told = f"ranks keep {', '.join(sorted(kept))}; the job has {', '.join(sorted(needed))}"
                self.verdict.expect("states", name, False, told)
                continue
            before = {state: self.before.tensors[state, name] for state in dtypes}
            if name not in self.counted:
                for state in dtypes:
                    got, text = self.after.tensors[state, name], "moved, though its group is frozen"
                    self.verdict.equal("weight" if state == MASTER else state, name, got, before[state], text)
                continue
            rule: Rule = partial(exact_update, self.optimizer, group, count)
            if isinstance(self.optimizer, Muon) and self.optimizer.matrices(name, tuple(grad.shape)):
                want = rule(grad, before, lr=lr, weight_decay=0.0, update=count)[MASTER]
                device = next(self.right.reference.native.parameters()).device
                at = self.optimizer, name, want, self.before, self.after, device
                rule = partial(matrix_rule, rule, judge_matrices(self.verdict, *at))
            after = {state: self.after.tensors[state, name] for state in dtypes}
            right = RightUpdate(
                rule=rule, name=name, grad=grad, before=before, lr=lr * number_at(group.lr_factor, count), update=count,
                weight_decay=number_at(group.weight_decay, count), attempts=self.verdict.attempt + 1,
                coefficient=coefficient, loss_scale=self.of["loss_scale"],
            )  # fmt: skip
            right.note(self.verdict, after, dtypes)


def exact_update(
    optimizer: Optimizer, group: UpdateGroup, at_update: int, grad: Tensor, before: Tensors, **at: Any
) -> Tensors:
    """Return master and states after the optimizer's equation in FP64, by the names in `before`.

    `group`: its settings are taken as they are at `at_update`.
    Shapes: grad FP64 and each of `before` like the parameter.
    """
    update: int = at["update"]

    def product(table: Table) -> Tensor:
        # the last number holds for all updates past the table
        return _wide(math.prod(table[:update]) * table[-1] ** max(0, update - len(table)))

    values = group.values(lambda table: _wide(number_at(table, at_update)), product)
    coefficients = tuple(one.double() for one in optimizer.coefficients(_wide(update), values))
    scalars = UpdateScalars(_wide(at["lr"]), _wide(at["weight_decay"]), coefficients)
    states = {state: tensor.double() for state, tensor in before.items()}
    new_master, new_states = optimizer.equation(grad, states.pop(MASTER), states, scalars)
    return {MASTER: new_master, **new_states}


def _wide(number: float) -> Tensor:
    return torch.tensor(float(number), dtype=torch.float64)


def matrix_rule(rule: Rule, direction: Tensor, grad: Tensor, before: Tensors, **at: Any) -> Tensors:
    """Return `exact_update` for matrices: states by the gradient, the master by the direction that the ranks found."""
    return rule(grad, before, **at) | rule(direction, {MASTER: before[MASTER]}, **at)
