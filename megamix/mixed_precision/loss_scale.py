"""The loss scale: gradients below 2**-24 vanish in FP16, so the loss is multiplied by a power of two before backward.

All kinds are device tensors, updated on the device, so the host never waits to learn whether a step overflowed.

This file has the constant scale, the scale that searches, and the rules of other trainers. Those rules keep the
settings, the defaults and the order of events of their sources, so that a run can be moved here unchanged. Two things
differ: every scale is a power of two, and none grows beyond `max_scale`. Megatron's and DeepSpeed's scales can grow to
inf and then stay there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megamix.settings.limits import check
from megamix.settings.loss_scales import DeepSpeedSettings, DynamicSettings, MegatronSettings, TorchSettings

# Backward never uses a smaller scale: the update multiplies by the inverse, which must fit into FP32. The scale of a
# rule without a floor may fall to 0. Without this limit the next clean step would multiply vanished gradients by inf,
# and the weights would become NaN.
SMALLEST_USED = 2.0**-126
LARGEST = 2.0**127  # FP32's largest power of two: the ceiling of a rule that has none itself


class LossScale:
    """Base class of all rules: a power of two on the device, its range, and the state that checkpoints keep."""

    state_names: tuple[str, ...] = ("loss_scale",)  # the tensors that lie on the device and that checkpoints keep
    wants_probe = False  # whether a first `engine.probe_loss_scale()` would find a better scale to start from

    def __init__(self, init_scale: float, min_scale: float, max_scale: float):
        # min_scale 0 means that there is no floor. It is the only value that need not be a power of two.
        for name, value in {"init_scale": init_scale, "max_scale": max_scale, "min_scale": min_scale or 1.0}.items():
            if not isinstance(value, Real) or isinstance(value, bool):
                raise TypeError(f"{name} of {self.rule} must be a number, got {value!r}; write for example 1024.0")
            if not (0 < value <= LARGEST and math.frexp(value)[0] == 0.5):
                nearest = 2.0 ** min(round(math.log2(value)), 127) if 0 < value < math.inf else 1.0
                raise ValueError(f"{name} must be a power of two (scaling is then exact), got {value}; use {nearest:g}")
        if not min_scale <= init_scale <= max_scale:
            raise ValueError(
                f"init_scale {init_scale:g} must lie between min_scale {min_scale:g} and max_scale {max_scale:g}"
            )
        self.min_scale, self.max_scale = float(min_scale), float(max_scale)  # the scale never leaves this range
        # FP32 (), on the engine's device after `to`
        self.loss_scale = torch.tensor(float(init_scale), dtype=torch.float32)

    def to(self, device: torch.device) -> None:
        for name in self.state_names:
            setattr(self, name, getattr(self, name).to(device))

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        """Change the scale after a step.

        Shapes: found_inf bool (); max_abs FP64 (), the largest element of the gradient, summed over micro-batches and
        ranks and not unscaled, arbitrary if found_inf is set; scale_used FP32 (), the scale of this step's backward,
        even if `loss_scale` has been set to another value since.
        """
        raise NotImplementedError

    @property
    def rule(self) -> str:
        """Return the name of the rule. It says what the state means, because several rules use the same state names."""
        return type(self).__name__

    def settings(self) -> dict[str, Any]:
        """Return the settings and the state as numbers. Two loss scales for which these are equal behave alike."""
        return {"rule": self.rule, **vars(self), **{name: state.tolist() for name, state in self.state_dict().items()}}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in self.state_names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the same rule, which may have been saved with other settings. The present settings win: the
        scale is clamped to their range, so a static scale keeps its own value.
        """
        for name in self.state_names:
            getattr(self, name).copy_(state[name])
        self.loss_scale.clamp_(self.min_scale, self.max_scale)


class StaticLossScale(LossScale):
    """Keeps a constant scale. Overflowed steps are still skipped; the scale stays."""

    def __init__(self, init_scale: float = 1.0):
        super().__init__(init_scale, init_scale, init_scale)

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        pass


