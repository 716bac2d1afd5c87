"""What the sections of a configuration are made of: their base and the types that their fields share."""

import math
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat


class Section(BaseModel):
    """A frozen table: unknown keys, wrong types, inf and nan are errors; a whole number may stand for a float."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def power_of_two(value: float) -> float:
    # Multiplying by a power of two moves the exponent alone. Any other scale would round every gradient once on the
    # way in and once on the way out, and the unscaled step would no longer equal the plain one. The scale and its
    # inverse must both be normal FP32 numbers, hence the range.
    mantissa, exponent = math.frexp(value)
    if mantissa != 0.5 or not -126 <= exponent - 1 <= 126:
        raise ValueError("must be a power of two from 2**-126 to 2**126")
    return value


LossScaleName = Literal["auto", "dynamic", "headroom", "torch", "megatron", "deepspeed", "off"]


class ScaleRange(NamedTuple):
    """A loss scale rule's own first value, floor and ceiling, where the keys are not set."""

    init_scale: float
    min_scale: float
    max_scale: float


SCALE_RANGES = {
    "dynamic": ScaleRange(2.0**24, 1.0, 2.0**32),
    "headroom": ScaleRange(1.0, 1.0, 2.0**32),
    "torch": ScaleRange(2.0**16, 0.0, 2.0**127),
    "megatron": ScaleRange(2.0**32, 1.0, 2.0**127),
    "deepspeed": ScaleRange(2.0**16, 1.0, 2.0**127),
}


def loss_scale_rule(loss_scale: str | float, dtype: str) -> str | float:
    """The rule that precision.loss_scale names, auto by the dtype; a number is a fixed scale."""
    if loss_scale == "auto":
        return "dynamic" if dtype == "fp16" else "off"
    return loss_scale


def check_loss_scale(value: object) -> object:
    # One check in front of the union: pydantic would report a bad value once for every member of the union.
    names = get_args(LossScaleName)
    if isinstance(value, str) and value in names:
        return value
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return power_of_two(float(value))
    except (ValueError, OverflowError):
        pass
    words = ", ".join(f'"{name}"' for name in names)
    raise ValueError(f"must be {words} or a power of two from 2**-126 to 2**126")


Text = Annotated[str, Field(min_length=1)]
PowerOfTwo = Annotated[PositiveFloat, AfterValidator(power_of_two)]
Beta = Annotated[float, Field(ge=0, lt=1)]
