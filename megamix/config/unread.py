"""Keys that are read only where another key says so: one table, held by tests against what the code reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from megamix.config.sections import NESTED, SCALE_RANGES, SECTIONS, loss_scale_rule

Tree = dict[str, Any]
_MISSING = object()


class Where(NamedTuple):
    """What one key must be for another to be read."""

    key: str
    holds: Callable[[Any], bool]
    example: object  # for which it holds


def _one_of(key: str, *values: object) -> tuple[Where, ...]:
    return (Where(key, values.__contains__, values[0]),)


def _at_least(key: str, least: int) -> tuple[Where, ...]:
    return (Where(key, lambda value: isinstance(value, int) and value >= least, least),)


_RULE = "precision.loss_scale"
# A key is read where any one of these holds. Keys that are not listed are always read: also a number that another
# number takes the sense of, such as momentum_form beside momentum = 0, for a sweep passes through such values.
# A table stands before its own keys.
READ_WHERE: dict[str, tuple[Where, ...]] = {
    "model.rope_theta": _one_of("model.position", "rotary"),
    "model.rope_scaling": _one_of("model.position", "rotary"),
    "model.rope_scaling.low_freq_factor": _one_of("model.rope_scaling.rule", "llama3"),
    "model.rope_scaling.high_freq_factor": _one_of("model.rope_scaling.rule", "llama3"),
    "model.rope_scaling.original_seq_len": _one_of("model.rope_scaling.rule", "llama3"),
    "optimizer.min_lr": _one_of("lr_schedule.decay_style", "cosine", "linear", "wsd", "inverse_sqrt"),
    "optimizer.betas": _one_of("optimizer.name", "adamw"),
    "optimizer.eps": _one_of("optimizer.name", "adamw"),
    "optimizer.momentum": _one_of("optimizer.name", "nag"),
    "optimizer.momentum_form": _one_of("optimizer.name", "nag"),
    "optimizer.decoupled_weight_decay": _one_of("optimizer.name", "nag"),
    "lr_schedule.decay_steps": _one_of("lr_schedule.decay_style", "cosine", "linear", "wsd"),
    "precision.init_scale": _one_of(_RULE, *SCALE_RANGES),
    "precision.growth_factor": _one_of(_RULE, "dynamic", "torch"),
    "precision.backoff_factor": _one_of(_RULE, "dynamic", "torch"),
    "precision.growth_interval": _one_of(_RULE, "dynamic", "torch", "megatron", "deepspeed"),
    "precision.hysteresis": _one_of(_RULE, "dynamic", "megatron", "deepspeed"),
    "precision.consecutive_hysteresis": _one_of(_RULE, "deepspeed"),
    "precision.margin": _one_of(_RULE, "headroom"),
    "precision.min_scale": _one_of(_RULE, *SCALE_RANGES),
    "precision.max_scale": _one_of(_RULE, *SCALE_RANGES),
    "precision.max_retries": _one_of("precision.on_overflow", "requeue", "redo"),
    "training.eval_batches": (
        Where("data.valid", bool, "runs/data/valid"),
        Where("data.split", bool, [95, 5]),
    ),
    "parallelism.pp_schedule": _at_least("parallelism.pp_size", 2),
    "parallelism.pp_stages_per_rank": _at_least("parallelism.pp_size", 2),
    "parallelism.sequence_parallel": _at_least("parallelism.tp_size", 2),
    "checkpoint.async_save": _at_least("checkpoint.save_interval", 1),
    "checkpoint.on_save_failure": _at_least("checkpoint.save_interval", 1),
    "profiling.start_step": _at_least("profiling.num_steps", 1),
}


class Unread(NamedTuple):
    """A key that stands in a configuration and is not read."""

    key: str
    value: object
    deciders: tuple[str, ...]  # the keys whose values make it so, set or not


def part_read(tree: Mapping[str, Any], bad: Sequence[tuple[int | str, ...]] = ()) -> tuple[Tree, list[Unread]]:
    """Return a configuration without the keys that its other keys make unread, and those keys.

    `bad`: the paths of unusable values; what they would decide is taken for read.
    """
    read, unread = dict(tree), []
    for key, wheres in READ_WHERE.items():
        if not is_set(read, key):
            continue
        decided = [_decided(read, where) for where in wheres]
        deciders = tuple(decider for _, keys in decided for decider in keys)
        if not any(holds for holds, _ in decided) and not any(_is_bad(decider, bad) for decider in deciders):
            unread.append(Unread(key, setting(read, key), deciders))
            read = _without(read, key.split("."))
    return read, unread


def is_set(tree: Mapping[str, Any], key: str) -> bool:
    """Tell whether a key, or a table, stands in a configuration."""
    return _found(tree, key) is not _MISSING


def setting(tree: Mapping[str, Any], key: str) -> Any:
    """Return a key's value, or its default."""
    value = _found(tree, key)
    return default(key) if value is _MISSING else value


def _found(tree: Mapping[str, Any], key: str) -> Any:
    found: Any = tree
    for name in key.split("."):
        found = found.get(name, _MISSING) if isinstance(found, Mapping) else _MISSING
    return found


def default(key: str) -> Any:
    """Return a key's default; None for one that is required, too."""
    section, *tables, name = key.split(".")
    value = (NESTED[tables[-1]] if tables else SECTIONS[section]).model_fields[name].default
    return None if value is PydanticUndefined else value


def is_default(key: str, value: object) -> bool:
    """Tell whether a value is the key's default: lists of TOML are tuples there."""
    plain = tuple(value) if isinstance(value, list) else value
    return bool(plain == default(key))


def with_defaults(tree: Mapping[str, Any]) -> Tree:
    """Return the sections of a configuration, with the default of every key that is missing and has one, as TOML has
    it.
    """
    whole = {}
    for section, model in SECTIONS.items():
        defaults = {name: default(f"{section}.{name}") for name in model.model_fields}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
        given = tree.get(section, {})
        whole[section] = {name: value for name, value in plain.items() if value is not None} | given
    return {**tree, **whole}


def _decided(tree: Mapping[str, Any], where: Where) -> tuple[bool, tuple[str, ...]]:
    """Whether it holds, and the keys that decide it."""
    value = setting(tree, where.key)
    if where.key != _RULE or value != "auto":
        return where.holds(value), (where.key,)
    rule = loss_scale_rule(value, setting(tree, "precision.dtype"))  # dtype names it
    return where.holds(rule), (where.key, "precision.dtype")


def _is_bad(key: str, bad: Sequence[tuple[int | str, ...]]) -> bool:
    """Whether an unusable value lies at a key, in it or around it."""
    path = tuple(key.split("."))
    return any(item[: len(path)] == path[: len(item)] for item in bad)


def _without(tree: Mapping[str, Any], path: Sequence[str]) -> Tree:
    name, *inner = path
    if not inner:
        return {key: value for key, value in tree.items() if key != name}
    return {**tree, name: _without(tree[name], inner)}
