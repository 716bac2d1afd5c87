"""Train the same classifier with megamix.

torchrun --nproc-per-node 2 docs/examples/from_ddp/after.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import megamix

STEPS, ACCUM, LR = 16, 2, 2**-5


def lr_factor(step: int) -> float:
    return min((step + 1) / 4, (STEPS - step) / STEPS)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(32, (64,), generator=generator)
    return 3 * F.one_hot(labels, 64) + torch.randn(64, 64, generator=generator), labels


dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
average = AveragedModel(model, avg_fn=lambda mean, weight, count: mean.lerp(weight.float(), 0.1))
engine = megamix.ShardedEngine(
    model,
    megamix.AdamW(lr=[LR * lr_factor(step) for step in range(STEPS)], betas=(0.9, 0.95), weight_decay=0.1),
    megamix.Precision(torch.bfloat16, grad_dtype=torch.float32),
    clip_grad=1.0,
    grad_accum_steps=ACCUM,
    compile_update=False,  # torch's AdamW kernel, to compare; leave it out afterwards
)

for step in range(STEPS):
    for micro in range(ACCUM):
        images, labels = batch((step * ACCUM + micro) * world_size + rank)
        logits = engine(images.bfloat16())
        loss = F.cross_entropy(logits.float(), labels)
        engine.backward(loss)
    result = engine.step()
    average.update_parameters(model)
    if rank == 0:
        print(f"step {step} loss {result.loss.item()}")

model.eval()
images, labels = batch(1_000_000)
with torch.no_grad():
    held_out = F.cross_entropy(model(images.bfloat16()).float(), labels)
weights = engine.full_weights()
if rank == 0:
    print(f"held-out loss {held_out.item()}")
    torch.save(weights, "classifier.pt")
dist.destroy_process_group()
