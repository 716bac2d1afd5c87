"""Optimizers of one process, by which the trainer's are checked: groups' lr, and a parameter's step alone in FP64."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megamix.mixed_precision.update_slice import MASTER
from megamix.tools.verify.core.hypotheses import RightStep
from megamix.tools.verify.core.update_kinds import RightUpdate, Rule
from megamix.tools.verify.core.verdict import Tensors, Verdict
from megamix.tools.verify.foreign.trainer import IMPLEMENTATIONS, ForeignTrainer, optimizers_of, options_of
from megamix.tools.verify.foreign.watch import SeenStep


class PlainUpdates:
    """The trainer's optimizers in one process, over a model in FP64."""

    def __init__(self, trainer: ForeignTrainer, exact: nn.Module, updates: int):
        self.ranks, self.master_dtype = trainer.ranks, trainer.master_dtype
        made, again = (optimizers_of(trainer.optimizer(exact), "optimizer(model)") for _ in range(2))
        self.plain = [(one, group) for one in made for group in one.param_groups]
        self.lrs = lr_table(trainer, again, updates)
        names = {param: name for name, param in exact.named_parameters() if param.requires_grad}
        self.groups = dict[str, int]()
        self.kept = dict[str, dict[str, torch.Size | None]]()
        for number, (optimizer, group) in enumerate(self.plain):
            for param in filter(names.__contains__, group["params"]):
                self.groups[names[param]], self.kept[names[param]] = number, kept_states(optimizer, group, param)
        self.past = list[Tensors]()  # weights before each step
        self.counts = Counter[str]()  # updates of each parameter: torch makes none without a gradient

    def comparable(self, verdict: Verdict, seen: SeenStep) -> SeenStep:
        """Return a step without the states that the plain optimizer does not keep, and note these in the verdict."""
        states = {}
        for (state, name), tensor in seen.states.items():
            if (state, tensor.shape) in self.kept.get(name, {}).items():
                states[state, name] = tensor
            else:
                verdict.leave(state, name, "not compared: the plain optimizer keeps none of this shape")
        return replace(seen, states=states)

    def check(
        self, verdict: Verdict, right: RightStep, before: SeenStep, after: SeenStep, unseen: Mapping[str, float]
    ) -> None:
        """Check the options of every parameter, then weights and states.

        `unseen`: how far each gradient may be from the one that the update used.
        """
        updates = verdict.attempt + 1 - verdict.skipped  # with this one
        held = defaultdict[str, Tensors](dict)
        for (state, name), tensor in before.states.items():
            held[name][state] = tensor
        for name, number_of_group in self.groups.items():
            table = [lrs[number_of_group] for lrs in self.lrs]
            optimizer, group = self.plain[number_of_group]
            group = group | {"lr": table[updates - 1]}
            if name not in after.options:
                verdict.expect("optimizer", name, False, "not among the optimizer's parameters")
                continue
            self._options(verdict, name, after.options[name], group, table, updates)
            if name not in after.gradients:
                text = "moved by weight decay or momentum alone"
                verdict.equal("weight without a gradient", name, after.weights[name], before.weights[name], text)
                continue
            if not after.gradients[name].isfinite().all():
                continue
            self.counts[name] += 1
            states = {state: tensor for (state, of), tensor in after.states.items() if of == name}
            lacking = ", ".join(sorted(self.kept[name].keys() - states))
            if lacking and self.counts[name] > 1:
                text = f"not compared: the plain optimizer goes on from {lacking}, no tensor of yours"
                verdict.leave("weight", name, text)
                continue
            was = {state: before.states.get((state, name), torch.zeros_like(of)) for state, of in states.items()}
            was, became = {MASTER: before.weights[name]} | was, {MASTER: after.weights[name]} | states
            grad, lr, decay = after.gradients[name].double(), float(group["lr"]), float(group.get("weight_decay", 0.0))
            lrs = {f"the lr of update {at + 1}": other for at, other in enumerate(table)}
            lrs |= {f"the lr of group {at}": other for at, other in enumerate(self.lrs[updates - 1])}
            dtypes = dict.fromkeys(states, torch.float32) | {MASTER: self.master_dtype}
            update = RightUpdate(
                rule=partial(torch_update, optimizer, group), name=name, grad=grad, before=was, lr=lr,
                weight_decay=decay, update=self.counts[name], attempts=verdict.attempt + 1,
                coefficient=right.coefficient, loss_scale=after.loss_scale, lacking=lacking, of_rows=True,
                rules=wrong_rules(optimizer, group), past=[one[name] for one in self.past], lrs=lrs,
                peers={other: of for other, of in held.items() if self.kept[other] == self.kept[name]},
                decays={f"the weight decay of group {at}": float(one["weight_decay"])
                        for at, (_, one) in enumerate(self.plain) if "weight_decay" in one},
            )  # fmt: skip
            update.note(verdict, became, dtypes, unseen.get(name, 0.0))
        self.past.append(before.weights)

    def _options(
        self, verdict: Verdict, name: str, here: dict[str, float], group: dict[str, Any], lrs: list[float], updates: int
    ) -> None:
        """Check lr, weight decay and all other options that both optimizers have for one parameter."""
        for key, want in options_of(group).items():
            got = here.get(key, want)
            text = f"{got:.4g}, where the plain optimizer has {want:.4g}"
            if key == "lr" and got in lrs:
                text += f" and {got:.4g} is the lr of update {lrs.index(got) + 1}, not {updates}"
            elif got != want and key.startswith("betas") and got in group["betas"]:
                text += ": the betas are swapped"
            elif want and self.ranks > 1 and math.isclose(got, want * self.ranks):
                text += f": times {self.ranks}, the number of ranks"
            verdict.note(key, name, abs(got - want), 1e-6 * abs(want), text)


