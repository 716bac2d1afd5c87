"""Right trainings of others, drawn by seeds: wrappers, precisions, optimizers and further parts of a script."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.tools.verify.catalogue.foreign import ByHand, Half, Unequal

SEEDS = 200
RANKS = (1, 2, 4)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "nadam": (torch.optim.NAdam, {}),
}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def settings(seed):
    """Return the settings of a seed's training. The wrapper decides which others are possible."""
    drawn = random.Random(seed)
    ranks = drawn.choice(RANKS)
    wrapper = drawn.choice(["plain", "ddp", "fsdp"] if ranks == 1 else ["hand", "ddp", "ddp no_sync", "fsdp", "zero"])
    precision = drawn.choice(
        ["fp32", "bf16", "policy", "policy half sums"] if wrapper == "fsdp" else ["fp32", "bf16", "fp16"]
    )
    batch_norm = wrapper in {"plain", "ddp"} and drawn.random() < 0.25
    return {
        "ranks": ranks, "wrapper": wrapper, "precision": precision, "batch_norm": batch_norm,
        "recompute": not batch_norm and drawn.random() < 0.4,
        "tied": drawn.random() < 0.4, "unequal": drawn.random() < 0.4, "accumulation": drawn.choice([1, 2, 3]),
        "clip_grad": drawn.choice([0.0, 0.05, 0.5, 100.0]), "optimizer": drawn.choice([*OPTIMIZERS]),
        "weight_decay": drawn.choice([0.0, 0.1]), "scheduled": drawn.random() < 0.4,
        "lr": drawn.choice([1e-4, 1e-2]), "frozen": drawn.random() < 0.2, "fused": drawn.random() < 0.2,
    }  # fmt: skip


class Right(Unequal):
    """The training of one seed."""

    seed = 0

    def __init__(self):
        self.of = settings(self.seed)
        for key in ("tied", "batch_norm", "accumulation", "clip_grad", "weight_decay", "lr"):
            setattr(self, key, self.of[key])

    def model(self):
        net = super().model()
        net.up.bias.requires_grad_(requires_grad=not self.of["frozen"])
        return net

    def loss(self, model, batch):
        dtype = HALF.get(self.of["precision"])
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            logits = model(batch[0])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, batch[1])

    def batches(self, step, rank, ranks):
        return super().batches(step, rank, ranks) if self.of["unequal"] else ByHand.batches(self, step, rank, ranks)

    def told(self, losses, batches):
        return super().told(losses, batches) | {"grad_norm": float(self.norm)}

    def optimizer(self, model):
        made, options = OPTIMIZERS[self.of["optimizer"]]
        # NAdam has no fused kernel, and SGD's knows no shards of FSDP2. If its first step is skipped, SGD's kernel
        # leaves its momentum unfilled (torch 2.13), which `verify` names: FusedFirstSkipped of the catalogue.
        has_one = made is torch.optim.Adam or made is torch.optim.AdamW
        fused = {"fused": True} if self.of["fused"] and has_one else {}
        return made(self.grouped(model), lr=self.lr, **options, **fused)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if self.of["scheduled"] else None

    def wrap(self, model):
        if self.of["recompute"]:
            hidden = model.hidden
            model.hidden = lambda x: checkpoint(hidden, x, use_reentrant=False)
        if str(self.of["wrapper"]).startswith(("ddp", "zero")):
            return DistributedDataParallel(model)
        if self.of["wrapper"] == "fsdp":
            param = torch.bfloat16 if str(self.of["precision"]).startswith("policy") else None
            sums = torch.float32 if self.of["precision"] == "policy" else param
            policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=sums)
            fully_shard(model.up, mp_policy=policy)
            return fully_shard(model, mp_policy=policy)
        return model

    def make(self, module):
        if self.of["wrapper"] != "zero":
            return self.optimizer(module)
        made, options = OPTIMIZERS[self.of["optimizer"]]
        return ZeroRedundancyOptimizer(self.grouped(module), made, lr=self.lr, **options)

    def setup(self, model):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if self.of["precision"] == "fp16" else None
        return super().setup(model)

    def micro(self, number, batch, batches):
        if self.of["wrapper"] == "ddp no_sync":
            self.module.require_backward_grad_sync = number == len(batches) - 1
        return Half.micro(self, number, batch, batches) if self.scaler else super().micro(number, batch, batches)

    def reduce(self):
        if self.of["wrapper"] == "hand":
            super().reduce()

    def clip(self):
        if self.scaler:
            self.scaler.unscale_(self.optim)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad or torch.inf)
        self.norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def update(self):
        if self.scaler:
            Half.update(self)
        else:
            super().update()


globals().update({f"Right{seed}": type(f"Right{seed}", (Right,), {"seed": seed}) for seed in range(SEEDS)})
