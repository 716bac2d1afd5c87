"""Objects of a job, built from configuration sections; each object gets only its own section."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megamix import schedules
from megamix.comm.topology import Topology
from megamix.config import (
    Config,
    OptimizerConfig,
    PrecisionConfig,
    axis_sizes,
    grad_accum_steps,
    loss_scale_rule,
    stages_per_rank,
    tokens_of,
)
from megamix.data.loader import BatchLoader
from megamix.data.source import SampleSource
from megamix.mixed_precision.adamw import AdamW
from megamix.mixed_precision.average import WeightAverage
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.headroom import HeadroomLossScale
from megamix.mixed_precision.loss_scale import (
    DeepSpeedLossScale,
    DynamicLossScale,
    LossScale,
    MegatronLossScale,
    StaticLossScale,
    TorchLossScale,
)
from megamix.mixed_precision.muon import Muon
from megamix.mixed_precision.nag import NAG
from megamix.mixed_precision.optimizers import Optimizer, ParamGroup
from megamix.mixed_precision.settings import Placement, Precision, Sharding
from megamix.mixed_precision.weights import Fill
from megamix.model.decoder import Decoder
from megamix.model.family import family_of
from megamix.model.language_model import LanguageModel
from megamix.parallel.build import build_model, drawn
from megamix.parallel.micro_batch_runner import MicroBatchRunner
from megamix.parallel.stages import V_SHAPED, StagePlan, plan_stages
from megamix.plugins import LOSS_SCALES, OPTIMIZERS, Section

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

OPTIMIZERS.registered |= {"adamw": AdamW, "nag": NAG, "muon": Muon}
LOSS_SCALES.registered |= {
    "dynamic": DynamicLossScale, "headroom": HeadroomLossScale, "torch": TorchLossScale,
    "megatron": MegatronLossScale, "deepspeed": DeepSpeedLossScale, "static": StaticLossScale,
}  # fmt: skip


def build_loss_scale(section: PrecisionConfig) -> LossScale | None:
    """Return the loss scale of a run, or None if the run has none."""
    rule = loss_scale_rule(section.loss_scale.rule, section.dtype)
    if rule == "off":
        return None
    scale: LossScale = LOSS_SCALES.registered[rule](**_given(section.loss_scale, but="rule"))
    return scale


def build_optimizer(config: Config) -> Optimizer:
    """Return the optimizer of a run. The model's family knows which parameters are no matrices."""
    section, model, lrs = config.optimizer, config.model, lr_table(config)
    own = _given(getattr(section, section.name))
    if section.name in ("adamw", "nag", "muon"):
        own |= {key: DTYPES[value] for key, value in own.items() if key in ("state_dtype", "ns_dtype")}
    if section.name == "muon":
        family = family_of(model)
        own |= {"tables": family.tables, "fused": family.fused(model)}
    keys = {"weight_decay": section.weight_decay, **own}
    keys |= _scheduled(section, keys, len(lrs))
    groups = tuple(_group(group, section.weight_decay, keys["weight_decay"]) for group in section.groups)
    optimizer: Optimizer = OPTIMIZERS.registered[section.name](**keys, lr=lrs, groups=groups)
    return optimizer.for_model(family_of(model).sketch(model)) if section.name == "muon" else optimizer


