"""A family whose Muon takes each head's queries for a matrix of its own, as if one weight held several."""

from typing import Literal

from megamix.config import ModelConfig
from megamix.model.transformer import Transformer
from megamix.plugins import register_family


class PerHeadConfig(ModelConfig):
    """Section of a transformer with matrices per head."""

    family: Literal["per_head"] = "per_head"
    """Name of the family."""


class PerHead(Transformer):
    name, section, formats = "per_head", PerHeadConfig, ()

    @classmethod
    def fused(cls, config):
        return {"*.attention.query.weight": (config.hidden_size // config.num_heads,) * config.num_heads}


register_family(PerHead)
