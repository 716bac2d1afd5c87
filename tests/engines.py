"""The engine that most tests need: a tiny model, AdamW, and an update that is not compiled."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from megamix import AdamW, Precision, ShardedEngine, Sharding
from megamix.comm.topology import Topology
from megamix.mixed_precision.engine import StepResult
from megamix.mixed_precision.optimizers import Optimizer
from megamix.mixed_precision.settings import Shard
from tests.distributed.models import loss_of, make_batch, make_model

FP32, BF16 = Precision(torch.float32), Precision(torch.bfloat16)


def make_engine(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    precision: Precision = FP32,
    sharding: Sharding | None = None,
    *,
    shard: Shard | None = None,
    bucket_size: int | None = None,
    topology: Topology | None = None,
    **settings: Any,
) -> ShardedEngine:
    """Return an engine, of `make_model()` unless `model` is given. `shard`: the model's blocks are units, and
    `bucket_size` and `topology` go with it. `settings`: the engine's other arguments.
    """
    model = make_model() if model is None else model
    if shard is not None:
        sharding = Sharding([*getattr(model, "blocks", ())], topology, bucket_size, shard=shard)
    return ShardedEngine(
        model, optimizer or AdamW(lr=0.01), precision, sharding, **{"compile_update": False, **settings}
    )


bf16_engine = partial(make_engine, precision=BF16)


def train_step(engine: ShardedEngine, step: int = 0, flavour: int = 0) -> StepResult:
    """Train one step on this data-parallel rank's batch; what the engine tells of it."""
    engine.backward(loss_of(engine.module, make_batch(step, engine.topology.dp.rank, 0), flavour))
    return engine.step()


def train_steps(engine: ShardedEngine, steps: Iterable[int] = range(3)) -> list[float]:
    """Train some steps; the mean loss over the ranks of each."""
    return [float(train_step(engine, step).loss) for step in steps]
