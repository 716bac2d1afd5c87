"""Train a classifier with DistributedDataParallel and autocast.

torchrun --nproc-per-node 2 docs/examples/from_ddp/before.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

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
average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
ddp = DistributedDataParallel(model)
groups = [
    {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
scheduler = LambdaLR(optimizer, lr_factor)

for step in range(STEPS):
    mean_loss = torch.zeros(())
    for micro in range(ACCUM):
        images, labels = batch((step * ACCUM + micro) * world_size + rank)
        with nullcontext() if micro == ACCUM - 1 else ddp.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                logits = ddp(images)
            loss = F.cross_entropy(logits.float(), labels) / ACCUM
            loss.backward()
        mean_loss += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    average.update_parameters(model)
    dist.all_reduce(mean_loss)
    mean_loss /= world_size
    if rank == 0:
        print(f"step {step} loss {mean_loss.item()}")

model.eval()
images, labels = batch(1_000_000)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    held_out = F.cross_entropy(model(images).float(), labels)
if rank == 0:
    print(f"held-out loss {held_out.item()}")
    torch.save(model.state_dict(), "classifier.pt")
dist.destroy_process_group()
