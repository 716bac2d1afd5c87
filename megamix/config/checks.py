"""Checks over more than one field: each topic yields the key of a contradiction, and what to write instead."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from megamix.config.choices import Tree, section_at
from megamix.config.config import Config
from megamix.config.mesh_checks import (
    MESH_CHECKS,
    Found,
    data_parallel_size,
    largest_divisor,
    mesh_problems,
    micro_batch_problems,
    ranks_along,
    reading_ranks,
    torch_problems,
)
from megamix.config.model_and_data import ModelConfig
from megamix.config.optimizers import SHARES, SettingSchedule
from megamix.config.pace import sizes_by_key
from megamix.config.toml_text import value_text
from megamix.plugins import Section
from megamix.settings.optimizers import OF_SOME_OPTIMIZERS, AdamWSettings, NAGSettings


class _Unknown:
    """Stands for a value that is unusable and told already: whatever is computed from it is unknown and does not
    hold.
    """

    def _unknown(self, *others: object) -> Any:
        return self

    def __bool__(self) -> bool:
        return False

    __getattr__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _unknown
    __floordiv__ = __rfloordiv__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown


def draft_of(section: type[Section], table: Tree, bad: Collection[tuple[int | str, ...]]) -> SimpleNamespace:
    """Return a table, or a configuration, whose unusable keys are unknown. `bad`: their paths."""
    draft, within = SimpleNamespace(), defaultdict(list)
    for first, *rest in bad:  # one line for all, since there may be thousands
        within[first].append(tuple(rest))
    for name, value in ({name: field.default for name, field in section.model_fields.items()} | table).items():
        inside = within[name]
        if isinstance(value, dict) and () not in inside and (inner := section_at(section, [name], table)):
            setattr(draft, name, draft_of(inner, value, inside))
        else:
            setattr(draft, name, _Unknown() if inside else value)
    return draft


def check_config(config: Config | SimpleNamespace) -> list[str]:
    """Return the problems between fields, one line each; of a draft those that show although some are unusable."""
    return _lines(_CHECKS, config)


def model_problems(model: ModelConfig) -> list[str]:
    """Return the problems between the sizes of one that no file has been read for, one line each."""
    return _lines(_MODEL_CHECKS, SimpleNamespace(model=model))


def check_world_size(config: Config, world_size: int) -> list[str]:
    """Return the problems that show once the number of ranks is known, one line each."""
    dp_size = config.parallelism.dp_size or data_parallel_size(config.parallelism, world_size)
    checks = (lambda c: mesh_problems(c, world_size), lambda c: _batch_problems(c, dp_size), torch_problems)
    return [line for check in checks for line in _told(check, config)]


def grad_accum_steps(config: Config, dp_size: int) -> int:
    """Return the most micro-batches that each rank adds up in one step. `dp_size`: ranks along dp.

    Raises: ValueError if the global batch does not divide.
    """
    for problem in _told(lambda c: _batch_problems(c, dp_size), config):
        raise ValueError(problem)
    most = max(size for _, size in sizes_by_key(config.training))
    return most // (config.training.micro_batch_size * reading_ranks(config.parallelism, dp_size))


def _lines(checks: Iterable[Callable[[Any], Found]], config: object) -> list[str]:
    """Return a line for each contradiction that the checks find: key, value, and the check's own words."""
    lines = list[str]()
    for check in checks:
        # A check fails so on a key that is unusable, or that a plugin's table lacks or has in another form.
        with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            lines += _told(check, config)
    return lines


def _told(check: Callable[[Any], Found], config: object) -> Iterator[str]:
    return (f"{key}: {_got(config, key)}, {text}" for key, text in check(config))


def _got(config: object, key: str) -> str:
    value: Any = config
    for part in re.findall(r"[\w-]+", key):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    if isinstance(value, Section | SimpleNamespace):
        return "got a table"
    return "not set" if value is None else f"got {value_text(value)}"


