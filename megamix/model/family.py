"""A model of the family that its configuration names, and what such a model comes to without building it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from megamix.config import FAMILY, DecoderConfig
from megamix.model.decoder import Decoder
from megamix.model.transformer import Transformer
from megamix.plugins import FAMILIES


def families() -> list[type[Decoder]]:
    """Return those that are built in, and those of plugins."""
    return [Transformer, *FAMILIES.registered.values()]


def family_of(config: DecoderConfig) -> type[Decoder]:
    """Return the family whose section it is: called with the configuration, it builds the model."""
    found = [family for family in families() if isinstance(config, family.section)]
    # A section may inherit another family's: its own is the longest. Of families that share one, the name tells.
    return max(found, key=lambda family: (len(family.section.__mro__), family.name == config.family))


def section_of(table: Mapping[str, Any]) -> type[DecoderConfig]:
    """Return the section [model] that such keys are of."""
    return cast(type[DecoderConfig], FAMILY.section(table, {}))


def parameter_count(config: DecoderConfig) -> int:
    """Return all parameters, shared ones once."""
    return family_of(config).costs(config).total.params


def flops_per_token(config: DecoderConfig) -> int:
    """Forward and backward of one token in a full sequence: 6 per weight that multiplies it and, for attention, 12 per
    layer, head, number of a head and position; the causal half is not subtracted, recompute is never counted.
    """
    return family_of(config).costs(config).total.flops
