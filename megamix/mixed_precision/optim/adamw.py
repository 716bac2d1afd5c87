"""Adam with decoupled weight decay."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from megamix.mixed_precision.optim.half_states import StateDtype, by_chance, needs_chance
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
from megamix.settings.limits import NotNegativeByUpdate
from megamix.settings.optimizers import AdamWSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(AdamWSettings, Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    weight_decay: NotNegativeByUpdate = 0.1
    state_dtype: StateDtype = torch.float32

    group_settings: ClassVar[tuple[str, ...]] = ("betas", "eps")

    chances: tuple[bool, ...] = field(init=False, repr=False)  # of each moment: whether it is rounded by chance

    def __post_init__(self) -> None:
        super(AdamW, self).__post_init__()
        # All groups have one equation, so any beta that needs chance decides for all. Worked out here: the compiler
        # would trace each number of a schedule.
        each = map(largest, zip(*self.own_and_groups("betas"), strict=True))
        chances = tuple(self.state_dtype == torch.bfloat16 and needs_chance(beta) for beta in each)
        object.__setattr__(self, "chances", chances)

    def states(self, name: str, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
        return {"exp_avg": self.state_dtype, "exp_avg_sq": self.state_dtype}

    @property
    def takes_chances(self) -> bool:
        """Return whether a moment is rounded by chance."""
        return any(self.chances)

    def coefficients(self, update: Tensor, values: GroupValues) -> Tensors:
        # The bias corrections are factors, 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t), each rounded once. As divisors
        # they would cost the compiled loop a division per vector. 1 - beta is rounded once, too.
        correction1, correction2 = (1 - decayed for decayed in values.decayed)
        moved = (1 - beta for beta in values.betas)
        scalars = (correction1.reciprocal(), correction2.rsqrt(), *moved, values.eps, update)
        return tuple(scalar.float() for scalar in scalars)

    def equation(self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars) -> tuple[Tensor, States]:
        debias1, debias2, moved1, moved2, eps, update, *_ = at.coefficients
        exp_avg = torch.lerp(states["exp_avg"], grad, moved1)
        exp_avg_sq = torch.lerp(states["exp_avg_sq"], grad.square(), moved2)
        denom = exp_avg_sq.sqrt() * debias2 + eps
        master = master - at.lr * at.weight_decay * master
        master = master - at.lr * debias1 * (exp_avg / denom)
        new = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for name, needs in zip(new, self.chances, strict=True):
            if needs:
                new[name] = by_chance(new[name], master, update)
        return master, new

    def has_torchs_equation(self, states: States) -> bool:
        """Return whether torch's fused AdamW computes the same from these states."""
        return type(self).equation is AdamW.equation and not self.takes_chances

    def library_update_(self, part: UpdateSlice, group: UpdateGroup, at: UpdateScalars, step: StepScalars) -> bool:
        if not self.has_torchs_equation(part.states):
            return False
        (beta1,), (beta2,) = group.betas
        torch._fused_adamw_(
            [part.master], [part.grad], [part.states["exp_avg"]], [part.states["exp_avg_sq"]], [], [at.coefficients[5]],
            lr=at.lr, beta1=beta1, beta2=beta2, weight_decay=group.weight_decay[0], eps=dict(group.settings)["eps"][0],
            amsgrad=False, maximize=False, found_inf=step.found_inf.float(),
        )  # fmt: skip
        return True
