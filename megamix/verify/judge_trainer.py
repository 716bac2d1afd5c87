"""Every comparison of somebody's own training with one process in FP64, each step from the trainer's own weights."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megamix.mixed_precision.optimizers import MASTER
from megamix.verify.bisect import culprit
from megamix.verify.hypotheses import HALVES, AskedStep, AskedUpdate
from megamix.verify.reference import Reference, Step, moved
from megamix.verify.trainer import ForeignTrainer
from megamix.verify.verdict import NOISE, U32, UNIT, Tensors, Verdict, gradient_bound, note_update
from megamix.verify.watch import OPTIONS, SeenStep


def judge_trainer(trainer: ForeignTrainer, ranks: Sequence[list[SeenStep]]) -> Verdict:
    """Compare a training with one process, step by step. `ranks`: what each rank saw, in rank order."""
    start, *steps = zip(*ranks, strict=True)
    verdict, judge = Verdict(attempts=len(steps)), _Judge(trainer, len(steps))
    before = judge.started(verdict, start)
    for number, seen in enumerate(steps):
        before = judge.step(verdict, number, before, seen)
        if verdict.differences and not verdict.culprit and before.tape and judge.earlier:
            verdict.culprit = culprit(judge.earlier, [(rank, one.tape) for rank, one in enumerate(seen)])
    verdict.note(len(steps), "applied updates", "the run", float(judge.updates == 0), 0.0)
    return verdict


class _Judge:
    def __init__(self, trainer: ForeignTrainer, updates: int):
        self.trainer, self.ranks = trainer, trainer.ranks
        native = trainer.model()
        exact = copy.deepcopy(native).double()
        self.initial = {name: param.detach().clone() for name, param in native.named_parameters()}
        self.frozen = {name for name, param in native.named_parameters() if not param.requires_grad}

        def exact_loss(model: nn.Module, batch: Any) -> Tensor:
            return trainer.loss(model, moved(batch, torch.float64))

        self.reference = Reference(native, exact, trainer.loss, exact_loss)
        self.plain = trainer.optimizer(exact)
        self.lrs = _lr_table(trainer, exact, updates)
        names = {param: name for name, param in exact.named_parameters()}
        self.groups = {
            names[param]: number for number, group in enumerate(self.plain.param_groups) for param in group["params"]
        }
        self.updates = 0
        self.earlier: AskedStep | None = None

    def started(self, verdict: Verdict, seen: Sequence[SeenStep]) -> SeenStep:
        first = seen[0]
        for name in self.initial.keys() ^ first.weights.keys():
            verdict.note(-1, "name", name, math.inf, 0.0, "a parameter that only one of the models has")
        for name in self.initial.keys() & first.weights.keys():
            kept = first.weights[name].dtype
            if name not in self.frozen and kept != self.trainer.truth:
                what = f"no FP32 master: the optimizer keeps it in {HALVES.get(kept, kept)}"
                verdict.note(-1, "dtype", name, math.inf, 0.0, what)
            verdict.equal(-1, "initial weight", name, first.weights[name], self.initial[name].to(kept))
        self._copies(verdict, -1, seen)
        return first

    def _copies(self, verdict: Verdict, number: int, seen: Sequence[SeenStep]) -> None:
        """Check that ranks hold the same weights and states, and took the same number of updates."""
        first = seen[0]
        for rank, other in enumerate(seen[1:], 1):
            text = f"rank {rank} took {other.updates} updates in this step, rank 0 {first.updates}"
            apart = float(other.updates != first.updates)
            verdict.note(number, "copies", "the optimizer", apart, 0.0, text)
            mine = {("weight", name): weight for name, weight in first.weights.items()} | first.states
            theirs = {("weight", name): weight for name, weight in other.weights.items()} | other.states
            for key in mine.keys() & theirs.keys():
                where = f"{key[1]} on rank {rank}"
                verdict.equal(number, f"copies ({key[0]})", where, theirs[key], mine[key], _DRIFT)

    def step(self, verdict: Verdict, number: int, before: SeenStep, seen: Sequence[SeenStep]) -> SeenStep:
        after = replace(seen[0], states={key: state for one in reversed(seen) for key, state in one.states.items()})
        by_rank = [[*self.trainer.batches(number, rank, self.ranks)] for rank in range(self.ranks)]
        counts = [[self.trainer.targets(batch) for batch in mine] for mine in by_rank]
        total = sum(count for mine in counts for count in mine)
        shares = [[count / total for count in mine] for mine in counts]
        weights = {
            name: weight.to(after.dtypes[name][0] if name in after.dtypes else weight.dtype)
            for name, weight in before.weights.items()
        }  # fmt: skip
        asked = AskedStep(
            self.reference, weights, by_rank, shares,
            loss_scale=after.loss_scale, clip=self.trainer.clip_grad, earlier=self.earlier,
        )  # fmt: skip
        batches = [batch for mine in by_rank for batch in mine]
        flat = [share for mine in shares for share in mine]
        exact = self.reference.exact_step(weights, batches, flat)
        scale = after.loss_scale * self.ranks * max(flat)  # what a rank multiplies the largest of its losses by
        native = self.reference.native_step(weights, batches, flat, scale)
        self._told(verdict, number, [one.told for one in seen], exact, native, [sum(mine) for mine in shares])
        if after.updates == 0:
            verdict.skipped += 1
            self._skipped(verdict, number, before, after, native)
        else:
            self.updates += 1
            verdict.note(number, "updates", "the optimizer", float(after.updates != 1), 0.0)
            asked = self._gradients(verdict, number, asked, after, exact, native)
            self._update(verdict, number, asked, before, after)
        self._copies(verdict, number, seen)
        for name in self.frozen:
            verdict.equal(number, "frozen weight", name, after.weights[name], before.weights[name])
        self.earlier = replace(asked, earlier=None)
        return after

    def _told(
        self, verdict: Verdict, number: int, told: Sequence[Mapping[str, float]], exact: Step, native: Step,
        by_rank: Sequence[float],
    ) -> None:  # fmt: skip
        """Check the loss: that of all ranks where they report the same, else each rank's own part of it."""
        if losses := [one["loss"] for one in told if "loss" in one]:
            noise = max(abs(one - other) for one, other in zip(exact.losses, native.losses, strict=True))
            bound = NOISE * noise + 64 * U32 * abs(exact.loss)
            loss = sum(one * share for one, share in zip(losses, by_rank, strict=True))
            verdict.note(number, "loss", "the global batch", abs(loss - exact.loss), bound)

    def _skipped(self, verdict: Verdict, number: int, before: SeenStep, after: SeenStep, native: Step) -> None:
        """Check that nothing changed, and that there was an overflow."""
        overflows = not all(bool(grad.isfinite().all()) for grad in native.grads.values())
        verdict.note(number, "skipped step", "one process, which has no overflow", float(not overflows), 0.0)
        for name, weight in before.weights.items():
            verdict.equal(number, "weight after a skipped step", name, after.weights[name], weight)
        for key, state in before.states.items():
            verdict.equal(number, f"{key[0]} after a skipped step", key[1], after.states[key], state)

    def _gradients(
        self, verdict: Verdict, number: int, asked: AskedStep, after: SeenStep, exact: Step, native: Step
    ) -> AskedStep:
        """Check the gradients that the update used, and the norm. Return the step with its clipping."""
        norm, rounded = _norm(exact.grads), _norm(native.grads)
        slack = NOISE * abs(rounded - norm) / norm + 64 * U32 if norm else 0.0  # relative
        clip = self.trainer.clip_grad
        coefficient = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        asked = replace(asked, coefficient=coefficient)
        roundings = sum(len(mine) for mine in asked.by_rank) + 1
        found = {name: after.gradients[name].double() for name in exact.grads if name in after.gradients}
        for name, want in exact.grads.items():
            sums = after.dtypes[name][1] if name in after.dtypes else torch.float32
            noise = float((native.grads[name] - want).abs().max())
            divisor = after.loss_scale / max(max(mine) for mine in asked.shares) if _halves(asked, name) else None
            bound = gradient_bound(noise, exact.magnitudes[name], roundings, UNIT[sums], divisor) * coefficient
            bound += slack * coefficient * float(want.abs().max()) * bool(clip)
            grad = found.get(name, torch.zeros_like(want))
            explain = partial(asked.explain, name, found | {name: grad}, bound)
            verdict.note(number, "gradient", name, float((grad - coefficient * want).abs().max()), bound, explain)
        if "grad_norm" in after.told:
            bound = max(slack * norm, math.sqrt(sum(grad.numel() for grad in exact.grads.values())) * 64 * U32 * norm)
            verdict.note(number, "norm", "all gradients", abs(after.told["grad_norm"] - norm), bound)
        return asked

    def _update(self, verdict: Verdict, number: int, asked: AskedStep, before: SeenStep, after: SeenStep) -> None:
        """Check the options of every parameter, then weights and states by the plain optimizer in FP64."""
        for name, number_of_group in self.groups.items():
            table = [lrs[number_of_group] for lrs in self.lrs]
            group = self.plain.param_groups[number_of_group] | {"lr": table[self.updates - 1]}
            self._options(verdict, number, name, group, table, after)
            if name not in after.gradients or not after.gradients[name].isfinite().all():
                continue
            states = [state for state, of in after.states if of == name]
            empty = torch.zeros_like(before.weights[name])
            was = {MASTER: before.weights[name]} | {state: before.states.get((state, name), empty) for state in states}
            became = {MASTER: after.weights[name]} | {state: after.states[state, name] for state in states}
            grad, lr, decay = after.gradients[name].double(), float(group["lr"]), float(group.get("weight_decay", 0.0))
            lrs = {f"the lr of update {at + 1}": other for at, other in enumerate(table)}
            lrs |= {f"the lr of group {at}": other for at, other in enumerate(self.lrs[self.updates - 1])}
            update = AskedUpdate(
                rule=partial(torch_update, self.plain, group), name=name, grad=grad, before=was, lr=lr,
                weight_decay=decay, update=self.updates, attempts=number + 1, coefficient=asked.coefficient,
                loss_scale=after.loss_scale, lrs={text: other for text, other in lrs.items() if other != lr},
                decays={f"the weight decay of group {at}": float(one["weight_decay"])
                        for at, one in enumerate(self.plain.param_groups) if "weight_decay" in one},
            )  # fmt: skip

            def explain(state: str, bound: float, update: AskedUpdate = update, became: Tensors = became) -> str:
                return update.explain(state, became[state], bound)

            dtypes = dict.fromkeys(states, torch.float32) | {MASTER: self.trainer.truth}
            note_update(verdict, number, name, update.updated, grad, was, became, dtypes, lr, explain)

    def _options(
        self, verdict: Verdict, number: int, name: str, group: Mapping[str, Any], lrs: Sequence[float], after: SeenStep
    ) -> None:
        """Check lr and weight decay of one parameter."""
        here = after.options.get(name)
        for key in OPTIONS:
            want = float(group.get(key, 0.0))
            got = math.nan if here is None else here.get(key, 0.0)
            text = f"{got:.4g}, where the plain optimizer has {want:.4g}" if here else "not in the optimizer"
            if key == "lr" and got in lrs:
                text += f" and {got:.4g} is the lr of update {lrs.index(got) + 1}, not {self.updates}"
            verdict.note(number, key, name, abs(got - want), 1e-6 * abs(want), text)


