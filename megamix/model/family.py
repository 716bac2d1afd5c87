"""The family that a configuration names, and the size of its model, known without building it."""

from collections.abc import Mapping
from typing import Any, cast

from megamix.config import FAMILY, DecoderConfig
from megamix.model.language_model import LanguageModel
from megamix.model.transformer import Transformer
from megamix.model.transformers_model import TransformersModel
from megamix.plugins import FAMILIES


def families() -> list[type[LanguageModel]]:
    """Return all families: the built-in ones, and those of plugins."""
    return [Transformer, TransformersModel, *FAMILIES.registered.values()]


def family_of(config: DecoderConfig) -> type[LanguageModel]:
    """Return the family that a section belongs to: a class, which builds the model when called with the section."""
    found = [family for family in families() if isinstance(config, family.section)]
    # A section may derive from another family's section, so the section with the longest MRO is the right one. If
    # several families share a section, `config.family` decides.
    return max(found, key=lambda family: (len(family.section.__mro__), family.name == config.family))


def section_of(table: Mapping[str, Any]) -> type[DecoderConfig]:
    """Return the class of the section [model] to which a table of keys belongs."""
    return cast(type[DecoderConfig], FAMILY.section(table, {}))


def parameter_count(config: DecoderConfig) -> int:
    """Return the number of parameters; shared ones count once."""
    return family_of(config).costs(config).total.params


def flops_per_token(config: DecoderConfig) -> int:
    """Return the operations of forward and backward for one token in a full sequence. They are 6 for each weight that
    multiplies the token and, for attention, 12 for each layer, head, element of a head and position. The causal half is
    not subtracted, and recompute is never counted.
    """
    return family_of(config).costs(config).total.flops
