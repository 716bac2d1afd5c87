"""A loss scale that doubles every `patience` clean steps and returns to `init_scale` at an overflow."""

import torch
from pydantic import Field, PositiveInt

from megamix.mixed_precision.loss_scale import LossScale
from megamix.plugins import Section, register_loss_scale


class StairsConfig(Section):
    """Up in steps, down at once."""

    init_scale: float = Field(2.0**8, gt=0)
    """A power of two: the lowest scale."""
    patience: PositiveInt = 2
    """Clean steps before it doubles."""


class Stairs(LossScale):
    state_names = ("loss_scale", "clean_steps")

    def __init__(self, init_scale, patience):
        super().__init__(init_scale, init_scale, 2.0**24)
        self.patience = patience
        self.clean_steps = torch.zeros((), dtype=torch.int32)

    def update_(self, found_inf, max_abs, scale_used):
        self.clean_steps.copy_((self.clean_steps + 1).masked_fill(found_inf, 0))
        grown = torch.where(self.clean_steps % self.patience == 0, scale_used * 2, scale_used)
        self.loss_scale.copy_(grown.masked_fill(found_inf, self.min_scale).clamp(max=self.max_scale))


register_loss_scale("stairs", StairsConfig, Stairs)
