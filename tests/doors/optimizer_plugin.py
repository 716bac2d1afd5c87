"""Lion (Chen et al. 2023, algorithm 2) as an optimizer of one's own: one state, and a step that is a sign."""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.plugins import Section, register_optimizer


class LionKeys(Section):
    """[optimizer.lion]"""

    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.99)  # TOML has lists
    """Share of the momentum in the direction, and in the momentum to come."""


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    betas: tuple[float, float] = (0.9, 0.99)

    def states(self, name, shape):
        return {"momentum": torch.float32}

    def equation(self, grad, master, states, at):
        momentum = states["momentum"]
        direction = torch.lerp(momentum, grad, 1 - self.betas[0]).sign()
        master = master - at.lr * (direction + at.weight_decay * master)
        return master, {"momentum": torch.lerp(momentum, grad, 1 - self.betas[1])}


register_optimizer("lion", LionKeys, Lion)
