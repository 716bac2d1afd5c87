"""Train in FP16 with your own loss-scale rule: small steps up, a large one down.

python docs/examples/own_loss_scale.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megamix


class Stairs(megamix.LossScale):
    """Doubles the scale after `patience` clean steps, divides it by 16 at an overflow. Never waits for the device."""

    state_names = ("loss_scale", "clean_steps")  # what checkpoints keep

    def __init__(self, init_scale: float, patience: int):
        super().__init__(init_scale, min_scale=1.0, max_scale=2.0**32)
        self.patience = patience
        self.clean_steps = torch.zeros((), dtype=torch.int32)

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        self.clean_steps.add_(1).masked_fill_(found_inf, 0)
        climb = self.clean_steps >= self.patience
        self.clean_steps.masked_fill_(climb, 0)
        scale = torch.where(climb, scale_used * 2, scale_used)
        scale = torch.where(found_inf, scale_used / 16, scale)
        self.loss_scale.copy_(scale.clamp(self.min_scale, self.max_scale))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
rule = Stairs(init_scale=2.0**24, patience=5)
engine = megamix.ShardedEngine(model, megamix.AdamW(lr=2e-2), megamix.Precision(torch.float16, loss_scale=rule))

for step in range(24):
    tokens = torch.randint(64, (128,))
    engine.backward(F.cross_entropy(engine(tokens).float(), (tokens + 1) % 64))
    result = engine.step()
    overflow = "  overflow, nothing changed" if result.found_inf else ""
    print(f"step {step:2}  loss {result.loss:.3f}  loss scale 2^{result.loss_scale.log2():.0f}{overflow}")