def _multiple(value: int, factor: int) -> int:
    """Return the first multiple of `factor` that is not below `value`."""
    return -(-value // factor) * factor


def _latents(config: Any) -> Found:
    model, latent = config.model, config.model.latent_attention
    for key in ("num_kv_heads", "head_dim", "qk_norm", "qkv_bias", "attention_gate"):
        if latent and getattr(model, key) != ModelConfig.model_fields[key].default:
            yield f"model.{key}", f"but [model.latent_attention] has no such thing; leave {key} or that table out"
    if latent and model.rope and model.rope.dim:
        yield "model.rope.dim", "but [model.latent_attention] has no such thing; leave dim or that table out"
    if latent and model.rope and latent.rotary_dim % 2:
        key, fix = "model.latent_attention.rotary_dim", _multiple(latent.rotary_dim, 2)
        yield key, f"but rotary positions turn pairs and need an even one; write rotary_dim = {fix}"


def _heads(config: Any) -> Found:
    model = config.model
    if getattr(model, "latent_attention", None):  # other families have no such key
        return
    whole = f"write hidden_size = {_multiple(model.hidden_size, 2 * model.num_heads)}"
    pairs = "but rotary positions turn pairs and need an even one; write rope = false, or"
    if model.head_dim is None and model.hidden_size % model.num_heads:
        yield "model.hidden_size", f"must divide by num_heads {model.num_heads}; {whole}"
    elif model.head_dim is None and model.rope and model.hidden_size // model.num_heads % 2:
        size = model.hidden_size // model.num_heads
        yield "model.hidden_size", f"over num_heads {model.num_heads} a head size of {size}, {pairs} {whole[6:]}"
    elif model.head_dim and model.rope and model.head_dim % 2:
        yield "model.head_dim", f"{pairs} head_dim = {model.head_dim + 1}"


def _keys_of_heads(config: Any) -> Found:
    num_heads, num_kv_heads = config.model.num_heads, config.model.num_kv_heads
    if num_kv_heads and num_heads % num_kv_heads:
        fix = largest_divisor(num_heads, num_kv_heads)
        yield "model.num_kv_heads", f"must divide num_heads {num_heads}; write num_kv_heads = {fix}"


def _layers(config: Any) -> Found:
    model, layers = config.model, config.model.num_layers
    if model.rope and max(model.rope.unrotated_layers or (0,)) >= layers:
        yield "model.rope.unrotated_layers", f"but num_layers is {layers}; write layers from 0 to {layers - 1}"
    if model.window and len(model.window.sizes) > layers:
        yield "model.window.sizes", f"but num_layers is {layers}; write at most one for each layer, fewer repeat"


def _rope_dim(config: Any) -> Found:
    model, turned = config.model, config.model.rope and config.model.rope.dim
    size = model.head_dim or model.hidden_size // model.num_heads
    if turned and (turned % 2 or turned > size):
        fix = min(turned, size) // 2 * 2 or 2
        yield "model.rope.dim", f"must be even and at most head_dim {size}; write dim = {fix}"


def _experts(config: Any) -> Found:
    model, experts, name = config.model, config.model.experts, "model.experts"
    if not experts:
        return
    count, top = (experts.groups.count, experts.groups.top) if experts.groups else (1, 1)
    within = experts.num_experts // count * top
    if experts.num_experts % count:
        divisor = largest_divisor(experts.num_experts, count)
        fix = f"write count = {divisor}" if divisor > 1 else f"leave [{name}.groups] out"
        yield f"{name}.groups.count", f"must divide num_experts {experts.num_experts}; {fix}"
    elif top > count:
        yield f"{name}.groups.top", f"must be at most count {count}; write top = {count}"
    elif experts.top_k > within:
        yield f"{name}.top_k", f"but a token can choose among {within} experts; write top_k = {within}"
    if experts.dense_layers >= model.num_layers:
        leaves = f"but num_layers is {model.num_layers}, so no layer would have experts"
        yield f"{name}.dense_layers", f"{leaves}; write dense_layers = {model.num_layers - 1} or leave [{name}] out"
    if model.mlp_bias or (model.bias and model.mlp_bias is None):
        yield "model.mlp_bias", f"but experts have no biases; write mlp_bias = false or leave [{name}] out"


def _recomputed_layers(config: Any) -> Found:
    layers = config.model.num_layers
    if getattr(config.model.recompute, "full", 0) > layers:
        yield "model.recompute.full", f"but num_layers is {layers}; write full = {layers}"


def _positions(config: Any) -> Found:
    for key in ("max_position_embeddings", "max_seq_len") if config.model.family == "transformers" else ():
        most = getattr(config.model.theirs, key, None)
        if isinstance(most, int) and config.model.seq_len > most:
            yield "model.seq_len", f"but config.json has {key} {most}; write seq_len = {most}, or change that file"


def _rates(config: Any) -> Found:
    unit = "tokens" if config.training.tokens else "steps"
    length, schedule = getattr(config.training, unit), config.lr_schedule
    warmup, decay = getattr(schedule, f"warmup_{unit}"), getattr(schedule, f"decay_{unit}")
    if config.optimizer.min_lr > config.optimizer.lr:
        lr = config.optimizer.lr
        yield "optimizer.min_lr", f"must be at most lr {lr}; write min_lr = {lr / 10:g}"
    if warmup > length:
        fix = f"write warmup_{unit} = {length // 10}"
        yield f"lr_schedule.warmup_{unit}", f"must be at most training.{unit} {length}; {fix}"
    elif decay is None and warmup < length and schedule.decay_style == "wsd":
        needs = 'but decay_style = "wsd" needs the length of its final decay'
        yield f"lr_schedule.decay_{unit}", f"{needs}; write decay_{unit} = {max(1, (length - warmup) // 5)}"
    elif decay and warmup + decay > length:
        exceeds = f"but warmup_{unit} {warmup} + decay_{unit} {decay} exceeds training.{unit} {length}"
        yield f"lr_schedule.decay_{unit}", f"{exceeds}; write a smaller warmup_{unit} or decay_{unit}"


def _optimizer(config: Any) -> Found:
    optimizer, name = config.optimizer, config.optimizer.name
    own = getattr(optimizer, name)
    if name == "nag":
        schedule = optimizer.schedules.momentum or SettingSchedule()
        others = (schedule.start, schedule.end, *(group.momentum for group in optimizer.groups))
        momentum = max(own.momentum, *(other or 0.0 for other in others))
        if own.state_dtype == "bf16" and momentum > 1 - 2**-6:
            lost = f"but at momentum {momentum} BF16 rounds away what moves"
            yield "optimizer.nag.state_dtype", f'{lost}; write state_dtype = "fp32", or momentum = 0.9'
    if name == "muon" and len(own.ns_table) > own.ns_steps:
        turns = len(own.ns_table)
        yield "optimizer.muon.ns_steps", f"but ns_table has {turns} turns; write ns_steps = {turns}"
    known = type(own).model_fields
    for number, group in enumerate(optimizer.groups):
        for key in OF_SOME_OPTIMIZERS:
            if getattr(group, key) is not None and key not in known:
                yield f"optimizer.groups[{number}].{key}", f"but the optimizer {name} has no {key}; leave it out"


def _schedules(config: Any) -> Found:
    name, steps = config.optimizer.name, config.training.steps
    own, known = getattr(config.optimizer, name), {"weight_decay"}
    known |= vars(own).keys() if isinstance(own, AdamWSettings | NAGSettings) else set()
    known |= {"beta1", "beta2"} if "betas" in known else set()
    for setting, schedule in config.optimizer.schedules:
        if schedule is None:
            continue
        key, most = f"optimizer.schedules.{setting}", 1.0 if setting in SHARES else math.inf
        if setting not in known:
            yield key, f"but the optimizer {name} has no {setting}; leave it out"
        for bound in ("start", "end"):
            if not 0 <= (getattr(schedule, bound) or 0) < most:
                limits = "must be at least 0" + " and less than 1" * (most == 1)
                yield f"{key}.{bound}", f"{limits}; write for example {bound} = 0.0"
        if (schedule.start is None) == (schedule.warmup_steps > 0):
            yield key, "but start and warmup_steps go together; write both, such as start = 0.0 and warmup_steps = 300"
        if schedule.end is None and schedule.decay_steps:
            yield f"{key}.decay_steps", "but end is not set; write for example end = 0.0"
        if schedule.warmup_steps + (schedule.decay_steps or 0) > steps:
            yield key, f"but warmup_steps and decay_steps together exceed training.steps {steps}; write less"


def _precision(config: Any) -> Found:
    dtype, grad_dtype, reduce_dtype = (getattr(config.precision, f"{name}dtype") for name in ("", "grad_", "reduce_"))
    if dtype == "fp16" and config.precision.loss_scale.rule == "off":
        lost = 'but gradients of dtype = "fp16" vanish below 2**-24'
        yield "precision.loss_scale.rule", f'{lost}; write rule = "auto", or dtype = "bf16"'
    grads_are_half = dtype in ("fp16", "bf16") and grad_dtype == "half"
    if grads_are_half and reduce_dtype == "fp32":
        wider = f"but gradients are {dtype}, and a wider format on the wire adds no information"
        yield "precision.reduce_dtype", f'{wider}; write reduce_dtype = "half_fp32_sum", or grad_dtype = "fp32"'
    if "fp32" in (dtype, grad_dtype) and reduce_dtype in ("half", "half_fp32_sum"):
        wide = f'but gradients are FP32 with dtype = "{dtype}" and grad_dtype = "{grad_dtype}"'
        yield "precision.reduce_dtype", f'{wide}; write reduce_dtype = "fp32"'


def _fp8(config: Any) -> Found:
    fp8, dtype, key = config.precision.fp8, config.precision.dtype, "precision.fp8.recipe"
    if not fp8:
        return
    if fp8.recipe == "rowwise" and dtype == "fp16":
        fix = 'write recipe = "tensorwise" or precision.dtype = "bf16"'
        yield key, f"whose products a GPU gives in BF16 alone; {fix}"
    if dtype == "fp32":
        yield key, 'but products of FP32 stay FP32; write precision.dtype = "bf16"'
    if config.model.family == "transformers":
        yield key, 'but family = "transformers" computes by modules of its own; write precision.fp8 = false'
    rows = config.training.micro_batch_size * config.model.seq_len // ranks_along(config.parallelism, "cp")
    if fp8.weight_grad == "fp8" and rows % 16:
        sums = f"which sums over the {rows} tokens of a rank's micro-batch, must be a multiple of 16"
        fix = 'write weight_grad = "half", or another micro_batch_size or seq_len'
        yield "precision.fp8.weight_grad", f"{sums}; {fix}"


def _loss_scale(config: Any) -> Found:
    scale, name = config.precision.loss_scale, "precision.loss_scale"
    if not hasattr(scale, "max_scale"):  # static, off, or a plugin's
        return
    start, low, high = scale.init_scale, scale.min_scale or 0.0, scale.max_scale or 2.0**127
    if low > high:
        yield f"{name}.min_scale", f"must be at most max_scale {high:g}; write min_scale = {high}"
    elif start < low or start > high:
        fix = low if start < low else high
        yield f"{name}.init_scale", f"must lie from min_scale {low} to max_scale {high}; write init_scale = {fix}"


def _batches(config: Any) -> Found:
    ramp = config.training.batch_ramp
    if ramp and ramp[-1][1] != config.training.global_batch_size:
        last = f"must be the last size of batch_ramp; write global_batch_size = {ramp[-1][1]}"
        yield "training.global_batch_size", last
    yield from _batch_problems(config, None)  # dp_size is judged first, once the number of ranks is known


def _batch_problems(config: Any, dp_size: int | None) -> Found:
    ranks = reading_ranks(config.parallelism, dp_size or 1)
    share = config.training.micro_batch_size * ranks
    for key, size in sizes_by_key(config.training):
        if size % share:
            of = f"micro_batch_size {config.training.micro_batch_size}"
            of += f" * {ranks} data-parallel ranks = {share}" if ranks > 1 else ""
            yield f"training.{key}", f"must be a multiple of {of}; write {key} = {_multiple(size, share)}"
        elif dp_size is not None:
            yield from micro_batch_problems(config, key, size, size // share)


def _validation(config: Any) -> Found:
    split, valid = config.data.split, config.data.valid
    if split and (isinstance(valid, str | list) or (isinstance(valid, Mapping) and "" in valid)):
        fix = "leave split or valid out, or name the set, as in data.valid.web"
        yield "data.split", f"but data.valid names other validation tokens; {fix}"
    if split is None and valid is None and config.training.eval_interval:
        fix = "write valid under [data], or eval_interval = 0"
        yield "training.eval_interval", f"but data.valid is not set; {fix}"


def _profile(config: Any) -> Found:
    profiling, steps = config.profiling, config.training.steps
    end = profiling.start_step + profiling.num_steps
    if profiling.num_steps and end > steps:
        yield "profiling.start_step", f"with num_steps it ends at {end}, training.steps is {steps}; write smaller ones"


_MODEL_CHECKS = (_latents, _heads, _keys_of_heads, _layers, _rope_dim, _experts)
_JOB_CHECKS = (_recomputed_layers, _positions, _rates, _optimizer, _schedules, _precision, _fp8, _loss_scale)
_CHECKS = (*_MODEL_CHECKS, *_JOB_CHECKS, _batches, *MESH_CHECKS, _validation, _profile)
