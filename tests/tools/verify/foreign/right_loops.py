"""Right trainings of the five loops, drawn by seeds, with buffers of every kind."""

import random

import torch

from tests.tools.verify.foreign.loops import Ddp, Engine, Fabric, Fsdp, Hand
from tests.tools.verify.foreign.right import OPTIMIZERS

SEEDS = 100
LOOPS = (Ddp, Fsdp, Hand, Fabric, Engine)
PRECISIONS = {
    Ddp: ("fp32", "bf16", "fp16"), Fsdp: ("fp32", "bf16", "bf16 sums"), Hand: ("fp32", "bf16", "fp16"),
    Fabric: ("fp32", "bf16"), Engine: ("fp32", "bf16", "fp16"),
}  # fmt: skip


def settings(seed):
    """Return the settings of a seed's training."""
    loop, drawn = LOOPS[seed % len(LOOPS)], random.Random(seed)
    ranks, precision = drawn.choice([1, 2]), drawn.choice(PRECISIONS[loop])
    half = torch.float16 if precision == "fp16" else torch.bfloat16  # autocast makes none of two halves
    return {
        "loop": loop, "ranks": ranks, "precision": precision, "table": drawn.choice([torch.float32, half]),
        "tied": drawn.random() < 0.4, "recomputed": drawn.random() < 0.4,
        "frozen": drawn.choice(["", "", "norm.bias", "blocks.0.query.weight"]), "unequal": drawn.random() < 0.4,
        "accumulation": drawn.choice([1, 2, 3]), "clip_grad": drawn.choice([0.0, 0.05, 0.5, 100.0]),
        "weight_decay": drawn.choice([0.0, 0.1]), "lr": drawn.choice([1e-4, 1e-2]), "decay": drawn.choice([1.0, 0.5]),
        "made": drawn.choice([*OPTIMIZERS]),
        "momentum": drawn.choice([0.0, 0.9]), "shard": drawn.choice(["states", "gradients", "parameters"]),
        "grad_dtype": drawn.choice([None, torch.float32]),
    }  # fmt: skip


class _Drawn:
    """Loop whose optimizer is one of torch's."""

    made = "adamw"

    def optimizer(self, model):
        optimizer, options = OPTIMIZERS[self.made]
        return optimizer(self.grouped(model), lr=self.lr, **options)


def _training(seed):
    of = settings(seed)
    loop = of.pop("loop")
    bases = (loop,) if loop is Engine else (_Drawn, loop)
    return type(f"Loop{seed}", bases, of | {"ranks": 1})


globals().update({f"Loop{seed}": _training(seed) for seed in range(SEEDS)})
