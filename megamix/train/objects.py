"""Optimizer, loss scale, number formats and loader of a job."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megamix.config import Config, OptimizerConfig, Pace, ParallelismConfig, PrecisionConfig, loss_scale_rule
from megamix.config.sections import LrScheduleConfig
from megamix.data.loader import BatchLoader
from megamix.data.source import SampleSource
from megamix.mixed_precision.headroom import HeadroomLossScale
from megamix.mixed_precision.loss_scale import (
    DeepSpeedLossScale,
    DynamicLossScale,
    LossScale,
    MegatronLossScale,
    StaticLossScale,
    TorchLossScale,
)
from megamix.mixed_precision.optim import schedules
from megamix.mixed_precision.optim.adamw import AdamW
from megamix.mixed_precision.optim.muon import Muon
from megamix.mixed_precision.optim.nag import NAG
from megamix.mixed_precision.optim.optimizer import Optimizer, ParamGroup
from megamix.mixed_precision.settings import Precision
from megamix.model.family import family_of
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
    section, model = config.optimizer, config.model
    lrs = lr_table(config.lr_schedule, section, config.pace)
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


def lr_table(schedule: LrScheduleConfig, optimizer: OptimizerConfig, pace: Pace) -> list[float]:
    """Return the learning rates of updates 0 .. steps - 1, FP64."""
    return [*map(lr_rule(schedule, optimizer, pace), range(pace.steps))]


def lr_rule(schedule: LrScheduleConfig, optimizer: OptimizerConfig, pace: Pace) -> Callable[[int], float]:
    """Return the function from the number of applied updates to the learning rate, FP64.

    It depends on nothing else, so skipped steps do not count.
    """
    style, lr, min_lr, steps = schedule.decay_style, optimizer.lr, optimizer.min_lr, pace.steps
    if pace.in_tokens:
        tokens = pace.tokens(steps)
        return schedules.rule(style, lr, tokens, schedule.warmup_tokens, schedule.decay_tokens, min_lr, pace.tokens)
    return schedules.rule(style, lr, steps, schedule.warmup_steps, schedule.decay_steps, min_lr)


def build_loader(
    section: ParallelismConfig, source: SampleSource, device: torch.device, *, packed: bool
) -> BatchLoader:
    """Return the loader of a source's batches, which deals packed sequences to the ranks that divide them."""
    context = section.context
    deals = packed and context is not None and context.method == "gather"
    return BatchLoader(source, device, num_dealt=context.size if context and deals else 1)
