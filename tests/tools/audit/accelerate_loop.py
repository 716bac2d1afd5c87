"""A loop of accelerate, for torchrun: `accelerate_loop.py ddp|fsdp2 DTYPE OUTPUT.json` audits its last step."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType

import megamix
from tests.tools.audit.loops import adamw, new_model

wrapper, dtype, output = sys.argv[1:]
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
if wrapper == "fsdp2":  # accelerate offers it on GPUs only, though fully_shard works on CPUs
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    plugin.set_mixed_precision("bf16")
    accelerator.state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
model = new_model(getattr(torch, dtype))
model, optimizer = accelerator.prepare(model, adamw(model, 6e-6))
for number in range(4):
    tokens = torch.randint(32, (16, 4), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    with megamix.audit(model, optimizer) as report:
        logits = model(tokens)
        accelerator.backward(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()))
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    Path(output).write_text(report.to_json())
dist.destroy_process_group()