_DRIFT = "a rank that draws, reduces or updates by itself"


def _lr_table(trainer: ForeignTrainer, model: nn.Module, updates: int) -> list[list[float]]:
    """Return the lr of every group in every update, and in one more."""
    optimizer = trainer.optimizer(model)
    schedule, table = trainer.scheduler(optimizer), []
    for _ in range(updates + 1):
        table.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()  # of nothing: torch warns of a schedule that is ahead of its optimizer
        if schedule is not None:
            schedule.step()
    return table


def _halves(asked: AskedStep, name: str) -> bool:
    return asked.loss_scale != 1 or asked.weights[name].dtype == torch.float16


def _norm(grads: Tensors) -> float:
    return math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))


def torch_update(
    optimizer: Optimizer, group: Mapping[str, Any], _: str, grad: Tensor, before: Mapping[str, Tensor], *, lr: float,
    weight_decay: float, update: int,
) -> Tensors:  # fmt: skip
    """Return master and states after one step of a torch optimizer on this parameter alone, in FP64.

    `group`: the parameter's own. `update`: the step's number, 1 for the first, which begins without states.
    Shapes: grad FP64 and each of `before` like the parameter.
    """
    alone = copy.copy(optimizer)
    param = nn.Parameter(before[MASTER].double())
    param.grad = grad.clone()
    plain = dict.fromkeys({"foreach", "fused", "capturable"} & group.keys(), False)
    alone.param_groups = [{**group, **plain, "params": [param], "lr": lr, "weight_decay": weight_decay}]
    alone.state = defaultdict(dict)
    if update > 1:
        states = {state: tensor.double() for state, tensor in before.items() if state != MASTER}
        alone.state[param] = {"step": torch.tensor(float(update - 1)), **states}
    alone.step()
    left = alone.state[param]
    return {MASTER: param.detach()} | {state: left[state].detach() for state in before if state != MASTER}
