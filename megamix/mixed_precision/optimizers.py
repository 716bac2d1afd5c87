"""The optimizers: what one is made of, and its equation as a pure elementwise function in FP32.

An optimizer is settings and formulas; its states live in the master shard and its equation runs in the fused update.
One of your own is a frozen dataclass under `Optimizer` with `states` and `equation`, and `coefficients` where the
equation needs the update's number.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from megamix import tuned
from megamix.mixed_precision.half_states import by_chance, needs_chance, require_state_dtype

log = logging.getLogger("megamix")

MASTER = "master"  # the name of the weights themselves among a parameter's states
# What stands beside states in checkpoints, in their export and in `megamix verify`.
TAKEN_NAMES = (MASTER, "buffer", "gradient", "step")
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Tensors = tuple[Tensor, ...]
States = dict[str, Tensor]  # by name


class UpdateGroup(NamedTuple):
    """What the parameters of one group share."""

    lr_factor: float
    weight_decay: float
    states: tuple[tuple[str, torch.dtype], ...]

    def new_states(self, numel: int, device: torch.device) -> States:
        return {name: torch.zeros(numel, dtype=dtype, device=device) for name, dtype in self.states}


class UpdateScalars(NamedTuple):
    """What the equation needs besides tensors: FP32 () on the device, so that no value is baked into compiled code."""

    lr: Tensor  # with the group's factor
    weight_decay: Tensor | float  # a number only where nothing is compiled
    coefficients: Tensors  # the optimizer's own


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Parameters whose name matches `pattern` (as a shell pattern: `*.bias`) get their own learning-rate factor and
    weight decay.
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay: float | None = None  # None: the optimizer's

    def __post_init__(self) -> None:
        _require_finite(f"lr_factor of group {self.pattern!r}", self.lr_factor)
        if self.weight_decay is not None:
            _require_finite(f"weight_decay of group {self.pattern!r}", self.weight_decay)


def _require_finite(name: str, value: float) -> None:
    if not 0 <= value < math.inf:  # NaN neither
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}; 0 turns it off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What every optimizer has.

    `lr`: a number, or one per update; past the end the last one holds. `groups`: the first pattern that matches a
    parameter wins; weight decay is 0 for parameters of fewer than two dims (norms, biases) unless a group says
    otherwise.
    """

    lr: float | Sequence[float]
    weight_decay: float = 0.0
    groups: tuple[ParamGroup, ...] = ()

    def __new__(cls, *params: object, **settings: object) -> Self:
        if params:
            raise TypeError(f"{cls.__name__} takes settings by name, and no parameters: write {cls.__name__}(lr=1e-3)")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for group in self.groups:
            if not isinstance(group, ParamGroup):
                raise TypeError(
                    f"groups takes ParamGroup, got {type(group).__name__} {group!r}; write "
                    "ParamGroup(pattern='*.bias', lr_factor=..., weight_decay=...): a group is chosen by its names"
                )
        table = self.lr_table()
        if not table or not all(math.isfinite(lr) and lr >= 0 for lr in table):
            raise ValueError(f"lr must be a finite number of at least 0, or a sequence of such, got {self.lr!r}")
        _require_finite("weight_decay", self.weight_decay)

    def states(self, name: str, shape: tuple[int, ...]) -> Mapping[str, torch.dtype]:
        """Return names and dtypes (FP32, BF16 or FP16) of one parameter's states, zeros at the start; none is fine.

        `shape`: of the whole parameter, whatever ranks divide it. Equal names and dtypes mean interchangeable contents.
        A half state is widened for the equation, and what the equation returns of it is rounded to nearest.
        """
        raise NotImplementedError(f"{type(self).__name__} lacks states(name, shape); return {{}} where it has none")

    def lr_table(self) -> list[float]:
        """Return one per update; a number counts for all. Empty where `lr` is neither."""
        if isinstance(self.lr, Real):
            return [float(self.lr)]
        try:
            return [*map(float, self.lr)]  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return []

    def group_of(self, name: str, shape: tuple[int, ...]) -> UpdateGroup:
        """Return what one parameter shares with its group. `shape`: as for `states`.

        Raises: ValueError naming a state that cannot be.
        """
        states = tuple(self.states(name, shape).items())
        for state, dtype in states:
            if not re.fullmatch(r"\w{1,100}", state) or state in TAKEN_NAMES or dtype not in STATE_DTYPES:
                raise ValueError(
                    f"{type(self).__name__}.states of {name} has {state!r}: {dtype}; a state has a Python name other "
                    f"than {', '.join(TAKEN_NAMES)} and is torch.float32, torch.bfloat16 or torch.float16"
                )
        default_decay = self.weight_decay if len(shape) > 1 else 0.0
        for group in self.groups:
            if fnmatch.fnmatchcase(name, group.pattern):
                decay = default_decay if group.weight_decay is None else group.weight_decay
                return UpdateGroup(group.lr_factor, decay, states)
        return UpdateGroup(1.0, default_decay, states)

    def warn_of_idle_groups(self, names: Sequence[str]) -> None:
        """Log the patterns that match none of a model's parameters: misspelt, or meant for another one."""
        for pattern in (group.pattern for group in self.groups):
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                log.warning("the optimizer's group %r matches no parameter of the model", pattern)

    def coefficients(self, update: Tensor) -> Tensors:
        """Return what the equation needs of the update's number (1, 2, ...; FP64 ()), as FP32 device scalars."""
        return ()

    def equation(self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars) -> tuple[Tensor, States]:
        """Return the new master and states, element by element, out of place; zeros must stay zeros where the gradient
        is zero, as padding's is. `states`: those of a run of parameters that share them.
        Shapes: grad, master and each state FP32 (n,).
        """
        raise NotImplementedError(f"{type(self).__name__} lacks equation(grad, master, states, at)")

    def gated_update_(self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars, found_inf: Tensor) -> None:
        """Put what `equation` gives into master and states; leave them as they were where `found_inf` is set. States in
        their own dtypes.
        """
        wide = {name: state.float() for name, state in states.items()}
        new_master, new_states = self.equation(grad, master, wide, at)
        # The gate selects. Multiplying by zero would not do: 0 * inf is NaN, and would poison the states for ever.
        master.copy_(torch.where(found_inf, master, new_master))
        for name, state in states.items():
            state.copy_(torch.where(found_inf, wide[name], new_states[name]))

    def library_update_(
        self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars, update: Tensor, found_inf: Tensor
    ) -> None:
        """Do the same in place, for machines without a compiler: one operation of torch's after the other, unless torch
        has a fused kernel of this equation. `update` FP32 (): its number, 1 for the first.
        """
        tensors = (grad, master, *states.values())
        size = tuned.piece(tuned.EQUATION_PIECE, grad.numel(), on_gpu=not grad.is_cpu)
        pieces = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
        for piece_grad, piece_master, *rest in pieces:
            self.gated_update_(piece_grad, piece_master, dict(zip(states, rest, strict=True)), at, found_inf)


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
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
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

    def library_update_(
        self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars, update: Tensor, found_inf: Tensor
    ) -> None:
        if type(self).equation is not AdamW.equation or self.takes_chances:
            super(AdamW, self).library_update_(grad, master, states, at, update, found_inf)
            return
        torch._fused_adamw_(
            [master], [grad], [states["exp_avg"]], [states["exp_avg_sq"]], [], [update],
            lr=at.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=float(at.weight_decay), eps=self.eps,
            amsgrad=False, maximize=False, found_inf=found_inf.float(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NAG(Optimizer):
    """SGD with Nesterov's momentum; with momentum 0 plain SGD, without a state.

    `momentum_form`: what the momentum adds up. "gradient": gradients, times the learning rate of the update that uses
    them, as torch.optim.SGD(nesterov=True) does. "velocity": steps, each with the learning rate of its own time, as
    MXNet's mp_nag_mom_update does (src/operator/optimizer_op-inl.h). They are one path while lr is constant.
    `decoupled_weight_decay`: the decay shrinks the master, as AdamW's; else it enters the gradient, as in both peers.
    """

    momentum: float = 0.9
    momentum_form: Literal["gradient", "velocity"] = "gradient"
    decoupled_weight_decay: bool = False
    state_dtype: torch.dtype = torch.float32  # or BF16

    def __post_init__(self) -> None:
        super(NAG, self).__post_init__()
        require_state_dtype(self.state_dtype)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")
        if self.momentum_form not in ("gradient", "velocity"):
            raise ValueError(f'momentum_form must be "gradient" or "velocity", got {self.momentum_form!r}')
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

    def library_update_(
        self, grad: Tensor, master: Tensor, states: States, at: UpdateScalars, update: Tensor, found_inf: Tensor
    ) -> None:
        own_equation = type(self).equation is not NAG.equation
        if self.decoupled_weight_decay or self.momentum_form == "velocity" or own_equation:
            super(NAG, self).library_update_(grad, master, states, at, update, found_inf)
            return
        torch._fused_sgd_(
            [master], [grad], [*states.values()],
            weight_decay=float(at.weight_decay), momentum=self.momentum, lr=at.lr, dampening=0.0,
            nesterov=self.momentum > 0, maximize=False, is_first_step=False, found_inf=found_inf.float(),
        )  # fmt: skip
