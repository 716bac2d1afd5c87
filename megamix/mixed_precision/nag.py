"""Stochastic gradient descent with Nesterov's momentum."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megamix.mixed_precision.half_states import StateDtype, needs_chance
from megamix.mixed_precision.optimizers import Optimizer
from megamix.mixed_precision.update_slice import States, StepScalars, UpdateScalars, UpdateSlice
from megamix.settings.optimizers import NAGSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class NAG(NAGSettings, Optimizer):
    """SGD with Nesterov's momentum. With momentum 0 it is plain SGD, without a state.

    `momentum_form`: the terms that the momentum adds up. "gradient": gradients; their sum is multiplied by the learning
    rate of the present update, as in torch.optim.SGD(nesterov=True). "velocity": steps, each with the learning rate of
    its own update, as in MXNet's mp_nag_mom_update (src/operator/optimizer_op-inl.h). While lr is constant the two
    forms are the same, apart from rounding.
    `decoupled_weight_decay`: True: the decay shrinks the master, as in AdamW. False: the decay is added to the
    gradient, as in torch and MXNet.
    """

    state_dtype: StateDtype = torch.float32

    def __post_init__(self) -> None:
        super(NAG, self).__post_init__()
        if self.state_dtype == torch.bfloat16 and needs_chance(self.momentum):
            raise ValueError(f"momentum {self.momentum} is lost in a BF16 state; take state_dtype=torch.float32")

    def states(self, name: str, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
        if not self.momentum:
            return {}
        return {"velocity" if self.momentum_form == "velocity" else "momentum_buffer": self.state_dtype}

    def equation(self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars) -> tuple[Tensor, States]:
        if self.decoupled_weight_decay:
            master = master - at.lr * at.weight_decay * master
        else:
            grad = grad + at.weight_decay * master
        if not self.momentum:
            return master - at.lr * grad, {}
        if self.momentum_form == "velocity":
            velocity = self.momentum * states["velocity"] - at.lr * grad
            return master + self.momentum * velocity - at.lr * grad, {"velocity": velocity}
        momentum_buffer = self.momentum * states["momentum_buffer"] + grad
        return master - at.lr * (grad + self.momentum * momentum_buffer), {"momentum_buffer": momentum_buffer}

    def library_update_(self, part: UpdateSlice, at: UpdateScalars, step: StepScalars) -> bool:
        own_equation = type(self).equation is not NAG.equation
        if self.decoupled_weight_decay or self.momentum_form == "velocity" or own_equation:
            return False
        torch._fused_sgd_(
            [part.master], [part.grad], [*part.states.values()],
            weight_decay=float(at.weight_decay), momentum=self.momentum, lr=at.lr, dampening=0.0,
            nesterov=self.momentum > 0, maximize=False, is_first_step=False, found_inf=step.found_inf.float(),
        )  # fmt: skip
        return True
