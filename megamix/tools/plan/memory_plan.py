"""Memory that a rank of a job will need, before anything is launched: bytes held, and the peak of each phase."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megamix.checkpoint.snapshot import pinned_sizes
from megamix.comm.topology import Topology
from megamix.config import Config, axis_sizes, grad_accum_steps, ranks_along
from megamix.mixed_precision.bucket import BucketBytes
from megamix.mixed_precision.census import take_census
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.flat_layout import build_layout
from megamix.mixed_precision.optim.muon import Muon
from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.mixed_precision.settings import Sharding
from megamix.parallel.build import outline
from megamix.parallel.stages import plan_pipeline
from megamix.plugins import MORE_AXES
from megamix.tools.plan.activations import Activations, Machine, TracedWork, trace_stage
from megamix.tools.plan.engine_memory import AVERAGED, FP32, EngineMemory
from megamix.tools.plan.matrix_memory import MatrixPlan, plan_matrices
from megamix.tools.plan.pipeline_memory import PipelineRank
from megamix.train.least_memory import OWNED, amount, mirrored
from megamix.train.objects import build_optimizer, build_precision

# Batches that the loader has ready, and the one that it reads (data/loader.py).
LOADED_BATCHES = 5
PIPELINE, EVALUATION = "buffers of the pipeline", "buffers of an evaluation"
LATER = (PIPELINE, EVALUATION, AVERAGED)  # absent while the engine is built


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of the rank that needs the most: of its device, and of its host beside it.

    Ranks of one pipeline stage hold the same, but for some bytes of tables; the rank with the most is planned. Peaks
    are of tensors. Memory that libraries take for themselves (a GPU's context, cuBLAS, NCCL; the interpreter) and
    memory that an allocator cannot use come on top.
    """

    machine: Machine
    axes: dict[str, int]  # ranks along each axis
    ep_size: int
    pp_rank: int  # pipeline rank that needs the most
    micro_batch_size: int
    grad_accum_steps: int
    parameters: int  # elements that this rank trains, without padding
    buckets: int
    matrices: MatrixPlan | None  # None if the optimizer takes no matrix whole
    held: dict[str, int]  # bytes held from the first step on, by category
    in_step: dict[str, int]  # bytes beside those at the peak of forward and backward, by category
    phases: dict[str, int]  # peak bytes of each phase, held bytes included
    host: dict[str, int]

    @property
    def resident(self) -> int:
        return sum(self.held.values())

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)


def plan_memory(
    config: Config, dp_size: int, machine: Machine, optimizer: Optimizer | None = None, *, crowded: bool = False
) -> MemoryPlan:
    """Return the plan of the job that `config` describes, on `dp_size` ranks for each part of the model. `optimizer`:
    the job's, if known: its learning rates take a tenth of a second. `crowded`: see TracedWork.

    Raises: ValueError if the global batch does not divide.
    """
    optimizer = optimizer or build_optimizer(config)
    ranks = range(ranks_along(config.parallelism, "pp"))
    plans = (plan_rank(config, dp_size, pp_rank, machine, optimizer, crowded=crowded) for pp_rank in ranks)
    return max(plans, key=lambda plan: plan.peak)


def plan_rank(
    config: Config,
    dp_size: int,
    pp_rank: int,
    machine: Machine,
    optimizer: Optimizer | None = None,
    *,
    crowded: bool = False,
) -> MemoryPlan:
    """Return the plan of one of a pipeline's ranks; see `plan_memory`."""
    section = config.parallelism
    mesh = Topology.place(0, dp=dp_size, ep_size=ranks_along(section, "ep"), **axis_sizes(section))
    part = _plan_part(
        config, dp_size, mesh.pp.ranks[pp_rank], machine, optimizer or build_optimizer(config), crowded=crowded
    )
    activations = _activations(part)
    passes = _passes(part, activations)
    if activations.moved:
        part.held["copies of buffers that move"] = activations.moved
    evaluates = config.data.valid is not None or config.data.split is not None
    if part.pipeline is not None and evaluates:
        part.held[EVALUATION] = part.pipeline.evaluation_buffers()
    return MemoryPlan(
        machine=machine,
        axes=dict(mesh.sizes),
        ep_size=mesh.ep_size,
        pp_rank=pp_rank,
        micro_batch_size=config.training.micro_batch_size,
        grad_accum_steps=grad_accum_steps(config, dp_size),
        parameters=part.weights // FP32,
        buckets=len(part.engine.buckets),
        matrices=part.matrices,
        held=part.held,
        in_step=_in_step(passes, activations),
        phases=_phases(part, passes),
        host=_host(config, part),
    )


