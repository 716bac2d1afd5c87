"""A mixture of experts with a router of its own: a score is the root of a softplus, and a bias moves by how far its
expert's load is from the mean, not by the sign alone.
"""

from typing import Literal

import torch.nn.functional as F
from pydantic import NonNegativeFloat

from megamix import Tally
from megamix.config import ModelConfig
from megamix.model.experts import Experts, Router
from megamix.model.transformer import Transformer
from megamix.plugins import register_family


class RootConfig(ModelConfig):
    """A mixture whose biases move in proportion to loads."""

    family: Literal["root"] = "root"
    """Name of the family."""
    gain: NonNegativeFloat = 0.01
    """Step of a bias for a load that is off by its mean."""


class RootRouter(Router):
    def scores(self, logits):
        return F.softplus(logits).sqrt()


class Root(Transformer):
    name, section = "root", RootConfig
    formats = ()

    def block(self, config, layer):
        block = super().block(config, layer)
        if isinstance(block.feed_forward, Experts):
            router = RootRouter(config, config.experts, self.ops)
            router.balance = Tally(
                config.experts.num_experts, lambda bias, counts: bias + config.gain * (1 - counts / counts.mean())
            )
            block.feed_forward.router = router
        return block


register_family(Root)
