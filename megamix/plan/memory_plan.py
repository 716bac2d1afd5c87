"""The memory that a rank of a job will need, before anything is launched: what it holds, and the most of each phase."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megamix.comm.topology import Topology
from megamix.config import Config, ModelConfig, grad_accum_steps
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import build_layout
from megamix.mixed_precision.half_params import describe_params
from megamix.model.transformer import Transformer
from megamix.parallel.build import outline, outline_ops
from megamix.parallel.stages import StagePlan
from megamix.plan.activations import Activations, Batch, Machine, trace_activations
from megamix.plan.engine_memory import EngineFacts, EngineMemory, engine_memory
from megamix.plan.stage_memory import (
    PipelineFacts,
    StageMemory,
    evaluation_buffers,
    held_buffers,
    pipeline_activations,
    trace_stages,
)
from megamix.train.build import build_optimizer, build_precision, plan_pipeline

INT64, FP32 = 8, 4
# Batches that the loader has ready, and the one being read (data/loader.py).
LOADED_BATCHES = 5
PIPELINE, EVALUATION = LATER = ("buffers of the pipeline", "buffers of an evaluation")  # not there when a job is built


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of the rank that needs the most: of its device, and of its host beside it.

    Ranks of one pipeline stage hold alike, but for some bytes of tables; those of the one with the most are planned.
    Peaks are of tensors. What libraries take for themselves (a GPU's context, cuBLAS, NCCL; the interpreter) and
    what an allocator cannot use come on top.
    """

    machine: Machine
    dp_size: int
    tp_size: int
    pp_size: int
    pp_rank: int  # the one that needs the most
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
    """Plan the job that `config` describes on `dp_size` ranks for each part of the model.

    Raises: ValueError if the global batch does not divide.
    """
    plans = (plan_rank(config, dp_size, pp_rank, machine) for pp_rank in range(config.parallelism.pp_size))
    return max(plans, key=lambda plan: plan.peak)


def plan_rank(config: Config, dp_size: int, pp_rank: int, machine: Machine) -> MemoryPlan:
    """Plan this one of a pipeline's ranks; see `plan_memory`."""
    section = config.parallelism
    topology, part = _plan_part(config, dp_size, pp_rank * dp_size * section.tp_size, machine)
    activations = _trace(config, part, topology, machine)
    evaluates = config.data.valid is not None or config.data.split is not None
    if part.pipeline is not None and evaluates:
        part.held[EVALUATION] = evaluation_buffers(part.stages, pp_rank, part.pipeline)
    return MemoryPlan(
        machine=machine,
        dp_size=dp_size,
        tp_size=section.tp_size,
        pp_size=section.pp_size,
        pp_rank=pp_rank,
        micro_batch_size=config.training.micro_batch_size,
        grad_accum_steps=grad_accum_steps(config, dp_size),
        parameters=part.weights // FP32,
        buckets=part.buckets,
        held=part.held,
        in_step=_in_step(activations),
        phases=_phases(part, activations),
        host=_host(config, part),
    )


def held_memory(config: Config, dp_size: int, rank: int, machine: Machine) -> tuple[dict[str, int], dict[str, int]]:
    """Return `held` and `host` of one rank of any mesh, before an evaluation; forward and backward are not looked at.
    Nothing is asked of other ranks: one alone may call it while they train.
    """
    _, part = _plan_part(config, dp_size, rank, machine)
    return part.held, _host(config, part)


class _RankPart(NamedTuple):
    """A rank's part of the model, and the engine that will train it."""

    facts: EngineFacts
    engine: EngineMemory
    buckets: int
    weights: int  # bytes in FP32, without padding
    held: dict[str, int]
    stages: list[StagePlan]  # of all ranks
    pipeline: PipelineFacts | None


def _plan_part(config: Config, dp_size: int, rank: int, machine: Machine) -> tuple[Topology, _RankPart]:
    section = config.parallelism
    topology = Topology.place(rank, pp_size=section.pp_size, dp_size=dp_size, tp_size=section.tp_size)
    stages = plan_pipeline(config)
    plain = config.model.model_copy(update={"compile": False})
    module, placements = outline(plain, topology, stages, sequence_parallel=section.sequence_parallel)
    optimizer, precision = build_optimizer(config.optimizer, [config.optimizer.lr]), build_precision(config.precision)
    specs, _, axes, _ = describe_params(module, optimizer, topology, placements)
    layout = build_layout(specs, [axis.size for axis in axes], section.bucket_size)
    facts = EngineFacts(
        dtype=precision.dtype,
        grad_dtype=precision.own_grad_dtype,
        sum_dtype=precision.sum_dtype(topology.world.size),
        num_states=len(optimizer.state_names),
        num_updates=config.training.steps,
        on_gpu=machine == "gpu",
        compiled=config.optimizer.compile,
    )
    engine = engine_memory(layout, facts)
    held = {
        "half parameters": engine.half_params,
        "half gradients": engine.half_grads,
        "FP32 masters": engine.master,
        "optimizer states": engine.optimizer_states,
        "exchange scratch": engine.exchange,
        "model buffers": sum(buffer.nbytes for buffer in module.buffers()),
        "tables": engine.tables,
    }
    pipeline = _pipeline_facts(config, topology, facts.dtype, machine) if stages else None
    if pipeline is not None:
        held[PIPELINE] = held_buffers(stages, topology.pp.rank, pipeline)
    weights = FP32 * sum(spec.numel for spec in specs)
    return topology, _RankPart(facts, engine, len(layout.buckets), weights, held, stages, pipeline)


