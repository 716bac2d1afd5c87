"""The loss scale: gradients below 2**-24 vanish in FP16, so the loss is multiplied by a power of two before backward.

Both kinds are device tensors, updated on the device: nobody waits to learn whether a step overflowed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def _require_power_of_two(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value) and math.log2(value) % 1 == 0):
        nearest = 2.0 ** round(math.log2(value)) if value > 0 and math.isfinite(value) else 1.0
        raise ValueError(f"{name} must be a power of two (scaling is then exact), got {value}; use {nearest:g}")


class StaticLossScale:
    """A constant scale. Overflowed steps are still skipped; the scale stays."""

    def __init__(self, init_scale: float = 1.0):
        _require_power_of_two("init_scale", init_scale)
        self.min_scale = init_scale  # it never falls below
        self.loss_scale = torch.tensor(init_scale, dtype=torch.float32)  # FP32 (), on the engine's device after `to`

    def to(self, device: torch.device) -> None:
        self.loss_scale = self.loss_scale.to(device)

    def update_(self, found_inf: Tensor, max_abs: Tensor) -> None:
        """Take note of a step's outcome. Shapes: found_inf bool (); max_abs FP64 (), of the summed gradient with the
        scale still in it.
        """

    def state_dict(self) -> dict[str, Tensor]:
        return {"loss_scale": self.loss_scale.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss_scale.copy_(state["loss_scale"])


class DynamicLossScale(StaticLossScale):
    """Searches the largest scale that does not overflow: grows after clean steps, backs off at an overflow.

    `hysteresis` overflows in a row are needed to back off from a scale that has survived a step. A scale that has
    not (the first one, a growth's, a back-off's) backs off at once: hysteresis would only lose steps to a scale that
    never worked. A clean step forgives earlier overflows. Hence the lower bound on steps lost per growth probe is
    one, and it is met.
    """

    def __init__(
        self,
        init_scale: float = 2.0**24,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,  # clean steps in a row before the scale grows
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
    ):
        super().__init__(init_scale)
        for name, value in (("growth_factor", growth_factor), ("backoff_factor", backoff_factor)):
            _require_power_of_two(name, value)
        for name, value in (("min_scale", min_scale), ("max_scale", max_scale)):
            _require_power_of_two(name, value)
        if growth_factor <= 1 or backoff_factor >= 1:
            raise ValueError(
                f"growth_factor must exceed 1 and backoff_factor stay below it, got {growth_factor}, {backoff_factor}"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError(f"growth_interval and hysteresis must be at least 1, got {growth_interval}, {hysteresis}")
        if not min_scale <= init_scale <= max_scale:
            raise ValueError(
                f"init_scale {init_scale:g} must lie between min_scale {min_scale:g} and max_scale {max_scale:g}"
            )
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.min_scale, self.max_scale = min_scale, max_scale
        self.clean_steps = torch.zeros((), dtype=torch.int32)  # in a row, since the scale last changed
        self.overflows = torch.zeros((), dtype=torch.int32)  # in a row, at this scale
        self.proven = torch.zeros((), dtype=torch.bool)  # a step has been clean at this scale

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.clean_steps, self.overflows = self.clean_steps.to(device), self.overflows.to(device)
        self.proven = self.proven.to(device)

    def update_(self, found_inf: Tensor, max_abs: Tensor) -> None:
        clean_steps = torch.where(found_inf, 0, self.clean_steps + 1)
        overflows = torch.where(found_inf, self.overflows + 1, 0)
        # At the ceiling there is nothing to probe: a growth to the same scale would only unlearn that it works.
        grow = (clean_steps >= self.growth_interval) & (self.loss_scale < self.max_scale)
        back_off = found_inf & ((overflows >= self.hysteresis) | ~self.proven)
        changed = grow | back_off

        grown = (self.loss_scale * self.growth_factor).clamp(max=self.max_scale)
        lowered = (self.loss_scale * self.backoff_factor).clamp(min=self.min_scale)
        self.loss_scale.copy_(torch.where(grow, grown, torch.where(back_off, lowered, self.loss_scale)))
        self.proven.copy_((self.proven | ~found_inf) & ~changed)
        self.clean_steps.copy_(torch.where(changed, 0, clean_steps))
        self.overflows.copy_(torch.where(changed, 0, overflows))

    def state_dict(self) -> dict[str, Tensor]:
        tensors = {"clean_steps": self.clean_steps, "overflows": self.overflows, "proven": self.proven}
        return super().state_dict() | {name: tensor.clone() for name, tensor in tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name in ("clean_steps", "overflows", "proven"):
            getattr(self, name).copy_(state[name])
