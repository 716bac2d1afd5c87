"""The memory that a rank of a job will need, before anything is launched: what it holds, and the most of each phase."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megamix.comm.topology import Topology
from megamix.config import Config, grad_accum_steps
from megamix.mixed_precision.flat_layout import FlatLayout, build_layout
from megamix.mixed_precision.half_params import describe_params
from megamix.mixed_precision.memory import EngineFacts, EngineMemory, engine_memory, pieces_by_shard
from megamix.model.activations import Activations, Batch, Machine, Run, trace_activations
from megamix.model.transformer import Transformer
from megamix.parallel.build import outline_part
from megamix.train.build import build_optimizer, build_precision, plan_pipeline

INT64, FP32 = 8, 4
# Batches that the loader has ready, and the one being read (data/loader.py).
LOADED_BATCHES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of the rank that needs the most: of its device, and of its host beside it.

    Peaks are of tensors. What libraries take for themselves (a GPU's context, cuBLAS, NCCL; the interpreter) and
    what an allocator cannot use come on top.
    """

    machine: Machine
    dp_size: int
    rank: int  # the one that needs the most
    micro_batch_size: int
    grad_accum_steps: int
    parameters: int  # elements that this rank trains, without padding
    buckets: int
    held: dict[str, int]  # from the first step on, by category
    in_step: dict[str, int]  # what the peak of forward and backward has beside that, by category
    phases: dict[str, int]  # the most that lives at once in each, what is held included
    host: dict[str, int]

    @property
    def resident(self) -> int:
        return sum(self.held.values())

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])


def plan_memory(config: Config, dp_size: int, machine: Machine) -> MemoryPlan:
    """Of the job that `config` describes on `dp_size` ranks.

    Raises: ValueError if the global batch does not divide.
    """
    accumulation = grad_accum_steps(config, dp_size)
    part = _plan_part(config, Topology.place(0, dp_size=dp_size), machine)
    activations = trace_activations(
        partial(_build_part, config), _micro_batch(config), config.model.num_layers, part.facts.dtype, machine,
        compiled=config.model.compile,
    )  # fmt: skip
    pieces = pieces_by_shard(part.layout)
    return MemoryPlan(
        machine=machine,
        dp_size=dp_size,
        rank=pieces.index(max(pieces)),
        micro_batch_size=config.training.micro_batch_size,
        grad_accum_steps=accumulation,
        parameters=part.weights // FP32,
        buckets=len(part.layout.buckets),
        held=_held(part),
        in_step=_in_step(activations),
        phases=_phases(part, activations),
        host=_host(config, part),
    )


def held_memory(config: Config, topology: Topology, machine: Machine) -> tuple[dict[str, int], dict[str, int]]:
    """`held` and `host` of one rank of any mesh, which take no look at forward and backward."""
    part = _plan_part(config, topology, machine)
    return _held(part), _host(config, part)


class _Part(NamedTuple):
    """A rank's part of the model, and the engine that will train it."""

    layout: FlatLayout
    facts: EngineFacts
    engine: EngineMemory
    weights: int  # bytes in FP32, without padding
    buffers: int


def _plan_part(config: Config, topology: Topology, machine: Machine) -> _Part:
    plain = config.model.model_copy(update={"compile": False})
    module, placements = outline_part(
        plain, topology, plan_pipeline(config), sequence_parallel=config.parallelism.sequence_parallel
    )
    optimizer, precision = build_optimizer(config.optimizer, [config.optimizer.lr]), build_precision(config.precision)
    specs, _, axes, _ = describe_params(module, optimizer, topology, placements)
    layout = build_layout(specs, [axis.size for axis in axes], config.parallelism.bucket_size)
    facts = EngineFacts(
        dtype=precision.dtype,
        grad_dtype=precision.own_grad_dtype,
        sum_dtype=precision.sum_dtype(topology.world.size),
        num_states=len(optimizer.state_names),
        num_updates=config.training.steps,
        on_gpu=machine == "gpu",
        compiled=config.optimizer.compile,
    )
    weights, buffers = FP32 * sum(spec.numel for spec in specs), sum(buffer.nbytes for buffer in module.buffers())
    return _Part(layout, facts, engine_memory(layout, facts), weights, buffers)


def _build_part(config: Config, num_layers: int) -> nn.Module:
    """A rank's part of the model with some of its blocks, on the meta device."""
    with torch.device("meta"):
        return Transformer(config.model.model_copy(update={"num_layers": num_layers, "compile": False}))


def _micro_batch(config: Config) -> Run:
    shape = (config.training.micro_batch_size, config.model.seq_len)

    def run(part: nn.Module, device: torch.device) -> tuple[Tensor, Batch]:
        batch = tuple(torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
        return part(*batch), batch

    return run


def _held(part: _Part) -> dict[str, int]:
    engine = part.engine
    return {
        "half parameters": engine.half_params,
        "half gradients": engine.half_grads,
        "FP32 masters": engine.master,
        "optimizer states": engine.optimizer_states,
        "exchange scratch": engine.exchange,
        "model buffers": part.buffers,
        "tables": engine.tables,
    }


def _in_step(activations: Activations) -> dict[str, int]:
    kept = activations.blocks + activations.others
    peak = max(activations.forward, activations.backward, activations.backward_end)
    return {
        "activations of the blocks": activations.blocks,
        "of embedding, norm, head and loss": activations.others,
        "scratch of single operations": max(0, peak - kept),
    }


def _phases(part: _Part, activations: Activations) -> dict[str, int]:
    engine = part.engine
    held = sum(_held(part).values())
    # While buckets are filled the module's own FP32 weights are still there, and gradients not yet.
    filling = held - engine.half_grads - engine.tables + part.weights + engine.fp32_bucket
    return {
        "build": max(filling, held + engine.trial),
        "forward": held + activations.forward,
        "backward": held + max(activations.backward, activations.backward_end, engine.reduce),
        "statistics": held + max(engine.statistics, engine.reduce),
        "update": held + engine.update,
        "final weights": held + engine.fp32_bucket,
    }


def _host(config: Config, part: _Part) -> dict[str, int]:
    """Beside the device; where that is a CPU, in the same memory."""
    saves = config.checkpoint.async_save and 0 < config.checkpoint.save_interval < config.training.steps
    batch = 2 * INT64 * config.training.micro_batch_size * config.model.seq_len
    return {
        "checkpoint snapshot": part.engine.master + part.engine.optimizer_states if saves else 0,
        "batches read ahead": LOADED_BATCHES * batch,
        "final weights in FP32": part.weights,
    }


def amount(size: int) -> str:
    """Bytes in the unit that leaves them readable."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.2f} MiB"