def lr_table(trainer: ForeignTrainer, optimizers: Sequence[Optimizer], updates: int) -> list[list[float]]:
    """Return the lr of every group of all optimizers in every update, and in one more."""
    table: list[list[float]] = [[] for _ in range(updates + 1)]
    for optimizer in optimizers:
        schedule = trainer.scheduler(optimizer)
        for lrs in table:
            lrs += [float(group["lr"]) for group in optimizer.param_groups]
            optimizer.step()  # without gradients: torch warns of a schedule that is ahead of its optimizer
            if schedule is not None:
                schedule.step()
    return table


def kept_states(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> dict[str, torch.Size | None]:
    """Return the shape of each state that a torch optimizer keeps of a parameter, None for a state that is no tensor.

    States that only count are left out.
    """
    _, left = _step(optimizer, group, param.detach(), torch.ones_like(param), {})
    return {
        state: of.shape if isinstance(of, Tensor) else None
        for state, of in left.items()
        if (of.dim() or not param.dim() if isinstance(of, Tensor) else not isinstance(of, int | float | None))
    }


def torch_update(optimizer: Optimizer, group: Mapping[str, Any], grad: Tensor, before: Tensors, **at: Any) -> Tensors:
    """Return master and states after one step of a torch optimizer on this parameter alone, in FP64.

    `group`: the parameter's own. `at`: lr, weight_decay and update, the step's number, 1 for the first, which
    begins without states.
    Shapes: grad FP64 like the parameter, each of `before` as the optimizer keeps it.
    """
    update, states = at.pop("update"), {}
    group = {**group, **at}
    if update > 1:
        kept = {state: tensor.double() for state, tensor in before.items() if state != MASTER}
        states = {**_counters(optimizer, group, update - 1), "step": torch.tensor(float(update - 1)), **kept}
    param, left = _step(optimizer, group, before[MASTER], grad, states)
    return {MASTER: param} | {state: left[state].detach() for state in before if state != MASTER}


def wrong_rules(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Rule]:
    """Return updates that are easily written in place of a torch optimizer's, by what is wrong with them."""
    rules = dict[str, Rule]()
    if len(betas := group.get("betas", ())) == 2:
        rules["the betas are swapped"] = partial(torch_update, optimizer, {**group, "betas": betas[::-1]})
    if isinstance(optimizer, torch.optim.Adam):
        rules["eps inside the root"] = partial(_eps_in_root, optimizer, group)
    return rules


def _eps_in_root(optimizer: Optimizer, group: Mapping[str, Any], grad: Tensor, before: Tensors, **at: Any) -> Tensors:
    new, states = torch_update(optimizer, group, grad, before, **at), ("exp_avg", "exp_avg_sq")
    mean, square = (new[state] / (1 - beta ** at["update"]) for state, beta in zip(states, group["betas"], strict=True))
    decay = at["lr"] * at["weight_decay"] * group["decoupled_weight_decay"]
    moved = at["lr"] * mean / (square + group["eps"]).sqrt()
    return new | {MASTER: before[MASTER].double() * (1 - decay) - moved}


def _step(
    optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor, grad: Tensor, states: Tensors, steps: int = 1
) -> tuple[Tensor, dict[str, Any]]:
    """Return the weight and the states after steps with this gradient, in FP64."""
    alone, param = copy.copy(optimizer), nn.Parameter(weight.double())
    param.grad = grad.clone()
    eps = torch.finfo(weight.dtype).eps  # Adafactor's default: eps of the dtype that the training keeps
    given = {
        key: tuple(eps if one is None else one for one in value) if isinstance(value, tuple) else value
        for key, value in group.items()
    }
    alone.param_groups = [{**given, **dict.fromkeys(IMPLEMENTATIONS & group.keys(), False), "params": [param]}]
    alone.state = defaultdict(dict, {param: dict(states)} if states else {})
    for _ in range(steps):
        alone.step()
    return param.detach(), alone.state[param]


def _counters(optimizer: Optimizer, group: Mapping[str, Any], updates: int) -> dict[str, Tensor]:
    """Return the states that only the number of updates moves, such as NAdam's product, after `updates` of them."""
    nothing = torch.zeros(1, 1, dtype=torch.float64)
    _, left = _step(optimizer, group, nothing, nothing, {}, min(updates, 100))
    return {state: of for state, of in left.items() if isinstance(of, Tensor) and of.dim() == 0}
