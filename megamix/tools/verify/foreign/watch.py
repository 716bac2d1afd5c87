"""Watch on every rank of somebody's own training: it takes steps, and writes down what the optimizer saw and left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from megamix.tools.ranks import environment
from megamix.tools.verify.core.observed_step import rank_device
from megamix.tools.verify.core.tape import Dtypes, Tape, plain_name, recorded
from megamix.tools.verify.core.verdict import ByState, Tensors
from megamix.tools.verify.foreign.trainer import (
    ForeignTrainer,
    WrongTrainer,
    autocast_entered,
    computes_in,
    loaded_trainer,
    optimizers_of,
    options_of,
    whole,
)


@dataclass(slots=True, kw_only=True)
class SeenStep:
    """One step of a trainer as one rank saw it. Weights, states and buffers are those after the step."""

    told: Mapping[str, float] = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    states: ByState = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    updates: list[int] = field(default_factory=list)  # number of steps of each optimizer
    gradients: Tensors = field(default_factory=dict)  # gradients that the update used
    options: dict[str, dict[str, float]] = field(default_factory=dict)  # options of each parameter, when it stepped
    loss_scale: float = 1.0
    dtypes: dict[str, Dtypes] = field(default_factory=dict)
    autocast: set[torch.dtype] = field(default_factory=set)  # dtypes to which its autocasts cast
    tape: Tape = field(default_factory=dict)  # tape of the first micro-batch, if modules are recorded
    losses: list[float] = field(default_factory=list)  # results of the trainer's `loss` in this step

    @property
    def kept(self) -> ByState:
        return {("weight", name): weight for name, weight in self.weights.items()} | self.states

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
    set_ours = environment({name: str(value) for name, value in ours.items()} | {"MASTER_ADDR": "127.0.0.1"})
    with set_ours, loaded_trainer(where, rank, world) as trainer:
        return _watch(trainer, steps, bisect)


def _watch(trainer: ForeignTrainer, steps: int, bisect: bool) -> list[SeenStep]:
    made: Any = trainer.setup(trainer.model())
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        kinds = ", ".join(type(one).__name__ for one in made) if isinstance(made, tuple) else type(made).__name__
        fix = "must be (module, optimizer); write return module, optimizer"
        raise WrongTrainer(f"{type(trainer).__name__}.setup returned ({kinds}), {fix}")
    witness = _Witness(trainer, made[0], optimizers_of(made[1], f"{type(trainer).__name__}.setup"))
    seen = [witness.read()]
    for number in range(steps):
        with recorded(made[0], wanted=bisect) as tape, autocast_entered() as autocast:
            told = trainer.step(trainer.batches(number, trainer.rank, trainer.ranks))
        if not isinstance(told, Mapping | None):
            kind = type(told).__name__
            raise WrongTrainer(f"{type(trainer).__name__}.step returned {kind}, must be as {{'loss': 2.3}}, or None")
        read = {name: float(told[name]) for name in ("loss", "grad_norm") if told and name in told}
        seen.append(replace(witness.read(), told=read, tape=tape, autocast=autocast))
    return seen


class _Witness:
    """Looks on as a trainer takes a step."""

    def __init__(self, trainer: ForeignTrainer, module: nn.Module, optimizers: Sequence[Optimizer]):
        self.trainer, self.module, self.optimizers = trainer, module, optimizers
        self.dtypes, self._loss = computes_in(module), trainer.loss
        trainer.loss = self._noted_loss  # type: ignore[method-assign]  # a step may call `loss`
        self._begin()
        self.inside = Counter[Optimizer]()  # a step may call its base class's step
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda one, *_: self._before_update(one))
            optimizer.register_step_post_hook(lambda one, *_: self.inside.subtract([one]))

    def _begin(self) -> None:
        scale = self.trainer.scaler.get_scale() if self.trainer.scaler else 1.0
        self.seen = SeenStep(updates=[0] * len(self.optimizers), loss_scale=scale, dtypes=self.dtypes)
        self.losses = list[torch.Tensor]()

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
        seen, grads = self.seen, self.trainer.gradients(self.module, optimizer)
        seen.updates[self.optimizers.index(optimizer)] += 1
        groups = self.trainer.groups(self.module, optimizer)
        # Clipping or unscaling of another optimizer's gradients may come between this step and the other one's.
        seen.gradients = {**grads, **seen.gradients, **{name: grads[name] for name in groups if name in grads}}
        seen.options |= {name: options_of(group) for name, group in groups.items()}

    def read(self) -> SeenStep:
        """Return the step that has been taken, and begin the next one."""
        seen = self.seen
        for optimizer in reversed(self.optimizers):  # what several hold is the first one's
            seen.weights |= self.trainer.weights(self.module, optimizer)
            seen.states |= self.trainer.states(self.module, optimizer)
        seen.buffers = {plain_name(name): whole(buffer) for name, buffer in self.module.named_buffers()}
        seen.losses = [float(loss) for loss in self.losses]
        self._begin()
        return seen
