"""The loss scale rules of other trainers, event for event, so that a run can be moved here unchanged.

Each has the settings, the defaults and the order of events of its source. Two things are ours: scales are powers of
two, and none grows to inf (Megatron's and DeepSpeed's could, and would never return), hence `max_scale`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamix.mixed_precision.loss_scale import LARGEST, DynamicLossScale


class TorchLossScale(DynamicLossScale):
    """`torch.amp.GradScaler`: every overflow backs off, nothing is too small, and a growth to inf is left out.

    Without a floor the scale reaches 0.0 and stays there; the engine's backward then uses 2**-126.
    Source: `torch._amp_update_scale_`, aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 0.0,
        max_scale: float = LARGEST,
    ):
        super().__init__(
            init_scale, growth_factor, backoff_factor, growth_interval, min_scale=min_scale, max_scale=max_scale
        )

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        self._count_(found_inf)
        # Not ==, here and below: a run that goes on with a shorter interval may have counted more than that already.
        due = self.clean_steps >= self.growth_interval
        self._move_(due & torch.isfinite(self.loss_scale * self.growth_factor), found_inf)
        self.clean_steps.masked_fill_(due, 0)


class MegatronLossScale(DynamicLossScale):
    """Megatron-LM's DynamicGradScaler: the `hysteresis`-th overflow since the last growth backs off, and so does
    every later one until the scale grows again. Clean steps in between forgive nothing.

    Source: megatron/core/optimizer/grad_scaler.py at 00caa53, defaults in optimizer_config.py beside it.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        growth_interval: int = 1000,  # --loss-scale-window
        hysteresis: int = 2,
        min_scale: float = 1.0,
        max_scale: float = LARGEST,
    ):
        super().__init__(init_scale, 2.0, 0.5, growth_interval, hysteresis, min_scale, max_scale)
        self.patience.fill_(hysteresis)

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        self._count_(found_inf)
        grow = self.clean_steps >= self.growth_interval
        self._move_(grow, found_inf & (self.patience <= 0))
        self.clean_steps.masked_fill_(grow, 0)
        self.patience.masked_fill_(grow, self.hysteresis)


class DeepSpeedLossScale(DynamicLossScale):
    """DeepSpeed's DynamicLossScaler: as Megatron's, but the window begins at the first clean step after an overflow,
    so growth comes one step later: after 1 + n * growth_interval clean steps.

    `consecutive_hysteresis`: any clean step restores the hysteresis, not only a growth. At the floor DeepSpeed ends
    the run; here the scale stays there, and when to give up is the caller's decision.
    Source: deepspeed/runtime/fp16/loss_scaler.py at 18fd4c9, defaults in deepspeed/runtime/precision_config.py.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,  # 2**initial_scale_power
        growth_interval: int = 1000,  # loss_scale_window
        hysteresis: int = 2,
        min_scale: float = 1.0,
        max_scale: float = LARGEST,
        consecutive_hysteresis: bool = False,
    ):
        super().__init__(init_scale, 2.0, 0.5, growth_interval, hysteresis, min_scale, max_scale)
        self.consecutive_hysteresis = consecutive_hysteresis
        self.patience.fill_(hysteresis)

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        self._count_(found_inf)
        grow = self.clean_steps >= self.growth_interval + 1
        self._move_(grow, found_inf & (self.patience <= 0))
        self.clean_steps.masked_fill_(grow, 1)
        self.patience.masked_fill_(~found_inf if self.consecutive_hysteresis else grow, self.hysteresis)
