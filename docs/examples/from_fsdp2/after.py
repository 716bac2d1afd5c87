"""Train the same transformer with megamix.

torchrun --nproc-per-node 2 docs/examples/from_fsdp2/after.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megamix

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
engine = megamix.ShardedEngine(
    model,
    megamix.AdamW(lr=LR, betas=(0.9, 0.95), weight_decay=0.1),
    megamix.Precision(torch.bfloat16, reduce_dtype="half_fp32_sum"),
    megamix.Sharding(units=[*model.blocks]),
    clip_grad=4.0,
    compile_update=False,  # torch's AdamW kernel, to compare; leave it out afterwards
)

for step in range(STEPS):
    tokens = batch(step * world_size + rank)
    logits = engine(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    result = engine.step()
    if rank == 0:
        print(f"step {step} loss {result.loss.item()}")

weights = engine.full_weights()
if rank == 0:
    torch.save(weights, "transformer.pt")
dist.destroy_process_group()
