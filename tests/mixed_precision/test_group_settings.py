"""Betas and eps of AdamW by group, and momentum by group, classical, dampened or Nesterov's, are those of torch's fused
optimizers bit for bit, on 1, 2 and 4 ranks, with skipped steps and across a resume.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamix import NAG, AdamW, ParamGroup, Precision, ShardedEngine, Sharding
from megamix.comm.topology import Topology
from megamix.mixed_precision.optimizers import Optimizer

LR, DECAY, STEPS = 0.01, 0.1, 7
SKIPPED = {0: math.inf, 4: math.nan}  # step -> one element of its gradient; the first comes before any update
GROUPS = (
    ParamGroup(pattern="table", betas=(0.8, 0.96), eps=1e-10, weight_decay=0.0),
    ParamGroup(pattern="scale", betas=(0.96, 0.95), eps=1e-6, lr_factor=0.5),
)
MOMENTA = (ParamGroup(pattern="table", momentum=0.5, weight_decay=0.0), ParamGroup(pattern="scale", momentum=0.0))
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": AdamW(lr=LR, weight_decay=DECAY, betas=(0.9, 0.99), groups=GROUPS),
    "classical": NAG(lr=LR, weight_decay=DECAY, nesterov=False, groups=MOMENTA),
    "dampened": NAG(lr=LR, weight_decay=DECAY, nesterov=False, dampening=0.3, groups=MOMENTA),
    "nesterov": NAG(lr=LR, weight_decay=DECAY, groups=MOMENTA),
}


class Fed(nn.Module):
    """Three parameters, each with a gradient that is given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight, self.table = (nn.Parameter(torch.randn(16, 64, generator=generator)) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(128, generator=generator))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return sum((param * grads[name]).sum() for name, param in self.named_parameters())


def _grads(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(param.shape, generator=generator) for name, param in Fed().named_parameters()}


def _torchs(kind: str) -> dict[str, Tensor]:
    """Return the weights after torch's own steps, of which it is told only those that do not overflow."""
    model = Fed()
    if kind == "adamw":
        groups: list[dict[str, Any]] = [
            {"params": [model.weight], "betas": (0.9, 0.99)},
            {"params": [model.table], "betas": (0.8, 0.96), "eps": 1e-10, "weight_decay": 0.0},
            {
                "params": [model.scale],
                "betas": (0.96, 0.95),
                "eps": 1e-6,
                "weight_decay": 0.0,
                "lr": torch.tensor(LR) / 2,
            },
        ]
        lr = torch.tensor(LR)  # FP32, as the engine has it
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=DECAY, fused=True)
    else:
        groups = [
            {"params": [model.weight], "momentum": 0.9},
            {"params": [model.table], "momentum": 0.5, "weight_decay": 0.0},
            {"params": [model.scale], "momentum": 0.0, "weight_decay": 0.0},
        ]
        for group in groups:
            group["nesterov"] = kind == "nesterov" and group["momentum"] > 0
        dampening = 0.3 if kind == "dampened" else 0.0
        optimizer = torch.optim.SGD(groups, lr=torch.tensor(LR), weight_decay=DECAY, dampening=dampening, fused=True)
    for step in range(STEPS):
        if step not in SKIPPED:
            for name, param in model.named_parameters():
                param.grad = _grads(step)[name]
            optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def _trained(kind: str, topology: Topology | None, compiled: bool = False) -> dict[str, Tensor]:
    """Return the weights after the engine's steps. Halfway another engine goes on."""

    def engine() -> ShardedEngine:
        sharding = Sharding(topology=topology, bucket_size=1024)
        return ShardedEngine(Fed(), OPTIMIZERS[kind], Precision(torch.float32), sharding, compile_update=compiled)

    trained = engine()
    for step in range(STEPS):
        grads = _grads(step)
        if step in SKIPPED:
            grads["table"][3, 5] = SKIPPED[step]
        trained.backward(trained(grads))
        assert bool(trained.step().found_inf) == (step in SKIPPED)
        if step == STEPS // 2:
            begun, trained = trained, engine()
            trained.load_state_dict(begun.state_dict())
    return trained.full_weights()


def _on_ranks() -> list[str]:
    """Return the optimizers that differ from torch's, with the number of data-parallel ranks."""
    size = dist.get_world_size()
    meshes = {size // replicas: Topology.connect(replicas=replicas) for replicas in (1, 2)}
    return [
        f"{kind} on {ranks}"
        for kind in OPTIMIZERS
        for ranks, topology in meshes.items()
        if not _equal(_trained(kind, topology), _torchs(kind))
    ]


def _equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_alone_groups_and_momentum_are_torchs_bit_for_bit(kind: str) -> None:
    assert _equal(_trained(kind, None), _torchs(kind))


def test_on_2_and_4_ranks_they_are_torchs_bit_for_bit(run_ranks) -> None:
    assert run_ranks(_on_ranks, 4) == [[]] * 4
