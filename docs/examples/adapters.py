"""Train thin adapters beside frozen linear layers: only the adapters have FP32 masters and optimizer states.

python docs/examples/adapters.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megamix


class Adapted(nn.Module):
    """Adds to a frozen linear layer a trained product of two thin matrices, which begins at zero."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def adapt(module: nn.Module, rank: int) -> None:
    """Put adapters on all linear layers below `module`."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Adapted(child, rank))
        else:
            adapt(child, rank)


torch.manual_seed(0)
base = nn.Sequential(nn.Embedding(64, 128), nn.Sequential(nn.Linear(128, 256), nn.GELU()), nn.Linear(256, 64))
base.requires_grad_(False)
adapt(base, rank=8)  # before the engine is built, which then decides what it trains
engine = megamix.ShardedEngine(base, megamix.AdamW(lr=1e-2, weight_decay=0.0), megamix.Precision(torch.bfloat16))

for step in range(60):
    tokens = torch.randint(64, (256,))
    engine.backward(F.cross_entropy(engine(tokens).float(), (tokens + 1) % 64))
    result = engine.step()
    if step % 20 == 0 or step == 59:
        print(f"step {step:2}  loss {result.loss:.3f}")

weights = engine.full_weights()
trained = {name: weights[name] for name, parameter in base.named_parameters() if parameter.requires_grad}
torch.save(trained, "adapters.pt")
share = sum(map(torch.numel, trained.values())) / sum(map(torch.numel, weights.values()))
print(f"saved {len(trained)} tensors, {share:.0%} of all weights")
