"""[precision.loss_scale]: the keys of each rule, with its own defaults. Scales and factors are powers of two."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from megamix.config.choices import ChosenTable, OneOf
from megamix.plugins import LOSS_SCALES, Section
from megamix.settings import loss_scales as settings
from megamix.settings.limits import PowerOfTwo


def loss_scale_rule(rule: str, dtype: object) -> str:
    """Return the rule that is meant: auto names one by the dtype."""
    if rule == "auto":
        return "dynamic" if dtype == "fp16" else "off"
    return rule


class LossScaleConfig(Section):
    """The factor on the loss that keeps gradients in FP16's range. Scales and factors are powers of two."""

    rule: Annotated[str, OneOf(LOSS_SCALES, "auto")] = "auto"
    """auto: dynamic for fp16, else off."""


class _Rule(ChosenTable):
    def choice(self, table: object, beside: Mapping[str, Any]) -> str:
        return loss_scale_rule(super().choice(table, beside), beside.get("dtype"))


LOSS_SCALE = _Rule(LOSS_SCALES, LossScaleConfig, "rule")


class TorchScale(LossScaleConfig, settings.TorchSettings):
    """The rule of torch.amp.GradScaler."""

    min_scale: PowerOfTwo | None = None
    """The scale's floor. Not set: it may vanish."""
    max_scale: PowerOfTwo | None = None
    """The scale's ceiling. Not set: FP32's range."""


class _WithRange(LossScaleConfig):
    min_scale: PowerOfTwo = 1.0
    """The scale's floor."""
    max_scale: PowerOfTwo = 2.0**32
    """The scale's ceiling."""


class DynamicScale(_WithRange, settings.DynamicSettings):
    """The largest scale that does not overflow, searched for: it grows after clean steps."""


class MegatronScale(LossScaleConfig, settings.MegatronSettings):
    """The rule of Megatron-LM."""

    min_scale: PowerOfTwo = 1.0
    """The scale's floor."""
    max_scale: PowerOfTwo | None = None
    """The scale's ceiling. Not set: FP32's range."""


class DeepSpeedScale(MegatronScale, settings.DeepSpeedSettings):
    """The rule of DeepSpeed."""


class HeadroomScale(_WithRange, settings.HeadroomSettings):
    """A measured scale: as far below overflow as margin says."""


class StaticScale(LossScaleConfig):
    """A fixed scale."""

    init_scale: Annotated[PowerOfTwo, Field(examples=[1024.0])]
    """The scale of every step."""


class NoScale(LossScaleConfig):
    """No scale."""


LOSS_SCALES.sections |= {
    "dynamic": DynamicScale, "headroom": HeadroomScale, "torch": TorchScale, "megatron": MegatronScale,
    "deepspeed": DeepSpeedScale, "static": StaticScale, "off": NoScale,
}  # fmt: skip
