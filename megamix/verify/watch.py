"""On every rank of somebody's own training: take steps, and write down what the optimizer saw and left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from megamix.verify.plain_optimizer import options_of
from megamix.verify.tape import Tape, plain_name, recorded
from megamix.verify.trainer import ForeignTrainer, computes_in, load_trainer, named_parameters, whole
from megamix.verify.verdict import Tensors


@dataclass(slots=True)
class SeenStep:
    """One step of a trainer as one rank saw it. Weights, states and buffers are those after it."""

    told: Mapping[str, float]
    weights: Tensors
    states: dict[tuple[str, str], torch.Tensor]  # by state and parameter
    buffers: Tensors
    updates: int  # how often the optimizer stepped
    gradients: Tensors  # those that it used
    options: dict[str, dict[str, float]]  # of each parameter, when it stepped
    loss_scale: float
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]]  # computes in, sums in
    tape: Tape  # of the first micro-batch, where modules are recorded


def watch_trainer(where: str, steps: int, bisect: bool = False) -> list[SeenStep]:
    """Take the steps. What is returned begins with what there was before the first. Every rank must call it.

    `bisect`: record what passes through each module.
    """
    trainer = load_trainer(where, dist.get_rank(), dist.get_world_size())
    made: Any = trainer.setup(trainer.model())
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"{type(trainer).__name__}.setup returned {type(made).__name__}, must be (module, optimizer)")
    if not isinstance(made[1], Optimizer):
        raise ValueError(
            f"{type(trainer).__name__}.setup returned an optimizer of type {type(made[1]).__name__}, must be a "
            "torch.optim.Optimizer; return the one that it wraps, or make your class a subclass"
        )
    witness = _Witness(trainer, *made)
    seen = [witness.read({}, {})]
    for number in range(steps):
        with recorded(made[0], wanted=bisect) as tape:
            told = trainer.step(trainer.batches(number, trainer.rank, trainer.ranks))
        seen.append(witness.read({name: float(value) for name, value in (told or {}).items()}, tape))
    return seen


class _Witness:
    def __init__(self, trainer: ForeignTrainer, module: nn.Module, optimizer: Optimizer):
        self.trainer, self.module, self.optimizer = trainer, module, optimizer
        self.dtypes = computes_in(module)
        self.names = {param: name for name, param in named_parameters(module)}
        self._forget()
        self.inside = 0  # an optimizer's step may be its base's with something around it
        optimizer.register_step_pre_hook(lambda *_: self._before_update())
        optimizer.register_step_post_hook(lambda *_: self._after_update())

    def _forget(self) -> None:
        self.updates = 0
        self.gradients: Tensors = {}
        self.options: dict[str, dict[str, float]] = {}
        self.loss_scale = self.trainer.scaler.get_scale() if self.trainer.scaler else 1.0

    def _after_update(self) -> None:
        self.inside -= 1

    def _before_update(self) -> None:
        self.inside += 1
        if self.inside > 1:
            return
        found_inf = getattr(self.optimizer, "found_inf", None)  # GradScaler leaves the skip to a fused optimizer
        if found_inf is not None and found_inf.item():
            return
        self.updates += 1
        self.gradients = self.trainer.gradients(self.module, self.optimizer)
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param in self.names:
                    self.options[self.names[param]] = options_of(group)

    def read(self, told: Mapping[str, float], tape: Tape) -> SeenStep:
        weights = self.trainer.weights(self.module, self.optimizer)
        states = self.trainer.states(self.module, self.optimizer)
        buffers = {plain_name(name): whole(buffer) for name, buffer in self.module.named_buffers()}
        seen = SeenStep(
            told=told, weights=weights, states=states, buffers=buffers, updates=self.updates, gradients=self.gradients,
            options=self.options, loss_scale=self.loss_scale, dtypes=self.dtypes, tape=tape,
        )  # fmt: skip
        self._forget()
        return seen
