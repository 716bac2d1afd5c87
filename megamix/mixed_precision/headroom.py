"""A loss scale that measures: it stays below overflow by `margin`, according to the gradients of the last steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamix.mixed_precision.loss_scale import LossScale
from megamix.settings.limits import Count, check
from megamix.settings.loss_scales import HeadroomSettings

FP16_MAX = 65504.0  # limit of every gradient and of its sum over micro-batches and ranks
_EXPONENT = 0x7FF0_0000_0000_0000  # mask of FP64's exponent bits: it rounds a number down to a power of two


@dataclass(eq=False)
class HeadroomLossScale(LossScale, HeadroomSettings):
    """Takes the largest power of two that keeps `margin` between the largest gradient of the last `window` steps and
    65504.

    The scale moves up or down, by any power of two, after each step. So overflow is rare, whereas a scale that searches
    overflows once per growth. If the steps' gradients were alike, one step in window + 1 would have a larger gradient
    than the `window` steps before it. To overflow, the gradient must be more than `margin` times as large.

    An overflow hides the size of its gradient. It counts as a gradient that calls for half the scale of that step, and
    is forgotten after `window` steps like any other. This is right for an outlier, and for an overflow inside backward
    that the parameters' gradients do not show. A NaN that no scale cures costs one octave. A step whose gradients are
    all zero says nothing about the size. While there are only such steps the scale doubles, because gradients that
    have vanished look the same.

    The first scale is low, because only the largest gradient matters and it survives at a low scale.
    `engine.probe_loss_scale()` on the first batch then finds the scale of the first step. Without the probe the first
    step itself runs at `init_scale`.
    """

    window: Count = 1000  # number of steps
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    state_names = ("loss_scale", "peaks")

    def __post_init__(self) -> None:
        check(self)
        super().__init__(self.init_scale, self.min_scale, self.max_scale)
        # FP64 (window,): largest magnitude of each step's summed gradient, without the scale, newest first; 0: unknown.
        self.peaks = torch.zeros(self.window, dtype=torch.float64)
        self.wants_probe = True

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        calls_for_half = 2 * FP16_MAX / self.margin
        peak = torch.where(found_inf, calls_for_half, max_abs) / scale_used
        self.peaks.copy_(torch.cat([peak.view(1), self.peaks[:-1]]))
        largest = self.peaks.amax()
        room = FP16_MAX / self.margin / largest
        scale = (room.view(torch.int64) & _EXPONENT).view(torch.float64).clamp(self.min_scale, self.max_scale)
        doubled = (2 * self.loss_scale).clamp(max=self.max_scale)
        self.loss_scale.copy_(torch.where(largest > 0, scale, doubled))
        self.wants_probe = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        peaks = state["peaks"]  # a shorter window keeps the newest peaks; a longer one adds 0: unknown
        fitted = torch.cat([peaks, peaks.new_zeros(self.peaks.shape)])[: self.peaks.numel()]
        super().load_state_dict({**state, "peaks": fitted})
        self.wants_probe = False
