"""Train a convolutional net to tell which way stripes run, in BF16 with Nesterov's momentum.

python docs/examples/convolutional_net.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megamix

STEPS, LR = 60, 0.05


def stripes(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy images FP32 (count, 1, 16, 16), and the direction of their stripes, INT64 (count,), 0 to 3."""
    labels = torch.randint(4, (count,))
    angles = (labels * torch.pi / 4).view(-1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.sin(rows * angles.cos() + columns * angles.sin() + 6 * torch.rand(count, 1, 1))
    return (waves + 0.5 * torch.randn(count, 16, 16)).unsqueeze(1), labels


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.GroupNorm(4, 16),  # BatchNorm would compute statistics of each rank's samples alone
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.GroupNorm(4, 32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 4),
)
cosine = [LR * (1 + torch.cos(torch.tensor(torch.pi * step / STEPS)).item()) / 2 for step in range(STEPS)]
engine = megamix.ShardedEngine(model, megamix.NAG(lr=cosine, weight_decay=1e-4), megamix.Precision(torch.bfloat16))

for step in range(STEPS):
    images, labels = stripes(64)
    logits = engine(images.bfloat16())  # inputs have the dtype of the weights
    engine.backward(F.cross_entropy(logits.float(), labels))
    result = engine.step()
    if step % 15 == 0 or step == STEPS - 1:
        print(f"step {step:2}  loss {result.loss:.3f}  lr {result.lr:.4f}")

model.eval()
with torch.no_grad():
    images, labels = stripes(512)
    right = (model(images.bfloat16()).argmax(1) == labels).float().mean()
print(f"{right:.0%} of new images are right")
