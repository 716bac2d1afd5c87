"""Watch on every rank of somebody's own training: it takes steps, and writes down what the optimizer saw and left."""

from __future__ import annotations

import os
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from megamix.tools.verify.core.observed_step import rank_device
from megamix.tools.verify.core.tape import Tape, plain_name, recorded
from megamix.tools.verify.core.verdict import Tensors
from megamix.tools.verify.foreign.trainer import (
    ForeignTrainer,
    WrongTrainer,
    autocast_entered,
    computes_in,
    in_own_code,
    load_trainer,
    optimizers_of,
    options_of,
    whole,
)

TOLD = ("loss", "grad_norm")  # keys of a step's report that are compared


@dataclass(slots=True)
class SeenStep:
    """One step of a trainer as one rank saw it. Weights, states and buffers are those after the step."""

    told: Mapping[str, float]
    weights: Tensors
    states: dict[tuple[str, str], torch.Tensor]  # by state and parameter
    buffers: Tensors
    updates: list[int]  # number of steps of each optimizer
    gradients: Tensors  # gradients that the update used
    options: dict[str, dict[str, float]]  # options of each parameter, when it stepped
    loss_scale: float
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]]  # dtypes in which a parameter computes, and sums
    autocast: set[torch.dtype]  # dtypes to which its autocasts cast
    tape: Tape  # tape of the first micro-batch, if modules are recorded
    losses: list[float] = field(default_factory=list)  # results of the trainer's `loss` in this step

    @property
    def counted(self) -> str:
        return " and ".join(map(str, self.updates))


def watch_trainer(where: str, steps: int, bisect: bool = False) -> list[SeenStep]:
    """Take the steps. The list begins with the state before the first one. Every rank must call it.

    `bisect`: record the tensors through each module.
    """
    rank, world, card = dist.get_rank(), dist.get_world_size(), rank_device().index
    ours = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 0}
    ours["LOCAL_RANK"] = rank if card is None else card
    # Variables that torchrun sets. accelerate and DeepSpeed ask for no more, for the process group exists already.
    with mock.patch.dict(os.environ, {name: str(value) for name, value in ours.items()}, MASTER_ADDR="127.0.0.1"):
        trainer = load_trainer(where, rank, world)
        with in_own_code(trainer):
            return _watch(trainer, steps, bisect)


def _watch(trainer: ForeignTrainer, steps: int, bisect: bool) -> list[SeenStep]:
    made: Any = trainer.setup(trainer.model())
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        kinds = ", ".join(type(one).__name__ for one in made) if isinstance(made, tuple) else type(made).__name__
        fix = "must be (module, optimizer); write return module, optimizer"
        raise WrongTrainer(f"{type(trainer).__name__}.setup returned ({kinds}), {fix}")
    witness = _Witness(trainer, made[0], optimizers_of(made[1], f"{type(trainer).__name__}.setup"))
    seen = [witness.read({}, {}, set())]
    for number in range(steps):
        with recorded(made[0], wanted=bisect) as tape, autocast_entered() as autocast:
            told = trainer.step(trainer.batches(number, trainer.rank, trainer.ranks))
        if not isinstance(told, Mapping | None):
            kind = type(told).__name__
            raise WrongTrainer(f"{type(trainer).__name__}.step returned {kind}, must be as {{'loss': 2.3}}, or None")
        seen.append(witness.read({name: float(told[name]) for name in TOLD if told and name in told}, tape, autocast))
    return seen


class _Witness:
    def __init__(self, trainer: ForeignTrainer, module: nn.Module, optimizers: Sequence[Optimizer]):
        self.trainer, self.module, self.optimizers = trainer, module, optimizers
        self.dtypes, self._loss = computes_in(module), trainer.loss
        trainer.loss = self._noted_loss  # type: ignore[method-assign]  # a step may call `loss`
        self._forget()
        self.inside: Counter[Optimizer] = Counter()  # a step may call its base class's step
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda one, *_: self._before_update(one))
            optimizer.register_step_post_hook(lambda one, *_: self.inside.subtract([one]))

    def _forget(self) -> None:
        self.updates: Counter[Optimizer] = Counter()
        self.losses: list[torch.Tensor] = []
        self.gradients: Tensors = {}
        self.options: dict[str, dict[str, float]] = {}
        self.loss_scale = self.trainer.scaler.get_scale() if self.trainer.scaler else 1.0

    def _noted_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = self._loss(model, batch)
        self.losses.append(loss.detach())
        return loss

    def _before_update(self, optimizer: Optimizer) -> None:
        self.inside[optimizer] += 1
        if self.inside[optimizer] > 1:
            return
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler leaves the skip to a fused optimizer
        if found_inf is not None and found_inf.item():
            return
        self.updates[optimizer] += 1
        grads = self.trainer.gradients(self.module, optimizer)
        groups = self.trainer.groups(self.module, optimizer)
        # Clipping or unscaling of another optimizer's gradients may come between this step and the other one's.
        self.gradients = {**grads, **self.gradients, **{name: grads[name] for name in groups if name in grads}}
        self.options |= {name: options_of(group) for name, group in groups.items()}

    def read(self, told: Mapping[str, float], tape: Tape, autocast: set[torch.dtype]) -> SeenStep:
        weights = dict(ChainMap(*(self.trainer.weights(self.module, one) for one in self.optimizers)))
        states = dict(ChainMap(*(self.trainer.states(self.module, one) for one in self.optimizers)))
        buffers = {plain_name(name): whole(buffer) for name, buffer in self.module.named_buffers()}
        seen = SeenStep(
            told=told, weights=weights, states=states, buffers=buffers,
            updates=[self.updates[one] for one in self.optimizers], gradients=self.gradients, options=self.options,
            loss_scale=self.loss_scale, dtypes=self.dtypes, tape=tape, autocast=autocast,
            losses=[float(loss) for loss in self.losses],
        )  # fmt: skip
        self._forget()
        return seen
