"""Record a metric within a forward: the share of zeros that each ReLU returns.

python docs/examples/own_metric.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megamix


class Layer(nn.Module):
    def __init__(self, name: str, width: int):
        super().__init__()
        self.name, self.linear = name, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.linear(x))
        megamix.record(f"{self.name}/idle", (out == 0).float().mean())
        megamix.record(f"{self.name}/peak", out.amax(), reduce="max")
        return x + out


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), Layer("first", 32), Layer("second", 32), nn.Linear(32, 64))
engine = megamix.ShardedEngine(model, megamix.AdamW(lr=1e-2), megamix.Precision(torch.bfloat16), grad_accum_steps=2)

for step in range(40):
    for tokens in torch.randint(64, (2, 128)):
        engine.backward(F.cross_entropy(engine(tokens).float(), (tokens + 1) % 64))
    result = engine.step()
    if step % 10 == 0 or step == 39:
        metrics = "  ".join(f"{name} {value:.2f}" for name, value in result.recorded.values().items())
        print(f"step {step:2}  loss {result.loss:.3f}  {metrics}")
