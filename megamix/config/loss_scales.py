"""[precision.loss_scale]: the keys of each rule, with its own defaults. Scales and factors are powers of two."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from megamix.config.choices import ChosenTable, OneOf
from megamix.config.model_and_data import PowerOfTwo
from megamix.plugins import LOSS_SCALES, Section


def loss_scale_rule(rule: str, dtype: object) -> str:
    """Return the rule that is meant: auto names one by the dtype."""
    if rule == "auto":
        return "dynamic" if dtype == "fp16" else "off"
    return rule


class LossScaleConfig(Section):
    """The factor on the loss, so that gradients do not vanish below FP16's range."""

    rule: Annotated[str, OneOf(LOSS_SCALES, "auto")] = "auto"
    """auto (dynamic for fp16, off otherwise), dynamic, headroom, the rule of torch, megatron or deepspeed, static,
    or off."""


class _Rule(ChosenTable):
    def choice(self, table: object, beside: Mapping[str, Any]) -> str:
        return loss_scale_rule(super().choice(table, beside), beside.get("dtype"))


LOSS_SCALE = _Rule(LOSS_SCALES, LossScaleConfig, "rule")

InitScale = Annotated[PowerOfTwo, Field(description="The first scale.")]
GrowthInterval = Annotated[PositiveInt, Field(description="Clean steps in a row before the scale grows.")]
MinScale = Annotated[PowerOfTwo, Field(description="The scale never falls below this.")]
MaxScale = Annotated[PowerOfTwo, Field(description="The scale never grows beyond this.")]
NoCeiling = Annotated[
    PowerOfTwo | None, Field(description="The scale never grows beyond this. Not set: FP32's range is the limit.")
]


class TorchScale(LossScaleConfig):
    """The rule of torch.amp.GradScaler."""

    init_scale: InitScale = 2.0**16
    growth_factor: Annotated[PowerOfTwo, Field(gt=1)] = 2.0
    """Multiplies the scale after growth_interval clean steps."""
    backoff_factor: Annotated[PowerOfTwo, Field(lt=1)] = 0.5
    """Multiplies the scale after an overflow."""
    growth_interval: GrowthInterval = 2000
    min_scale: PowerOfTwo | None = None
    """The scale never falls below this. Not set: it may vanish."""
    max_scale: NoCeiling = None


class DynamicScale(TorchScale):
    """The largest scale that does not overflow, searched for: it grows after clean steps."""

    init_scale: InitScale = 2.0**24
    hysteresis: PositiveInt = 1
    """Overflows in a row before the scale backs off; an untried scale backs off at once."""
    min_scale: MinScale = 1.0
    max_scale: MaxScale = 2.0**32


class MegatronScale(LossScaleConfig):
    """The rule of Megatron-LM."""

    init_scale: InitScale = 2.0**32
    growth_interval: GrowthInterval = 1000
    hysteresis: PositiveInt = 2
    """Overflows since the last growth before the scale backs off."""
    min_scale: MinScale = 1.0
    max_scale: NoCeiling = None


class DeepSpeedScale(MegatronScale):
    """The rule of DeepSpeed."""

    init_scale: InitScale = 2.0**16
    consecutive_hysteresis: bool = False
    """Whether any clean step restores the hysteresis, not only a growth."""


class HeadroomScale(LossScaleConfig):
    """A measured scale: as far below overflow as margin says."""

    init_scale: PowerOfTwo = 1.0
    """The scale of the probe that finds the first one."""
    margin: Annotated[PowerOfTwo, Field(ge=2)] = 4.0
    """Factor between the largest gradient of the last 1000 steps and overflow."""
    min_scale: MinScale = 1.0
    max_scale: MaxScale = 2.0**32


class StaticScale(LossScaleConfig):
    """A fixed scale."""

    init_scale: Annotated[PowerOfTwo, Field(examples=[1024.0])]
    """The scale of every step."""


class NoScale(LossScaleConfig):
    """None."""


LOSS_SCALES.sections |= {
    "dynamic": DynamicScale,
    "headroom": HeadroomScale,
    "torch": TorchScale,
    "megatron": MegatronScale,
    "deepspeed": DeepSpeedScale,
    "static": StaticScale,
    "off": NoScale,
}
