"""Stochastic gradient descent with momentum, Nesterov's or the classical one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megamix.mixed_precision.optim.half_states import StateDtype, needs_chance
from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.mixed_precision.update_slice import (
    GroupValues,
    States,
    StepScalars,
    Tensors,
    UpdateGroup,
    UpdateScalars,
    UpdateSlice,
    largest,
)
from megamix.settings.optimizers import NAGSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class NAG(NAGSettings, Optimizer):
    """SGD with Nesterov's momentum, or with the classical one. With momentum 0 it is plain SGD, without a state.

    `momentum_form`: the terms that the momentum adds up. "gradient": gradients; their sum is multiplied by the learning
    rate of the present update, as in torch.optim.SGD. "velocity": steps, each with the learning rate of its own update,
    as in MXNet's mp_nag_mom_update (src/operator/optimizer_op-inl.h). While lr is constant the two forms are the same,
    apart from rounding.
    `nesterov`: False: a step is the momentum alone, as in torch.optim.SGD(nesterov=False).
    `decoupled_weight_decay`: True: the decay shrinks the master, as in AdamW. False: the decay is added to the
    gradient, as in torch and MXNet.
    """

    state_dtype: StateDtype = torch.float32

    group_settings: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super(NAG, self).__post_init__()
        momentum = largest(self.own_and_groups("momentum"))
        if self.state_dtype == torch.bfloat16 and needs_chance(momentum):
            raise ValueError(f"momentum {momentum} is lost in a BF16 state; take state_dtype=torch.float32")

    def states(self, name: str, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
        if not largest([self.setting_of(name, "momentum")]):
            return {}
        return {"velocity" if self.momentum_form == "velocity" else "momentum_buffer": self.state_dtype}

    def coefficients(self, update: Tensor, values: GroupValues) -> Tensors:
        return (values.momentum.float(),)

    def equation(self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars) -> tuple[Tensor, States]:
        if self.decoupled_weight_decay:
            master = master - at.lr * at.weight_decay * master
        else:
            grad = grad + at.weight_decay * master
        if not states:
            return master - at.lr * grad, {}
        (momentum,) = at.coefficients
        if self.momentum_form == "velocity":
            velocity = momentum * states["velocity"] - at.lr * grad
            moved = master + momentum * velocity - at.lr * grad if self.nesterov else master + velocity
            return moved, {"velocity": velocity}
        momentum_buffer = momentum * states["momentum_buffer"] + grad
        direction = grad + momentum * momentum_buffer if self.nesterov else momentum_buffer
        return master - at.lr * direction, {"momentum_buffer": momentum_buffer}

    def library_update_(self, part: UpdateSlice, group: UpdateGroup, at: UpdateScalars, step: StepScalars) -> bool:
        own_equation = type(self).equation is not NAG.equation
        if self.decoupled_weight_decay or self.momentum_form == "velocity" or own_equation:
            return False
        (momentum,) = dict(group.settings)["momentum"]
        torch._fused_sgd_(
            [part.master], [part.grad], [*part.states.values()],
            weight_decay=group.weight_decay[0], momentum=momentum, lr=at.lr, dampening=0.0,
            nesterov=self.nesterov and momentum > 0, maximize=False, is_first_step=False,
            found_inf=step.found_inf.float(),
        )  # fmt: skip
        return True