def held_memory(config: Config, dp_size: int, rank: int, machine: Machine) -> tuple[dict[str, int], dict[str, int]]:
    """Return `held` and `host` of one rank of any mesh, before an evaluation; forward and backward are left out.

    It asks nothing of other ranks: one rank alone may call it while the others train.
    """
    part = _plan_part(config, dp_size, rank, machine, build_optimizer(config), own_states=True)
    return part.held, _host(config, part)


# Tables of [parallelism] that decide how a micro-batch is divided: a change of another key does not trace it again.
_DIVIDING = ("context", "expert", "tensor")


class _RankPart(NamedTuple):
    """Part of the model on one rank, and the engine that will train it."""

    engine: EngineMemory
    matrices: MatrixPlan | None
    weights: int  # bytes in FP32, without padding
    held: dict[str, int]
    work: TracedWork
    pipeline: PipelineRank | None


def _plan_part(
    config: Config, dp_size: int, rank: int, machine: Machine, optimizer: Optimizer, *, own_states: bool = False,
    crowded: bool = False,
) -> _RankPart:  # fmt: skip
    stages, section, training = plan_pipeline(config.model, config.parallelism), config.parallelism, config.training
    topology = Topology.place(rank, dp=dp_size, ep_size=ranks_along(section, "ep"), **axis_sizes(section))
    module, placements = outline(config.model.model_copy(update={"compile": False}), section, topology, stages)
    precision, micro_batches = build_precision(config.precision), grad_accum_steps(config, dp_size)
    sharding = Sharding(module.units, placements=placements, shard=section.shard, accumulate=section.accumulate)
    census = take_census(module, optimizer, topology, sharding)
    specs, groups = census.specs, census.groups
    layout = build_layout(specs, [axis.size for axis in census.axes], section.bucket_size)
    owner_adds = sharding.owner_adds(micro_batches)
    shards = [axis.rank if own_states else None for axis in census.axes]
    buckets = [
        BucketBytes.count(
            plan, precision, sharding, groups, owner_adds, shards[plan.axis], averages=training.average is not None
        )
        for plan in layout.buckets
    ]
    compiled = config.optimizer.compile
    engine = EngineMemory(buckets, precision, groups, micro_batches, on_gpu=machine == "gpu", compiled=compiled)
    matrices = None
    if isinstance(optimizer, Muon):
        matrices = plan_matrices(layout, specs, census.axes, optimizer, topology, engine, own_states)
    held = engine.held()
    held["optimizer states"] += matrices.states if matrices else 0
    held["model buffers"] = sum(buffer.nbytes for buffer in module.buffers())
    held["tables"] = engine.tables(training.steps)
    work = TracedWork(
        model=config.model,
        batch=(training.micro_batch_size, config.model.seq_len),
        dtype=precision.dtype,
        machine=machine,
        packed=config.data.packing != "none",
        division=type(section)(**{key: getattr(section, key) for key in (*_DIVIDING, *MORE_AXES.sections)}),
        fp8=config.precision.fp8,
        in_halves=section.pipeline is not None and section.pipeline.schedule.endswith("zero_bubble"),
        crowded=crowded,
    )
    pipeline = None
    if section.pipeline is not None:
        pipeline = PipelineRank(work, stages, topology.pp.rank, section.pipeline.schedule, micro_batches)
        held[PIPELINE] = pipeline.held_buffers()
    return _RankPart(engine, matrices, FP32 * sum(spec.numel for spec in specs), held, work, pipeline)


def _activations(part: _RankPart) -> Activations:
    if part.pipeline is not None:
        return part.pipeline.activations()
    whole, batch = trace_stage(part.work, range(part.work.model.num_layers)), part.work.batch_bytes
    return Activations(
        whole.blocks, whole.kept - whole.blocks + batch, whole.forward + batch, whole.backward_blocks + batch,
        whole.backward_end + batch, whole.moved,
    )  # fmt: skip


class _Pass(NamedTuple):
    """Peak bytes of forward, of backward through the blocks, or of the rest of backward."""

    blocks: int  # bytes that blocks keep for backward
    work: int  # other activations
    params: int  # temporary half parameters
    grads: int


