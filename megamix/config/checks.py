"""Checks over more than one field. Each proposes values that pass."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from megamix.config.batch_ramp import sizes_by_key
from megamix.config.choices import Tree, section_at
from megamix.config.mesh_checks import (
    MESH_CHECKS,
    axis_sizes,
    data_parallel_size,
    largest_divisor,
    mesh_problems,
    micro_batch_problems,
    reading_ranks,
    torch_problems,
)
from megamix.config.model_and_data import ModelConfig
from megamix.config.optimizers import SettingSchedule
from megamix.config.sections import Config
from megamix.config.toml_text import value_text
from megamix.plugins import Section
from megamix.settings.optimizers import AdamWSettings, MuonSettings, NAGSettings


def check_draft(tree: Tree, bad: Collection[tuple[int | str, ...]]) -> list[str]:
    """Return the problems that show although some values, whose paths are in `bad`, are unusable, one line each."""
    return check_config(cast(Config, _draft(Config, tree, bad)))


def _draft(section: type[Section], table: Tree, bad: Collection[tuple[int | str, ...]]) -> SimpleNamespace:
    """Return a table without its unusable keys."""
    draft, within = SimpleNamespace(), defaultdict(list)
    for first, *rest in bad:  # one line for all, since there may be thousands
        within[first].append(tuple(rest))
    for name, value in ({name: field.default for name, field in section.model_fields.items()} | table).items():
        inside = within[name]
        if isinstance(value, dict) and () not in inside and (inner := section_at(section, [name], table)):
            setattr(draft, name, _draft(inner, value, inside))
        elif not inside:
            setattr(draft, name, value)
    return draft


def check_config(config: Config) -> list[str]:
    """Return the problems between fields, one line each."""
    problems: list[str] = []
    for check in _CHECKS:
        # A check fails so on a key that is unusable and reported already, or that a plugin's table lacks or has in
        # another form.
        with suppress(ArithmeticError, AttributeError, TypeError, ValueError):
            problems += check(config)
    return problems


def model_problems(model: ModelConfig) -> list[str]:
    """Return the problems between the sizes of one that no file has been read for, one line each."""
    config = cast(Config, SimpleNamespace(model=model))
    return [problem for check in _MODEL_CHECKS for problem in check(config)]


def check_world_size(config: Config, world_size: int) -> list[str]:
    """Return the problems that show once the number of ranks is known, one line each."""
    dp_size = config.parallelism.dp_size or data_parallel_size(config, world_size)
    return [*mesh_problems(config, world_size), *_batch_problems(config, dp_size), *torch_problems(config)]


def grad_accum_steps(config: Config, dp_size: int) -> int:
    """Return the most micro-batches that each rank adds up in one step. `dp_size`: ranks along dp.

    Raises: ValueError if the global batch does not divide.
    """
    for problem in _batch_problems(config, dp_size):
        raise ValueError(problem)
    most = max(size for _, size in sizes_by_key(config.training))
    return most // (config.training.micro_batch_size * reading_ranks(config.parallelism, dp_size))


def _multiples(value: int, factor: int) -> str:
    """Return the multiples of `factor` next to `value`, as words."""
    below = value // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"


def _latents_stand_alone(config: Config) -> Iterator[str]:
    if (latent := config.model.latent_attention) is None:
        return
    for key in ("num_kv_heads", "head_dim", "rotary_dim", "qk_norm", "qkv_bias", "attention_gate"):
        if (value := getattr(config.model, key)) != ModelConfig.model_fields[key].default:
            yield (
                f"model.{key}: got {value_text(value)}, and [model.latent_attention] is set, which has no such thing; "
                f"leave {key} or [model.latent_attention] out"
            )
    if config.model.position == "rotary" and latent.rotary_dim % 2:
        yield (
            f"model.latent_attention.rotary_dim: got {latent.rotary_dim}, rotary positions turn pairs and need an "
            f"even one; write rotary_dim = {_multiples(latent.rotary_dim, 2)}"
        )


def _heads_share_width(config: Config) -> Iterator[str]:
    if getattr(config.model, "latent_attention", None):  # other families have no such key
        return
    hidden_size, num_heads, head_dim = config.model.hidden_size, config.model.num_heads, config.model.head_dim
    size, rest = divmod(hidden_size, num_heads)
    # Twice num_heads, so that the proposal also gives rotary positions their even head size.
    fix = f"write hidden_size = {_multiples(hidden_size, 2 * num_heads)}"
    if head_dim is None and rest:
        yield f"model.hidden_size: got {hidden_size}, must divide by num_heads {num_heads}; {fix}"
    elif config.model.position == "rotary" and (head_dim or size) % 2:
        got = f"model.hidden_size: got {hidden_size}, over num_heads {num_heads} this is a head size of {size}"
        if head_dim is not None:
            got, fix = f"model.head_dim: got {head_dim}", f"write head_dim = {_multiples(head_dim, 2)}"
        yield f'{got}, rotary positions turn pairs and need an even one; {fix}, or position = "learned"'


def _heads_share_keys(config: Config) -> Iterator[str]:
    num_heads, num_kv_heads = config.model.num_heads, config.model.num_kv_heads
    if num_kv_heads is not None and num_heads % num_kv_heads:
        fix = largest_divisor(num_heads, num_kv_heads)
        yield (f"model.num_kv_heads: got {num_kv_heads}, must divide num_heads {num_heads}; write num_kv_heads = {fix}")


def _unrotated_layers_are_there(config: Config) -> Iterator[str]:
    num_layers = config.model.num_layers
    if beyond := [layer for layer in config.model.unrotated_layers if layer >= num_layers]:
        yield (
            f"model.unrotated_layers: got {beyond[0]}, num_layers is {num_layers}; write layers from 0 to "
            f"{num_layers - 1}"
        )


def _windows_have_layers(config: Config) -> Iterator[str]:
    windows, num_layers = config.model.windows, config.model.num_layers
    if len(windows) > num_layers:
        yield (
            f"model.windows: got {len(windows)} entries, num_layers is {num_layers}; write at most one for each layer, "
            "fewer repeat"
        )


def _rotary_dim_fits(config: Config) -> Iterator[str]:
    model, turned = config.model, config.model.rotary_dim
    size = model.head_dim or model.hidden_size // model.num_heads
    if model.position == "rotary" and turned is not None and (turned % 2 or turned > size):
        fix = min(turned, size) // 2 * 2 or 2
        yield f"model.rotary_dim: got {turned}, must be even and at most head_dim {size}; write rotary_dim = {fix}"


def _experts_go_together(config: Config) -> Iterator[str]:
    if (experts := config.model.experts) is None:
        return
    said, layers = "model.experts", config.model.num_layers
    in_group, rest = divmod(experts.num_experts, experts.num_groups)
    if rest:
        fix = largest_divisor(experts.num_experts, experts.num_groups)
        yield (
            f"{said}.num_groups: got {experts.num_groups}, must divide num_experts {experts.num_experts}; write "
            f"num_groups = {fix}"
        )
    elif experts.top_groups > experts.num_groups:
        yield (
            f"{said}.top_groups: got {experts.top_groups}, num_groups is {experts.num_groups}; write top_groups = "
            f"{experts.num_groups}"
        )
    elif experts.top_k > (most := in_group * experts.top_groups):
        yield f"{said}.top_k: got {experts.top_k}, a token can choose among {most} experts; write top_k = {most}"
    if experts.dense_layers >= layers:
        yield (
            f"{said}.dense_layers: got {experts.dense_layers}, and num_layers is {layers}, so no layer would have "
            f"experts; write dense_layers = {layers - 1} or leave [{said}] out"
        )
    if config.model.mlp_bias or (config.model.bias and config.model.mlp_bias is None):
        yield f"model.mlp_bias: got true, but experts have no biases; write mlp_bias = false or leave [{said}] out"


def _recomputed_layers_are_there(config: Config) -> Iterator[str]:
    recompute: Any = config.model.recompute  # typed Any: a word has no number, and is no table
    full, num_layers = recompute.full, config.model.num_layers
    if full > num_layers:
        yield f"model.recompute.full: got {full}, num_layers is {num_layers}; write full = {num_layers}"


def _positions_are_enough(config: Config) -> Iterator[str]:
    model: Any = config.model  # typed Any: the section of a model of transformers
    for key in ("max_position_embeddings", "max_seq_len") if model.family == "transformers" else ():
        most = getattr(model.theirs, key, None)
        if isinstance(most, int) and model.seq_len > most:
            yield (
                f"model.seq_len: got {model.seq_len}, config.json has {key} {most}; write seq_len = {most}, or change "
                "that file"
            )


def _lr_falls(config: Config) -> Iterator[str]:
    lr, min_lr = config.optimizer.lr, config.optimizer.min_lr
    if min_lr > lr:
        yield f"optimizer.min_lr: got {min_lr}, must be at most lr {lr}; write min_lr = {lr / 10:g}"


def _schedule_fits(config: Config) -> Iterator[str]:
    unit = "tokens" if config.training.tokens else "steps"
    length = getattr(config.training, unit)
    warmup, decay = getattr(config.lr_schedule, f"warmup_{unit}"), getattr(config.lr_schedule, f"decay_{unit}")
    room = length - warmup
    if room < 0:
        yield (
            f"lr_schedule.warmup_{unit}: got {warmup}, must be at most training.{unit} {length}; "
            f"write warmup_{unit} = {length // 10}"
        )
    if room > 0 and decay is None and config.lr_schedule.decay_style == "wsd":
        yield (
            f'lr_schedule.decay_{unit}: not set, but decay_style = "wsd" needs the length of its final decay; '
            f"write decay_{unit} = {max(1, room // 5)}"
        )
    if decay is not None and 0 <= room < decay:
        yield (
            f"lr_schedule.decay_{unit}: got {decay}, but warmup_{unit} {warmup} + decay_{unit} {decay} "
            f"= {warmup + decay} exceeds training.{unit} {length}; "
            + (f"write decay_{unit} = {room}" if room else f"write a smaller warmup_{unit}")
        )


def _half_momentum_moves(config: Config) -> Iterator[str]:
    optimizer: Any = config.optimizer  # typed Any: its sections are those that plugins have registered, too
    nag = optimizer.nag
    schedule = optimizer.schedules.momentum or SettingSchedule()
    others = (schedule.start, schedule.end, *(group.momentum for group in optimizer.groups))
    momentum = max(nag.momentum, *(other or 0.0 for other in others))
    if nag.state_dtype == "bf16" and momentum > 1 - 2**-6:
        yield (
            f"optimizer.nag.state_dtype: got bf16 with momentum {momentum}, at which BF16 rounds away what moves; "
            'write state_dtype = "fp32", or momentum = 0.9'
        )


def _groups_suit_the_optimizer(config: Config) -> Iterator[str]:
    name = config.optimizer.name
    known = type(getattr(config.optimizer, name)).model_fields
    for number, group in enumerate(config.optimizer.groups):
        for key in ("betas", "eps", "momentum"):
            value = getattr(group, key)
            if value is not None and key not in known:
                yield (
                    f"optimizer.groups[{number}].{key}: got {value_text(value)}, but the optimizer {name} has "
                    f"no {key}; leave it out"
                )


def _table_has_turns(config: Config) -> Iterator[str]:
    optimizer: Any = config.optimizer  # likewise
    turns, table = optimizer.muon.ns_steps, optimizer.muon.ns_table
    if len(table) > turns:
        yield f"optimizer.muon.ns_steps: got {turns}, ns_table has {len(table)} turns; write ns_steps = {len(table)}"


def _settings_have_schedules(config: Config) -> Iterator[str]:
    own, steps = getattr(config.optimizer, config.optimizer.name), config.training.steps
    known = {"weight_decay"}
    known |= {"momentum"} if isinstance(own, NAGSettings | MuonSettings) else set()
    known |= {"beta1", "beta2"} if isinstance(own, AdamWSettings) else set()
    for name, schedule in config.optimizer.schedules:
        if schedule is None:
            continue
        key, most = f"optimizer.schedules.{name}", math.inf if name == "weight_decay" else 1.0
        if name not in known:
            yield f"{key}: got a schedule, but the optimizer {config.optimizer.name} has no {name}; leave it out"
        for bound in ("start", "end"):
            value = getattr(schedule, bound)
            if value is not None and not 0 <= value < most:
                limits = "must be at least 0" + " and less than 1" * (most == 1)
                yield f"{key}.{bound}: got {value}, {limits}; write for example {bound} = {0.85 if most == 1 else 0.0}"
        if (schedule.start is None) == (schedule.warmup_steps > 0):
            yield f"{key}: start and warmup_steps go together; write both, such as start = 0.0 and warmup_steps = 300"
        if schedule.end is None and schedule.decay_steps:
            yield f"{key}.decay_steps: got {schedule.decay_steps}, but end is not set; write for example end = 0.0"
        length = schedule.warmup_steps + (schedule.decay_steps or 0)
        if length > steps:
            yield (
                f"{key}: warmup_steps and decay_steps are {length} together, which exceeds training.steps {steps}; "
                "write smaller ones"
            )


def _fp16_is_scaled(config: Config) -> Iterator[str]:
    if config.precision.dtype == "fp16" and config.precision.loss_scale.rule == "off":
        yield (
            'precision.loss_scale.rule: got "off" with dtype = "fp16", whose gradients vanish below 2**-24; '
            'write rule = "auto", or dtype = "bf16"'
        )


def _fp8_has_products(config: Config) -> Iterator[str]:
    fp8, dtype = config.precision.fp8, config.precision.dtype
    if fp8.recipe == "none":
        return
    if fp8.recipe == "rowwise" and dtype == "fp16":
        yield (
            'precision.fp8.recipe: got "rowwise", whose products a GPU gives in BF16 alone; write '
            'recipe = "tensorwise" or precision.dtype = "bf16"'
        )
    if dtype == "fp32":
        yield f'precision.fp8.recipe: got "{fp8.recipe}", products of FP32 stay FP32; write precision.dtype = "bf16"'
    if config.model.family == "transformers":
        yield (
            f'precision.fp8.recipe: got "{fp8.recipe}", but family = "transformers" computes by modules of its own; '
            'write recipe = "none"'
        )
    rows = config.training.micro_batch_size * config.model.seq_len // config.parallelism.cp_size
    if fp8.weight_grad == "fp8" and rows % 16:
        yield (
            f'precision.fp8.weight_grad: got "fp8", which sums over the {rows} tokens of a rank\'s micro-batch, must '
            'be a multiple of 16; write weight_grad = "half", or another micro_batch_size or seq_len'
        )


def _sums_suit_gradients(config: Config) -> Iterator[str]:
    precision = config.precision
    dtype, grad_dtype, reduce_dtype = precision.dtype, precision.grad_dtype, precision.reduce_dtype
    grads_are_half = "fp32" not in (dtype, grad_dtype)
    if grads_are_half and reduce_dtype == "fp32":
        yield (
            f'precision.reduce_dtype: got "fp32", but gradients are {dtype}, and a wider format on the wire adds no '
            'information; write reduce_dtype = "half_fp32_sum", or grad_dtype = "fp32"'
        )
    if not grads_are_half and reduce_dtype in ("half", "half_fp32_sum"):
        fix = "" if dtype == "fp32" else ', or grad_dtype = "half"'
        yield (
            f'precision.reduce_dtype: got "{reduce_dtype}", but gradients are FP32 with dtype = "{dtype}" and '
            f'grad_dtype = "{grad_dtype}"; write reduce_dtype = "fp32"{fix}'
        )


def _scale_starts_in_range(config: Config) -> Iterator[str]:
    scale: Any = config.precision.loss_scale  # typed Any: the section of a rule that has min_scale and max_scale
    start, low, high = scale.init_scale, scale.min_scale or 0.0, scale.max_scale or 2.0**127
    if low > high:
        yield (
            f"precision.loss_scale.min_scale: got {low:g}, must be at most max_scale {high:g}; "
            f"write min_scale = {high:g}"
        )
    elif not low <= start <= high:
        yield (
            f"precision.loss_scale.init_scale: got {start}, must lie from min_scale {low} to max_scale {high}; "
            f"write init_scale = {low if start < low else high}"
        )


def _ranks_fill_batch(config: Config) -> Iterator[str]:
    yield from _batch_problems(config, None)  # dp_size is judged first, once the number of ranks is known


def _batch_problems(config: Config, dp_size: int | None) -> Iterator[str]:
    for key, size in sizes_by_key(config.training):
        yield from _size_problems(config, dp_size, key, size)


def _size_problems(config: Config, dp_size: int | None, key: str, size: int) -> Iterator[str]:
    micro_batch_size = config.training.micro_batch_size
    copies = reading_ranks(config.parallelism, 1)
    share = micro_batch_size * copies * (dp_size or 1)
    if size % share:
        factors = f"{micro_batch_size}"
        if dp_size is not None or copies > 1:
            factors += f" * dp_size {dp_size}" * (dp_size is not None) + f" * {copies} replicas" * (copies > 1)
            factors += f" = {share}"
        fix = f"write {key} = {_multiples(size, share)}"
        if dp_size is None:
            fix += f" for one data-parallel rank, {_multiples(size, 2 * share)} for two"
        if dp_size and size % (micro_batch_size * copies) == 0:
            fewer = largest_divisor(size // (micro_batch_size * copies), dp_size)
            ranks = fewer * math.prod(axis_sizes(config.parallelism).values())
            fix += f", or take {ranks} rank{'s' if ranks > 1 else ''} (dp_size {fewer})"
        yield f"training.{key}: got {size}, must be a multiple of micro_batch_size {factors}; {fix}"
    elif dp_size is not None:
        yield from micro_batch_problems(config, key, size, size // share)


def _ramp_ends_at_global_batch(config: Config) -> Iterator[str]:
    ramp, size = config.training.batch_ramp, config.training.global_batch_size
    if ramp and (last := ramp[-1][1]) != size:
        yield (
            f"training.global_batch_size: got {size}, but the last size of batch_ramp is {last}; "
            f"write global_batch_size = {last}"
        )


def _validation_is_named_once(config: Config) -> Iterator[str]:
    split, valid = config.data.split, config.data.valid
    has_no_name = isinstance(valid, str | list) or (isinstance(valid, Mapping) and "" in valid)
    if split is not None and has_no_name:
        yield (
            f"data.split: got {value_text(split)}, but data.valid names other validation tokens; "
            "leave split or valid out, or name the set, as in data.valid.web"
        )
    if split is None and valid is None and config.training.eval_interval:
        yield (
            f"training.eval_interval: got {config.training.eval_interval}, but data.valid is not set; "
            "write valid under [data], or eval_interval = 0"
        )


def _profile_ends_in_time(config: Config) -> Iterator[str]:
    start_step, num_steps, steps = config.profiling.start_step, config.profiling.num_steps, config.training.steps
    if num_steps and start_step + num_steps > steps:
        yield (
            f"profiling.start_step: got {start_step}, start_step {start_step} + num_steps {num_steps} = "
            f"{start_step + num_steps} exceeds training.steps {steps}; "
            + (f"write start_step = {steps - num_steps}" if num_steps <= steps else f"write num_steps = {steps}")
        )


_MODEL_CHECKS = (
    _latents_stand_alone,
    _heads_share_width,
    _heads_share_keys,
    _unrotated_layers_are_there,
    _windows_have_layers,
    _rotary_dim_fits,
    _experts_go_together,
)
_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    *_MODEL_CHECKS,
    _recomputed_layers_are_there,
    _positions_are_enough,
    _lr_falls,
    _schedule_fits,
    _half_momentum_moves,
    _groups_suit_the_optimizer,
    _table_has_turns,
    _settings_have_schedules,
    _fp16_is_scaled,
    _fp8_has_products,
    _sums_suit_gradients,
    _scale_starts_in_range,
    _ranks_fill_batch,
    _ramp_ends_at_global_batch,
    *MESH_CHECKS,
    _validation_is_named_once,
    _profile_ends_in_time,
)