@dataclass(eq=False)
class DynamicLossScale(LossScale, DynamicSettings):
    """Searches for the largest scale that does not overflow: it grows after clean steps and backs off at an overflow.

    A scale with which a step was clean backs off after `hysteresis` overflows in a row; a clean step between them
    starts the count again. A scale with which no step was clean so far backs off at its first overflow, because
    hysteresis would only lose more steps to a scale that has never worked. So a growth to a scale that overflows costs
    one step.
    """

    min_scale: float = 1.0
    max_scale: float = 2.0**32

    state_names = ("loss_scale", "clean_steps", "patience")

    def __post_init__(self) -> None:
        check(self)
        super().__init__(self.init_scale, self.min_scale, self.max_scale)
        self.clean_steps = torch.zeros((), dtype=torch.int32)  # clean steps in a row since the scale last grew
        # Number of further overflows at which the scale backs off. It begins at 1, because the first scale has not
        # worked yet.
        self.patience = torch.ones((), dtype=torch.int32)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.patience.clamp_(max=self.hysteresis)

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        self.clean_steps.add_(1).masked_fill_(found_inf, 0)
        self.patience.add_(found_inf, alpha=-1)
        # >= and not ==: a run that goes on with a shorter interval may have counted more steps already.
        grow = (self.clean_steps >= self.growth_interval + self._window_starts_at) & self._may_grow()
        back_off = found_inf & (self.patience <= 0)
        grown = (self.loss_scale * self.growth_factor).clamp(max=self.max_scale)
        lowered = (self.loss_scale * self.backoff_factor).clamp(min=self.min_scale)
        self.loss_scale.copy_(torch.where(grow, grown, torch.where(back_off, lowered, self.loss_scale)))
        self.clean_steps.masked_fill_(grow, self._window_starts_at)
        self._refill_(found_inf, grow, back_off)

    # Each rule overrides some of these.

    _window_starts_at = 0  # clean steps

    def _may_grow(self) -> Tensor | bool:
        # Not at max_scale: it would keep the scale but reset `patience`, as if the scale had never worked.
        return self.loss_scale < self.max_scale

    def _refill_(self, found_inf: Tensor, grow: Tensor, back_off: Tensor) -> None:
        self.patience.masked_fill_(~found_inf, self.hysteresis).masked_fill_(grow | back_off, 1)


@dataclass(eq=False)
class TorchLossScale(DynamicLossScale):
    """The rule of `torch.amp.GradScaler`: every overflow backs off, no scale is too small, and a growth to inf is left
    out.

    Without a floor the scale may reach 0.0, where it stays. The engine's backward then uses 2**-126.
    Source: `torch._amp_update_scale_`, aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp.
    """

    init_scale: float = TorchSettings.init_scale
    hysteresis: int = field(default=1, init=False)
    min_scale: float = 0.0
    max_scale: float = LARGEST

    def _may_grow(self) -> Tensor:
        return torch.isfinite(self.loss_scale * self.growth_factor)


@dataclass(eq=False)
class MegatronLossScale(MegatronSettings, DynamicLossScale):
    """The rule of Megatron-LM's DynamicGradScaler: the `hysteresis`-th overflow since the last growth backs off, and so
    does every later one until the scale grows again. Clean steps in between do not change the count.

    Source: megatron/core/optimizer/grad_scaler.py at 00caa53, defaults in optimizer_config.py beside it.
    """

    growth_factor: float = field(default=2.0, init=False)
    backoff_factor: float = field(default=0.5, init=False)
    max_scale: float = LARGEST

    def __post_init__(self) -> None:
        super().__post_init__()
        self.patience.fill_(self.hysteresis)

    def _may_grow(self) -> bool:
        return True

    def _refill_(self, found_inf: Tensor, grow: Tensor, back_off: Tensor) -> None:
        self.patience.masked_fill_(grow, self.hysteresis)


@dataclass(eq=False)
class DeepSpeedLossScale(DeepSpeedSettings, MegatronLossScale):
    """The rule of DeepSpeed's DynamicLossScaler. It is Megatron's rule, but the first clean step after an overflow does
    not count. So growth comes one step later: after 1 + n * growth_interval clean steps.

    `consecutive_hysteresis`: any clean step restores the hysteresis, not only a growth. DeepSpeed ends a run that
    overflows at min_scale. Here the scale stays at min_scale, and the caller decides when to give up.
    Source: deepspeed/runtime/fp16/loss_scaler.py at 18fd4c9, defaults in deepspeed/runtime/precision_config.py.
    """

    _window_starts_at = 1

    def _refill_(self, found_inf: Tensor, grow: Tensor, back_off: Tensor) -> None:
        self.patience.masked_fill_(~found_inf if self.consecutive_hysteresis else grow, self.hysteresis)
