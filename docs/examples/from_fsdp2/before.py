"""Train a small transformer with FSDP2.

torchrun --nproc-per-node 2 docs/examples/from_fsdp2/before.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS, LR = 16, 2**-8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def batch(number: int) -> Tensor:
    start = torch.randint(64, (32, 1), generator=torch.Generator().manual_seed(number))
    return (start + 5 * torch.arange(17)) % 64


dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Model()
mesh = init_device_mesh("cpu", (world_size,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh, mp_policy=policy)
groups = [
    {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)

for step in range(STEPS):
    tokens = batch(step * world_size + rank)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 4.0)
    optimizer.step()
    optimizer.zero_grad()
    mean_loss = loss.detach()
    dist.all_reduce(mean_loss)
    mean_loss /= world_size
    if rank == 0:
        print(f"step {step} loss {mean_loss.item()}")

weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    torch.save(weights, "transformer.pt")
dist.destroy_process_group()
