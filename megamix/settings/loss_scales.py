"""Settings of the loss-scale rules, except the limits of the scale."""

from dataclasses import dataclass
from typing import Annotated

from megamix.settings.limits import Count, Limits, PowerOfTwo


@dataclass
class TorchSettings:
    """Declares the settings of torch's rule."""

    init_scale: PowerOfTwo = 2.0**16
    """The first scale."""
    growth_factor: Annotated[float, Limits(gt=1, power_of_two=True)] = 2.0
    """Multiplies the scale after growth_interval clean steps."""
    backoff_factor: Annotated[float, Limits(gt=0, lt=1, power_of_two=True)] = 0.5
    """Multiplies the scale after an overflow."""
    growth_interval: Count = 2000
    """Clean steps in a row before the scale grows."""


@dataclass
class DynamicSettings(TorchSettings):
    """Declares the settings of the dynamic rule."""

    init_scale: PowerOfTwo = 2.0**24
    hysteresis: Count = 1
    """Overflows in a row before the scale backs off; an untried scale backs off at once."""


@dataclass
class MegatronSettings:
    """Declares the settings of Megatron-LM's rule."""

    init_scale: PowerOfTwo = 2.0**32
    """The first scale."""
    growth_interval: Count = 1000
    """Clean steps in a row before the scale grows."""
    hysteresis: Count = 2
    """Overflows since the last growth before the scale backs off."""


@dataclass
class DeepSpeedSettings(MegatronSettings):
    """Declares the settings of DeepSpeed's rule."""

    init_scale: PowerOfTwo = 2.0**16
    consecutive_hysteresis: bool = False
    """Whether any clean step restores the hysteresis, not only a growth."""


@dataclass
class HeadroomSettings:
    """Declares the settings of the headroom rule."""

    init_scale: PowerOfTwo = 1.0
    """Scale of the probe that finds the first one."""
    margin: Annotated[float, Limits(ge=2, power_of_two=True)] = 4.0
    """Factor between the largest gradient of the last 1000 steps and overflow."""
