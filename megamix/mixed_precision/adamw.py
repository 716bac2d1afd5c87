"""Adam with decoupled weight decay."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megamix.mixed_precision.half_states import StateDtype, by_chance, needs_chance
from megamix.mixed_precision.optimizers import Optimizer
from megamix.mixed_precision.update_slice import States, StepScalars, Tensors, UpdateScalars, UpdateSlice
from megamix.settings.limits import NotNegative
from megamix.settings.optimizers import AdamWSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(AdamWSettings, Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    weight_decay: NotNegative = 0.1
    state_dtype: StateDtype = torch.float32

    def states(self, name: str, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
        return {"exp_avg": self.state_dtype, "exp_avg_sq": self.state_dtype}

    @property
    def takes_chances(self) -> bool:
        """Return whether a moment is rounded by chance."""
        return self.state_dtype == torch.bfloat16 and any(map(needs_chance, self.betas))

    def coefficients(self, update: Tensor) -> Tensors:
        # The bias corrections are factors, 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t), each rounded once. As divisors
        # they would cost the compiled loop a division per vector.
        correction1, correction2 = (1 - beta**update for beta in self.betas)
        corrections = correction1.reciprocal().float(), correction2.rsqrt().float()
        return (*corrections, update.float()) if self.takes_chances else corrections

    def equation(self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars) -> tuple[Tensor, States]:
        debias1, debias2, *update = at.coefficients
        exp_avg = torch.lerp(states["exp_avg"], grad, 1 - self.betas[0])
        exp_avg_sq = torch.lerp(states["exp_avg_sq"], grad.square(), 1 - self.betas[1])
        denom = exp_avg_sq.sqrt() * debias2 + self.eps
        master = master - at.lr * at.weight_decay * master
        master = master - at.lr * debias1 * (exp_avg / denom)
        new = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for name, beta in zip(new, self.betas, strict=True):
            if self.takes_chances and needs_chance(beta):
                new[name] = by_chance(new[name], master, *update)
        return master, new

    def has_torchs_equation(self, states: States) -> bool:
        """Return whether torch's fused AdamW computes the same from these states."""
        return type(self).equation is AdamW.equation and not self.takes_chances

    def library_update_(self, part: UpdateSlice, at: UpdateScalars, step: StepScalars) -> bool:
        if not self.has_torchs_equation(part.states):
            return False
        torch._fused_adamw_(
            [part.master], [part.grad], [part.states["exp_avg"]], [part.states["exp_avg_sq"]], [], [step.update],
            lr=at.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=float(at.weight_decay), eps=self.eps,
            amsgrad=False, maximize=False, found_inf=step.found_inf.float(),
        )  # fmt: skip
        return True
