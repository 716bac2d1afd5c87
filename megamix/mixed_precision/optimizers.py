"""The optimizers: what one is made of, and its equation as a pure elementwise function in FP32.

An optimizer is settings and formulas; its states live in the master shard and its equation runs in the fused update.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Parameters whose name matches `pattern` (as a shell pattern: `*.bias`) get their own learning-rate factor and
    weight decay.
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay: float | None = None  # None: the optimizer's


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What AdamW and NAG share.

    `lr`: a number, or one per update; past the end the last one holds. `groups`: the first pattern that matches a
    parameter wins; weight decay is 0 for parameters of fewer than two dims (norms, biases) unless a group says
    otherwise.
    """

    lr: float | Sequence[float]
    weight_decay: float = 0.0
    groups: tuple[ParamGroup, ...] = ()

    state_names: ClassVar[tuple[str, ...]]  # FP32 (shard_numel,) each, zeros at the start

    def __post_init__(self) -> None:
        table = self.lr_table()
        if not table or not all(math.isfinite(lr) and lr >= 0 for lr in table):
            raise ValueError(f"lr must be a finite number of at least 0, or a sequence of such, got {self.lr!r}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")

    def lr_table(self) -> list[float]:
        return [self.lr] if isinstance(self.lr, int | float) else [float(lr) for lr in self.lr]

    def hyperparameters(self, name: str, num_dims: int) -> tuple[float, float]:
        """(lr factor, weight decay) of one parameter; parameters with equal ones form a group."""
        default_decay = self.weight_decay if num_dims > 1 else 0.0
        for group in self.groups:
            if fnmatch.fnmatchcase(name, group.pattern):
                return group.lr_factor, default_decay if group.weight_decay is None else group.weight_decay
        return 1.0, default_decay

    def coefficients(self, update: Tensor) -> tuple[Tensor, ...]:
        """What the equation needs of the update's number (1, 2, ...; FP64 ()), as FP32 device scalars."""
        return ()

    def equation(
        self,
        grad: Tensor,
        master: Tensor,
        states: tuple[Tensor, ...],
        lr: Tensor,
        weight_decay: Tensor,
        coefficients: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One update. Shapes: grad, master and each state FP32 (n,); the rest FP32 (). Returns the new master and
        states.
        """
        raise NotImplementedError

    def library_update_(
        self,
        grad: Tensor,
        master: Tensor,
        states: tuple[Tensor, ...],
        lr: Tensor,
        weight_decay: float,
        gate: tuple[Tensor, Tensor],
    ) -> None:
        """The same in place by torch's own fused kernel, for machines without a compiler.

        `gate`: the number of this update and found_inf (1.0: change nothing), FP32 () each.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        super(AdamW, self).__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")

    def coefficients(self, update: Tensor) -> tuple[Tensor, ...]:
        # As factors, since the compiled loop would divide every vector anew by them: 1 / (1 - beta1^t) and
        # 1 / sqrt(1 - beta2^t), rounded once.
        correction1, correction2 = (1 - beta**update for beta in self.betas)
        return correction1.reciprocal().float(), correction2.rsqrt().float()

    def equation(
        self,
        grad: Tensor,
        master: Tensor,
        states: tuple[Tensor, ...],
        lr: Tensor,
        weight_decay: Tensor,
        coefficients: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (exp_avg, exp_avg_sq), (debias1, debias2) = states, coefficients
        exp_avg = torch.lerp(exp_avg, grad, 1 - self.betas[0])
        exp_avg_sq = torch.lerp(exp_avg_sq, grad.square(), 1 - self.betas[1])
        denom = exp_avg_sq.sqrt() * debias2 + self.eps
        master = master - lr * weight_decay * master
        master = master - lr * debias1 * (exp_avg / denom)
        return master, (exp_avg, exp_avg_sq)

    def library_update_(
        self,
        grad: Tensor,
        master: Tensor,
        states: tuple[Tensor, ...],
        lr: Tensor,
        weight_decay: float,
        gate: tuple[Tensor, Tensor],
    ) -> None:
        (exp_avg, exp_avg_sq), (update, found_inf) = states, gate
        torch._fused_adamw_(
            [master], [grad], [exp_avg], [exp_avg_sq], [], [update],
            lr=lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=weight_decay, eps=self.eps,
            amsgrad=False, maximize=False, found_inf=found_inf,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NAG(Optimizer):
    """Nesterov's accelerated gradient in the gradient form of torch.optim.SGD(nesterov=True), weight decay coupled
    as there.
    """

    momentum: float = 0.9

    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __post_init__(self) -> None:
        super(NAG, self).__post_init__()
        if not 0 < self.momentum < 1:
            raise ValueError(f"momentum must lie in (0, 1), got {self.momentum}")

    def equation(
        self,
        grad: Tensor,
        master: Tensor,
        states: tuple[Tensor, ...],
        lr: Tensor,
        weight_decay: Tensor,
        coefficients: tuple[Tensor, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (momentum_buffer,) = states
        grad = grad + weight_decay * master
        momentum_buffer = self.momentum * momentum_buffer + grad
        master = master - lr * (grad + self.momentum * momentum_buffer)
        return master, (momentum_buffer,)

    def library_update_(
        self,
        grad: Tensor,
        master: Tensor,
        states: tuple[Tensor, ...],
        lr: Tensor,
        weight_decay: float,
        gate: tuple[Tensor, Tensor],
    ) -> None:
        torch._fused_sgd_(
            [master], [grad], [states[0]],
            weight_decay=weight_decay, momentum=self.momentum, lr=lr, dampening=0.0,
            nesterov=True, maximize=False, is_first_step=False, found_inf=gate[1],
        )  # fmt: skip