def _passes(part: _RankPart, activations: Activations) -> dict[str, _Pass]:
    fillings, accumulated = part.engine.fillings(), part.engine.accumulated()
    names = [[slot.spec.name.split(".") for slot in filling.bucket.slots] for filling in fillings]
    blocks = [[name[1] for name in of_bucket if name[0] == "blocks"] for of_bucket in names]  # numbers, by bucket
    order = [*dict.fromkeys(chain.from_iterable(blocks))]
    end = max((number for number, own in enumerate(blocks, 1) if own), default=len(blocks))
    backward, behind = [], []
    for filling, own in zip(fillings, blocks, strict=True):
        grads = max(accumulated, filling.grads + filling.waiting + filling.sums)
        behind.append(_Pass(0, activations.end, filling.params, grads))
        # Blocks after the bucket's first block have freed their activations. A pipeline keeps those of other
        # micro-batches.
        gone = min(map(order.index, own)) / len(order) if own and part.pipeline is None else 0
        kept = int((1 - gone) * activations.blocks)
        backward.append(_Pass(kept, activations.backward - activations.blocks, filling.params, grads))
    two_units = max(filling.params for filling in fillings)  # which forward needs, too
    return {
        "forward": _Pass(activations.blocks, activations.forward - activations.blocks, two_units, accumulated),
        "backward": max(backward[:end], key=sum),
        "end": max(behind[end:] or behind[-1:], key=sum),
    }


def _in_step(passes: dict[str, _Pass], activations: Activations) -> dict[str, int]:
    most = max(passes.values(), key=sum)
    others = min(activations.others, most.work)
    return {
        "activations of the blocks": most.blocks,
        "of embedding, norm, head and loss": others,
        "scratch of single operations": most.work - others,
        "half parameters while units compute": most.params,
        "half gradients, and their sums": most.grads,
    }


def _phases(part: _RankPart, passes: dict[str, _Pass]) -> dict[str, int]:
    engine = part.engine
    held = sum(part.held.values())
    later = sum(size for name, size in part.held.items() if name in LATER)
    return {
        "build": held - later + engine.building(),
        "forward": held + sum(passes["forward"]),
        "backward": held + max(sum(passes["backward"]), sum(passes["end"]), engine.reduce()),
        "statistics": held + engine.statistics(),
        "update": held + engine.sums() + (part.matrices.update if part.matrices else engine.update()),
        "final weights": held + FP32 * max(bucket.plan.padded_numel for bucket in engine.buckets),
    }


def _host(config: Config, part: _RankPart) -> dict[str, int]:
    """Return bytes beside the device's; if the device is a CPU, they are in the same memory."""
    saves = config.checkpoint.async_save and 0 < config.checkpoint.save_interval < config.training.steps
    states = sum(part.held[name] for name in OWNED)
    snapshot = sum(pinned_sizes(states)) if part.work.machine == "gpu" else states
    return {
        "checkpoint snapshot": snapshot if saves and not config.checkpoint.mirror else 0,
        "mirror in shared memory": int(mirrored(part.held, config.checkpoint)) if config.checkpoint.mirror else 0,
        "batches read ahead": LOADED_BATCHES * part.work.batch_bytes,
        "final weights in FP32": part.weights,
    }


TOLERANCE = 0.10  # share from which on the log line warns


def memory_line(config: Config, engine: ShardedEngine) -> str:
    """Return a line for the log, between two steps: planned beside measured memory.

    On a GPU the peak so far is compared, as its allocator counts it. torch keeps no such count for a CPU. There all
    tensors that the interpreter knows are counted, and compared with the bytes planned to be held between steps.
    """
    topology, on_gpu, spare = engine.topology, engine.device.type == "cuda", 0
    if on_gpu:
        plan = plan_rank(config, topology.dp.size, topology.pp.rank, "gpu")
        planned = plan.peak - plan.held.get(EVALUATION, 0)  # no evaluation has been yet
        what, measured = f"peak ({plan.peak_phase})", torch.cuda.max_memory_allocated()
    else:
        held, host = held_memory(config, topology.dp.size, topology.world.rank, "cpu")
        what, planned = "held between steps", sum(held.values())
        measured = _live_bytes()
        spare = host["batches read ahead"]  # the loader may have read fewer batches by now
    off = measured - planned
    line = f"memory | {what}: planned {amount(planned)}, measured {amount(measured)} ({off / planned:+.1%})"
    if abs(off) > TOLERANCE * planned + spare:
        line += f" | WARNING: more than {TOLERANCE:.0%} apart; `megamix plan` says what each part should take"
    return line


def _live_bytes() -> int:
    """Return the bytes of the storages to which some tensor on the host refers."""
    found = dict[int, int]()
    for thing in gc.get_objects():
        # type(), because isinstance() asks objects of other libraries what they pretend to be. No subclass counts: a
        # compiler leaves tensors that have no memory, some of which have symbols for sizes.
        if type(thing) in (Tensor, nn.Parameter) and thing.layout == torch.strided and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if isinstance(size := storage.nbytes(), int):
                found[storage._cdata] = size
    return sum(found.values())
