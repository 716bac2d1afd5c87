"""Train without megamix, and learn nothing: the BF16 weights have no FP32 masters.

megamix audit -- python docs/examples/wrong/half_weights.py
"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-6)

for step in range(1000):
    tokens = torch.randint(256, (512,))
    loss = F.cross_entropy(model(tokens).float(), (tokens + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.3f}")
