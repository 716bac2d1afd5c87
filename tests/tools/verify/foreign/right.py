"""Right trainings of the five loops, drawn by seeds: precisions, optimizers and further parts of a script."""

import random

import torch

from tests.tools.verify.foreign.loops import Ddp, Fabric, Fsdp, Hand, Zero

SEEDS = 300
RANKS = (1, 2, 4)
LOOPS = (Ddp, Fsdp, Hand, Fabric, Zero)
PRECISIONS = {Fsdp: ("fp32", "bf16", "bf16 sums"), Fabric: ("fp32", "bf16")}
# If its first step is skipped, fused SGD leaves its momentum unfilled (torch 2.13), which `verify` names:
# FusedFirstSkipped of the catalogue.
OPTIMIZERS = (
    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {}), (torch.optim.AdamW, {"betas": (0.9, 0.95)}), (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.NAdam, {}), (torch.optim.Adam, {"fused": True}), (torch.optim.AdamW, {"fused": True}),
)  # fmt: skip


def settings(seed):
    """Return the settings of a seed's training."""
    loop, drawn = LOOPS[seed % len(LOOPS)], random.Random(seed)
    precision = drawn.choice(PRECISIONS.get(loop, ("fp32", "bf16", "fp16")))
    half = torch.float16 if precision == "fp16" else torch.bfloat16  # autocast makes none of two halves
    kind, options = drawn.choice(OPTIMIZERS)
    return {
        "loop": loop, "ranks": drawn.choice(RANKS), "precision": precision,
        "table": drawn.choice([torch.float32, half]), "tied": drawn.random() < 0.4,
        "recomputed": drawn.random() < 0.4, "frozen": drawn.choice(["", "", "norm.bias", "up.weight"]),
        "unequal": drawn.random() < 0.4, "accumulation": drawn.choice([1, 2, 3]),
        "clip_grad": drawn.choice([0.0, 0.05, 0.5, 100.0]), "weight_decay": drawn.choice([0.0, 0.1]),
        "lr": drawn.choice([1e-4, 1e-2]), "decay": drawn.choice([1.0, 0.5]),
        "kind": kind, "options": options,
    }  # fmt: skip


def _training(seed):
    of = settings(seed)
    return type(f"Right{seed}", (of.pop("loop"),), of | {"ranks": 1})


globals().update({f"Right{seed}": _training(seed) for seed in range(SEEDS)})