def _pipeline_facts(config: Config, topology: Topology, dtype: torch.dtype, machine: Machine) -> PipelineFacts:
    section, batch = config.parallelism, (config.training.micro_batch_size, config.model.seq_len)
    parts = section.tp_size if section.sequence_parallel else 1
    return PipelineFacts(
        schedule=section.pp_schedule,
        micro_batches=grad_accum_steps(config, topology.dp.size),
        batch=batch,
        hidden=(batch[0], batch[1] // parts, config.model.hidden_size),
        dtype=dtype,
        machine=machine,
        compiled=config.model.compile,
    )


class _TracedWork(NamedTuple):
    """All that decides what forward and backward of a micro-batch take, a pipeline's stages aside."""

    model: ModelConfig
    tp_size: int
    sequence_parallel: bool
    shape: tuple[int, int]  # (B, T) of a micro-batch
    dtype: torch.dtype
    machine: Machine

    def build(self, num_layers: int) -> Transformer:
        model = self.model.model_copy(update={"num_layers": num_layers, "compile": False})
        topology = Topology.place(0, tp_size=self.tp_size)
        return outline_ops(model, topology, sequence_parallel=self.sequence_parallel)

    def run(self, part: nn.Module, device: torch.device) -> tuple[Tensor, Batch]:
        batch = tuple(torch.empty(self.shape, dtype=torch.int64, device=device) for _ in range(2))
        return part(*batch), batch


def _trace(config: Config, part: _RankPart, topology: Topology, machine: Machine) -> Activations:
    shape = (config.training.micro_batch_size, config.model.seq_len)
    work = _TracedWork(
        config.model, topology.tp.size, config.parallelism.sequence_parallel, shape, part.facts.dtype, machine
    )
    if part.pipeline is None:
        return _trace_model(work)
    traced = _trace_stages(work, tuple(part.stages), part.pipeline)
    return pipeline_activations(part.stages, topology.pp.rank, part.pipeline, traced)


# Most of the time of a plan; advice plans the same work for many ranks.
@cache
def _trace_model(work: _TracedWork) -> Activations:
    return trace_activations(
        work.build, work.run, work.model.num_layers, work.dtype, work.machine, compiled=work.model.compile
    )


@cache
def _trace_stages(work: _TracedWork, stages: tuple[StagePlan, ...], facts: PipelineFacts) -> list[StageMemory]:
    return trace_stages(work.build, stages, facts)


def _in_step(activations: Activations) -> dict[str, int]:
    blocks, others, *peaks = dataclasses.astuple(activations)
    scratch = max(0, max(peaks) - blocks - others)
    names = "activations of the blocks", "of embedding, norm, head and loss", "scratch of single operations"
    return dict(zip(names, (blocks, others, scratch), strict=True))


def _phases(part: _RankPart, activations: Activations) -> dict[str, int]:
    engine = part.engine
    held = sum(part.held.values())
    later = sum(size for name, size in part.held.items() if name in LATER)
    filling = engine.filling + engine.exchange + part.held["model buffers"]
    return {
        "build": max(filling, held - later + engine.trial),
        "forward": held + activations.forward,
        "backward": held + max(activations.backward, activations.backward_end, engine.reduce),
        "statistics": held + max(engine.statistics, engine.reduce),
        "update": held + engine.update,
        "final weights": held + engine.fp32_bucket,
    }


def _host(config: Config, part: _RankPart) -> dict[str, int]:
    """Beside the device; where that is a CPU, in the same memory."""
    saves = config.checkpoint.async_save and 0 < config.checkpoint.save_interval < config.training.steps
    batch = 2 * INT64 * config.training.micro_batch_size * config.model.seq_len
    return {
        "checkpoint snapshot": part.engine.master + part.engine.optimizer_states if saves else 0,
        "batches read ahead": LOADED_BATCHES * batch,
        "final weights in FP32": part.weights,
    }


def amount(size: int) -> str:
    """Return the bytes in the unit that leaves them readable."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.2f} MiB"


TOLERANCE = 0.10  # from here on the log line warns


def memory_line(config: Config, engine: ShardedEngine) -> str:
    """Return a line for the log, between two steps: planned beside measured memory.

    On a GPU the peak so far is compared, as its allocator counts it. torch keeps no such count for a CPU: there all
    tensors that the interpreter knows are counted, and compared with what was planned to be held between steps.
    """
    topology, on_gpu, spare = engine.topology, engine.device.type == "cuda", 0
    if on_gpu:  # pragma: CUDA only
        plan = plan_rank(config, topology.dp.size, topology.pp.rank, "gpu")
        planned = plan.peak - plan.held.get(EVALUATION, 0)  # none has been yet
        what, measured = f"peak ({plan.peak_phase})", torch.cuda.max_memory_allocated()
    else:
        held, host = held_memory(config, topology.dp.size, topology.world.rank, "cpu")
        what, planned = "held between steps", sum(held.values())
        measured = _live_bytes()
        spare = host["batches read ahead"]  # as many as there are by now
    off = measured - planned
    line = f"memory | {what}: planned {amount(planned)}, measured {amount(measured)} ({off / planned:+.1%})"
    if abs(off) > TOLERANCE * planned + spare:
        line += f" | WARNING: more than {TOLERANCE:.0%} apart; `megamix plan` says what each part should take"
    return line


def _live_bytes() -> int:
    """Return the bytes of the storages that some tensor on the host refers to."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        # By its type and not isinstance(), which asks objects of other libraries what they pretend to be; and no
        # subclass, for a compiler leaves tensors that have no memory, some of sizes that are symbols.
        if type(thing) in (Tensor, nn.Parameter) and thing.layout == torch.strided and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if isinstance(size := storage.nbytes(), int):
                found[storage._cdata] = size
    return sum(found.values())