def _scheduled(section: OptimizerConfig, keys: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the settings that have a schedule, by update."""
    numbers = {**keys, **dict(zip(("beta1", "beta2"), keys.get("betas", ()), strict=False))}
    found = {
        name: schedules.setting(numbers[name], steps, **_given(schedule))
        for name, schedule in section.schedules
        if schedule is not None
    }
    if found.keys() & {"beta1", "beta2"}:
        found["betas"] = [found.pop(name, numbers[name]) for name in ("beta1", "beta2")]
    return found


def _group(section: Section, weight_decay: float, scheduled: float | Sequence[float]) -> ParamGroup:
    """Return a group, whose own weight decay changes in proportion to the optimizer's."""
    keys = _given(section)
    if weight_decay and isinstance(scheduled, Sequence) and "weight_decay" in keys:
        keys["weight_decay"] = [keys["weight_decay"] * (decay / weight_decay) for decay in scheduled]
    return ParamGroup(**keys)


def _given(section: Section, but: str = "") -> dict[str, Any]:
    """Return the keys that are set. For the others the object has defaults of its own."""
    return {key: value for key, value in section if value is not None and key != but}


def build_precision(section: PrecisionConfig) -> Precision:
    dtype = DTYPES[section.dtype]
    grad_dtype = dtype if section.grad_dtype == "half" else torch.float32
    return Precision(dtype, grad_dtype, build_loss_scale(section), section.reduce_dtype)


def plan_pipeline(config: Config) -> list[StagePlan]:
    """Return the stages of all ranks; an empty list without a pipeline."""
    section = config.parallelism
    if section.pp_size == 1:
        return []
    v_shaped = section.pp_schedule in V_SHAPED
    return plan_stages(config.model, section.pp_size, stages_per_rank(section), v_shaped=v_shaped)


def build_runner(
    config: Config, engine: ShardedEngine, model: LanguageModel, stages: Sequence[StagePlan]
) -> MicroBatchRunner:
    """Return the object that sends a step's micro-batches through this rank's part of the model."""
    if not stages:
        return MicroBatchRunner(engine)
    assert isinstance(model, Decoder)  # the configuration's check refuses others
    # torch's pipelines import the compiler, which takes 2 s. Jobs without a pipeline do not wait for that.
    from megamix.parallel.pipeline_parallel import Handover, Pipeline

    topology = engine.topology
    batch = (config.training.micro_batch_size, config.model.seq_len)
    parts = topology.tp.size if config.parallelism.sequence_parallel else 1  # in training
    own = {number: plan.layers for number, plan in enumerate(stages) if plan.rank == topology.pp.rank}
    handover = Handover(topology.pp, len(stages), batch, topology.cp.size, parts)
    return Pipeline(engine, model, own, config.parallelism.pp_schedule, handover)


def build_engine(
    config: Config, model: nn.Module, units: Sequence[nn.Module], grad_accum_steps: int,
    topology: Topology | None = None, placements: Mapping[str, Placement] | None = None, fill: Fill | None = None,
) -> ShardedEngine:  # fmt: skip
    """Return the engine of a job, which keeps an average of the weights if the job has one. Every rank must call it.

    `fill`: writes the initial values of a model that has none yet.
    """
    engine = ShardedEngine(
        model,
        build_optimizer(config),
        build_precision(config.precision),
        Sharding(
            units=units,
            topology=topology,
            bucket_size=config.parallelism.bucket_size,
            overlap=config.parallelism.overlap,
            placements=placements or {},
            shard=config.parallelism.shard,
            accumulate=config.parallelism.accumulate,
        ),
        clip_grad=config.optimizer.clip_grad,
        grad_accum_steps=grad_accum_steps,
        compile_update=config.optimizer.compile,
        fill=fill,
    )
    if config.training.average is not None:
        WeightAverage(engine, config.training.average.decay)
    return engine


def build_loader(config: Config, source: SampleSource, device: torch.device) -> BatchLoader:
    """Return the loader of a source's batches, which deals packed sequences to the ranks that divide them."""
    section = config.parallelism
    dealt = config.data.packing == "documents" and section.cp_method == "gather"
    return BatchLoader(source, device, num_dealt=section.cp_size if dealt else 1)


def build_training(config: Config, device: torch.device) -> MicroBatchRunner:
    """Return the runner of a job that begins, with its engine and the model's initial weights. Every rank must call
    it.
    """
    stages = plan_pipeline(config)
    topology = Topology.connect(ep_size=config.parallelism.ep_size, **axis_sizes(config.parallelism))
    model, placements = build_model(
        config.model, config.parallelism, topology, device, stages, fp8=config.precision.fp8
    )
    accumulation = grad_accum_steps(config, topology.dp.size)
    fill = drawn(model, config.training.seed)
    engine = build_engine(config, model, model.units, accumulation, topology, placements, fill)
    return build_runner(config, engine, model, stages)


def lr_table(config: Config) -> list[float]:
    """Return the learning rates of updates 0 .. steps - 1, FP64."""
    return [*map(lr_rule(config), range(config.training.steps))]


def lr_rule(config: Config) -> Callable[[int], float]:
    """Return the function from the number of applied updates to the learning rate, FP64.

    It depends on nothing else, so skipped steps do not count.
    """
    schedule, steps, done = config.lr_schedule, config.training.steps, partial(tokens_of, config)
    style, lr, min_lr = schedule.decay_style, config.optimizer.lr, config.optimizer.min_lr
    if config.training.tokens:
        return schedules.rule(style, lr, done(steps), schedule.warmup_tokens, schedule.decay_tokens, min_lr, done)
    return schedules.rule(style, lr, steps, schedule.warmup_steps, schedule.decay_steps, min_lr)
