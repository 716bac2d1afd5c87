"""The loss scale: gradients below 2**-24 vanish in FP16, so the loss is multiplied by a power of two before backward.

All kinds are device tensors, updated on the device: nobody waits to learn whether a step overflowed. Here are the
constant one, the one that searches and the rules of other trainers, event for event, so that a run can be moved here
unchanged: settings, defaults and order of events of their sources. Two things are ours: scales are powers of two,
and none grows to inf (Megatron's and DeepSpeed's could, and would never return), hence `max_scale`.
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

# Backward never uses less: the update multiplies by the inverse, and FP32's ends at 2**127. A rule without a floor
# may pass it on its way to 0, where one clean step would multiply vanished gradients by inf and the weights be NaN.
SMALLEST_USED = 2.0**-126
LARGEST = 2.0**127  # FP32's largest power of two: the ceiling of a rule that has none


def _check_count(name: str, value: float | list[float], least: int, most: int) -> None:
    """Raises: ValueError unless it is a whole number in that range, and one of INT32."""
    if isinstance(value, list) or not value.is_integer() or not max(least, -(2**31)) <= value <= min(most, 2**31 - 1):
        raise ValueError(f"{name} is {value}, no whole number of {least} to {most}")


class LossScale:
    """Holds what all rules share: a power of two on the device, its range, and the state by which a run goes on."""

    state_names: tuple[str, ...] = ("loss_scale",)  # the tensors that go to the device and into the run's state
    wants_probe = False  # whether a first `engine.probe_loss_scale()` would find a better scale to start from

    def __init__(self, init_scale: float, min_scale: float, max_scale: float):
        # A min_scale of 0 is no floor.
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
        self.min_scale, self.max_scale = float(min_scale), float(max_scale)  # it never leaves this range
        self.loss_scale = torch.tensor(
            float(init_scale), dtype=torch.float32
        )  # FP32 (), on the engine's device after `to`

    def to(self, device: torch.device) -> None:
        for name in self.state_names:
            setattr(self, name, getattr(self, name).to(device))

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        """Take note of a step's outcome. Shapes: found_inf bool (); max_abs FP64 (), of the gradient summed over
        micro-batches and ranks with the scale still in it, anything where found_inf is set; scale_used FP32 (), the
        scale that this step's backward used, whatever `loss_scale` was set to since.
        """
        raise NotImplementedError

    @property
    def rule(self) -> str:
        """Say what its state means: other rules have states of the same names."""
        return type(self).__name__

    def settings(self) -> dict[str, Any]:
        """Return all that decides how it goes on, its first state too, as numbers: equal where two go on alike."""
        return {"rule": self.rule, **vars(self), **{name: state.tolist() for name, state in self.state_dict().items()}}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in self.state_names}

    def check_state(self, state: Mapping[str, float | list[float]], applied: int, skipped: int) -> None:
        """Refuse a state that a run of this rule and these settings cannot have come to.

        `applied`, `skipped`: its updates and overflows so far. Raises: ValueError naming what is wrong.
        """
        if set(state) != set(self.state_names):
            raise ValueError(f"loss_scale has {sorted(state)}, {self.rule} has {sorted(self.state_names)}")
        scale = state["loss_scale"]
        if isinstance(scale, list) or not (scale == 0 or math.frexp(scale)[0] == 0.5):
            raise ValueError(f"loss_scale.loss_scale is {scale}, no power of two")
        if not self.min_scale <= scale <= self.max_scale:
            raise ValueError(f"loss_scale.loss_scale is {scale}, not in {self.min_scale:g} to {self.max_scale:g}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same rule, whatever its settings were when it was saved. The present settings win: the
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
    """Searches the largest scale that does not overflow: grows after clean steps, backs off at an overflow.

    `hysteresis` overflows in a row are needed to back off from a scale that has survived a step. A scale that has
    not (the first one, a growth's, a back-off's) backs off at once: hysteresis would only lose steps to a scale that
    never worked. A clean step forgives earlier overflows. Hence the lower bound on steps lost per growth probe is
    one, and it is met.
    """

    min_scale: float = 1.0
    max_scale: float = 2.0**32

    state_names = ("loss_scale", "clean_steps", "patience")

    def __post_init__(self) -> None:
        check(self)
        super().__init__(self.init_scale, self.min_scale, self.max_scale)
        self.clean_steps = torch.zeros((), dtype=torch.int32)  # in a row, since the scale last grew
        # The overflow from here that backs off: the first (1), the second (2) ... The first scale has yet to work.
        self.patience = torch.ones((), dtype=torch.int32)

    def check_state(self, state: Mapping[str, float | list[float]], applied: int, skipped: int) -> None:
        super().check_state(state, applied, skipped)
        # Not bounded by growth_interval: at the ceiling they go on, and the interval may have been longer before.
        _check_count("loss_scale.clean_steps", state["clean_steps"], 0, applied)
        # Each overflow takes one, and no rule begins or refills with less than 1.
        _check_count("loss_scale.patience", state["patience"], 1 - skipped, self.hysteresis)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.patience.clamp_(max=self.hysteresis)

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        self._count_(found_inf)
        back_off = found_inf & (self.patience <= 0)
        # At the ceiling there is nothing to probe: a growth to the same scale would only unlearn that it works.
        grow = (self.clean_steps >= self.growth_interval) & (self.loss_scale < self.max_scale)
        self._move_(grow, back_off)
        self.clean_steps.masked_fill_(grow, 0)
        self.patience.masked_fill_(~found_inf, self.hysteresis).masked_fill_(grow | back_off, 1)

    def _count_(self, found_inf: Tensor) -> None:
        self.clean_steps.add_(1).masked_fill_(found_inf, 0)
        self.patience.add_(found_inf, alpha=-1)

    def _move_(self, grow: Tensor, back_off: Tensor) -> None:
        grown = (self.loss_scale * self.growth_factor).clamp(max=self.max_scale)
        lowered = (self.loss_scale * self.backoff_factor).clamp(min=self.min_scale)
        self.loss_scale.copy_(torch.where(grow, grown, torch.where(back_off, lowered, self.loss_scale)))


@dataclass(eq=False)
class TorchLossScale(DynamicLossScale):
    """`torch.amp.GradScaler`: every overflow backs off, nothing is too small, and a growth to inf is left out.

    Without a floor the scale reaches 0.0 and stays there; the engine's backward then uses 2**-126.
    Source: `torch._amp_update_scale_`, aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp.
    """

    init_scale: float = TorchSettings.init_scale
    hysteresis: int = field(default=1, init=False)
    min_scale: float = 0.0
    max_scale: float = LARGEST

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        self._count_(found_inf)
        # Not ==, here and below: a run that goes on with a shorter interval may have counted more than that already.
        due = self.clean_steps >= self.growth_interval
        self._move_(due & torch.isfinite(self.loss_scale * self.growth_factor), found_inf)
        self.clean_steps.masked_fill_(due, 0)


@dataclass(eq=False)
class MegatronLossScale(MegatronSettings, DynamicLossScale):
    """Megatron-LM's DynamicGradScaler: the `hysteresis`-th overflow since the last growth backs off, and so does
    every later one until the scale grows again. Clean steps in between forgive nothing.

    Source: megatron/core/optimizer/grad_scaler.py at 00caa53, defaults in optimizer_config.py beside it.
    """

    growth_factor: float = field(default=2.0, init=False)
    backoff_factor: float = field(default=0.5, init=False)
    max_scale: float = LARGEST

    _window_starts_at = 0  # clean steps

    def __post_init__(self) -> None:
        super().__post_init__()
        self.patience.fill_(self.hysteresis)

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        self._count_(found_inf)
        grow = self.clean_steps >= self.growth_interval + self._window_starts_at
        self._move_(grow, found_inf & (self.patience <= 0))
        self.clean_steps.masked_fill_(grow, self._window_starts_at)
        self.patience.masked_fill_(self._restores(grow, found_inf), self.hysteresis)

    def _restores(self, grow: Tensor, found_inf: Tensor) -> Tensor:
        return grow


@dataclass(eq=False)
class DeepSpeedLossScale(DeepSpeedSettings, MegatronLossScale):
    """DeepSpeed's DynamicLossScaler: as Megatron's, but the window begins at the first clean step after an overflow,
    so growth comes one step later: after 1 + n * growth_interval clean steps.

    `consecutive_hysteresis`: any clean step restores the hysteresis, not only a growth. At the floor DeepSpeed ends
    the run; here the scale stays there, and when to give up is the caller's decision.
    Source: deepspeed/runtime/fp16/loss_scaler.py at 18fd4c9, defaults in deepspeed/runtime/precision_config.py.
    """

    _window_starts_at = 1

    def _restores(self, grow: Tensor, found_inf: Tensor) -> Tensor:
        return ~found_inf if self.consecutive_hysteresis else grow
