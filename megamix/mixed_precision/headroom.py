"""A loss scale that measures: it stays below overflow by `margin`, according to the gradients of the last steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamix.mixed_precision.loss_scale import SMALLEST_USED, LossScale
from megamix.settings.limits import Count, check
from megamix.settings.loss_scales import HeadroomSettings

FP16_MAX = 65504.0  # limit of every gradient and of its sum over micro-batches and ranks
_LARGEST_PEAK = 2.0**128 / SMALLEST_USED  # more than any gradient in FP32, without the scale
_EXPONENT = 0x7FF0_0000_0000_0000  # the bits of an FP64 number that are left when it is rounded down to a power of two


@dataclass(eq=False)
class HeadroomLossScale(LossScale, HeadroomSettings):
    """Takes the largest power of two that keeps `margin` between the largest gradient of the last `window` steps and
    65504.

    It moves both ways, by any power of two, in the step that calls for it. So overflow is rare, where a search
    overflows once per growth. If all gradients were alike, a new one would exceed the `window` before it in one step of
    window + 1; to overflow it must exceed them `margin`-fold.

    An overflow hides its gradient's size. It counts as a gradient that calls for half the scale it happened at, and is
    forgotten after `window` steps as any other. That is right for an outlier and for overflow inside backward that the
    parameters' gradients do not show. It costs one octave for a NaN that no scale cures. A step of zeros alone tells
    nothing. While there are only such steps the scale doubles, because gradients that have all vanished look the same.

    The first scale is low, because the largest gradient survives at a low scale and only the largest matters.
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

    def check_state(self, state: Mapping[str, float | list[float]], applied: int, skipped: int) -> None:
        super().check_state(state, applied, skipped)
        peaks, steps = state["peaks"], applied + skipped + 1  # the probe counts as a step
        if not isinstance(peaks, list) or len(peaks) != len(self.peaks):
            raise ValueError(f"loss_scale.peaks: there must be {len(self.peaks)}")
        if not all(0 <= peak <= _LARGEST_PEAK for peak in peaks) or any(peaks[steps:]):
            raise ValueError(f"loss_scale.peaks: they are no magnitudes of {steps} gradients")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        peaks = state["peaks"]  # another window keeps the newest ones; those before them are unknown
        fitted = torch.cat([peaks, peaks.new_zeros(self.peaks.shape)])[: self.peaks.numel()]
        super().load_state_dict({**state, "peaks": fitted})
        self.wants_probe = False
