"""The optimizers: what one is made of, and its equation as a pure elementwise function in FP32.

An optimizer is settings and formulas; its states live in the master shard and its equation runs in the fused update.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class Group(NamedTuple):
    """An optimizer group: the parameters that share these."""

    lr_factor: float
    weight_decay: float


class UpdateScalars(NamedTuple):
    """What the equation needs besides tensors: FP32 () on the device, so that no value is baked into compiled code."""

    lr: Tensor  # with the group's factor
    weight_decay: Tensor
    coefficients: Tensors  # the optimizer's own


class LibraryScalars(NamedTuple):
    """What torch's fused kernels need besides tensors; FP32 () on the device where not a number."""

    lr: Tensor
    weight_decay: float
    update: Tensor  # the number of this update, 1 for the first
    found_inf: Tensor  # 1.0: change nothing


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

    def group_of(self, name: str, num_dims: int) -> Group:
        """The group of one parameter."""
        default_decay = self.weight_decay if num_dims > 1 else 0.0
        for group in self.groups:
            if fnmatch.fnmatchcase(name, group.pattern):
                return Group(group.lr_factor, default_decay if group.weight_decay is None else group.weight_decay)
        return Group(1.0, default_decay)

    def coefficients(self, update: Tensor) -> Tensors:
        """What the equation needs of the update's number (1, 2, ...; FP64 ()), as FP32 device scalars."""
        return ()

    def equation(self, grad: Tensor, master: Tensor, states: Tensors, at: UpdateScalars) -> tuple[Tensor, Tensors]:
        """The new master and states. Shapes: grad, master and each state FP32 (n,)."""
        raise NotImplementedError

    def library_update_(self, grad: Tensor, master: Tensor, states: Tensors, at: LibraryScalars) -> None:
        """The same in place by torch's own fused kernel, for machines without a compiler."""
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

    def coefficients(self, update: Tensor) -> Tensors:
        # As factors, since the compiled loop would divide every vector anew by them: 1 / (1 - beta1^t) and
        # 1 / sqrt(1 - beta2^t), rounded once.
        correction1, correction2 = (1 - beta**update for beta in self.betas)
        return correction1.reciprocal().float(), correction2.rsqrt().float()

    def equation(self, grad: Tensor, master: Tensor, states: Tensors, at: UpdateScalars) -> tuple[Tensor, Tensors]:
        (exp_avg, exp_avg_sq), (debias1, debias2) = states, at.coefficients
        exp_avg = torch.lerp(exp_avg, grad, 1 - self.betas[0])
        exp_avg_sq = torch.lerp(exp_avg_sq, grad.square(), 1 - self.betas[1])
        denom = exp_avg_sq.sqrt() * debias2 + self.eps
        master = master - at.lr * at.weight_decay * master
        master = master - at.lr * debias1 * (exp_avg / denom)
        return master, (exp_avg, exp_avg_sq)

    def library_update_(self, grad: Tensor, master: Tensor, states: Tensors, at: LibraryScalars) -> None:
        exp_avg, exp_avg_sq = states
        torch._fused_adamw_(
            [master], [grad], [exp_avg], [exp_avg_sq], [], [at.update],
            lr=at.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=at.weight_decay, eps=self.eps,
            amsgrad=False, maximize=False, found_inf=at.found_inf,
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

    def equation(self, grad: Tensor, master: Tensor, states: Tensors, at: UpdateScalars) -> tuple[Tensor, Tensors]:
        (momentum_buffer,) = states
        grad = grad + at.weight_decay * master
        momentum_buffer = self.momentum * momentum_buffer + grad
        master = master - at.lr * (grad + self.momentum * momentum_buffer)
        return master, (momentum_buffer,)

    def library_update_(self, grad: Tensor, master: Tensor, states: Tensors, at: LibraryScalars) -> None:
        torch._fused_sgd_(
            [master], [grad], [states[0]],
            weight_decay=at.weight_decay, momentum=self.momentum, lr=at.lr, dampening=0.0,
            nesterov=True, maximize=False, is_first_step=False, found_inf=at.found_inf,
        )  # fmt: skip
