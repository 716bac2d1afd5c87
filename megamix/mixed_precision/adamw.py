"""Adam with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megamix.mixed_precision.half_states import by_chance, needs_chance, require_state_dtype
from megamix.mixed_precision.optimizers import Optimizer, are_numbers
from megamix.mixed_precision.update_slice import States, StepScalars, Tensors, UpdateScalars, UpdateSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    state_dtype: torch.dtype = torch.float32  # or BF16

    def __post_init__(self) -> None:
        super(AdamW, self).__post_init__()
        require_state_dtype(self.state_dtype)
        if not are_numbers(self.betas, 2) or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1) and be two, got {self.betas}; use (0.9, 0.95)")
        if not torch.finfo(torch.float32).tiny <= self.eps < math.inf:
            raise ValueError(
                f"eps must be a positive number of FP32's normal range, got {self.eps}: where all gradients were zero, "
                "as padding's are, the step is 0 / (0 + eps); use 1e-8"
            )

    def states(self, name: str, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
        return {"exp_avg": self.state_dtype, "exp_avg_sq": self.state_dtype}

    @property
    def takes_chances(self) -> bool:
        """Whether a moment is rounded by chance."""
        return self.state_dtype == torch.bfloat16 and any(map(needs_chance, self.betas))

    def coefficients(self, update: Tensor) -> Tensors:
        # As factors, since the compiled loop would divide every vector anew by them: 1 / (1 - beta1^t) and
        # 1 / sqrt(1 - beta2^t), rounded once.
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
        """Return whether torch's fused AdamW does the same with these states."""
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
