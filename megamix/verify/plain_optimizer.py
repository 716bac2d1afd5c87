"""The optimizer of one process: every group's lr in every update, and one step of a parameter alone in FP64."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megamix.mixed_precision.optimizers import MASTER
from megamix.verify.trainer import ForeignTrainer
from megamix.verify.verdict import Tensors

_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}


def options_of(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a parameter's group: lr, weight_decay, betas[0] and so on; how it is computed is none."""
    options: dict[str, float] = {}
    for key, value in group.items():
        if isinstance(value, tuple):
            options |= {f"{key}[{at}]": float(one) for at, one in enumerate(value)}
        elif key not in _IMPLEMENTATIONS and isinstance(value, int | float | Tensor):
            options[key] = float(value)
    return options


def lr_table(trainer: ForeignTrainer, model: nn.Module, updates: int) -> list[list[float]]:
    """Return the lr of every group in every update, and in one more."""
    optimizer = trainer.optimizer(model)
    schedule, table = trainer.scheduler(optimizer), []
    for _ in range(updates + 1):
        table.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()  # of nothing: torch warns of a schedule that is ahead of its optimizer
        if schedule is not None:
            schedule.step()
    return table


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
    plain = dict.fromkeys(_IMPLEMENTATIONS & group.keys(), False)
    alone.param_groups = [{**group, **plain, "params": [param], "lr": lr, "weight_decay": weight_decay}]
    alone.state = defaultdict(dict)
    if update > 1:
        states = {state: tensor.double() for state, tensor in before.items() if state != MASTER}
        alone.state[param] = {**_counters(alone, update - 1), "step": torch.tensor(float(update - 1)), **states}
    alone.step()
    left = alone.state[param]
    return {MASTER: param.detach()} | {state: left[state].detach() for state in before if state != MASTER}


def _counters(optimizer: Optimizer, updates: int) -> dict[str, Tensor]:
    """Return the states that only the number of updates moves, such as NAdam's product, after so many."""
    counting = copy.copy(optimizer)
    param = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    counting.param_groups = [{**optimizer.param_groups[0], "params": [param]}]
    counting.state = defaultdict(dict)
    param.grad = torch.zeros_like(param)
    for _ in range(min(updates, 100)):
        counting.step()
    return {state: of for state, of in counting.state[param].items() if isinstance(of, Tensor) and of.dim() == 0}
