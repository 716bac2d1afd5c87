"""Keys that are read only where other keys say so, in tables that tests hold against what the code reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from megamix.config.choices import Tree, section_at
from megamix.config.sections import CHOOSING, CHOSEN, Tables
from megamix.plugins import Section

_MISSING = object()


class Where(NamedTuple):
    """Holds a condition: one key has such a value, so another is read."""

    key: str
    holds: Callable[[Any], bool]
    example: object  # a value for which it holds


def _one_of(key: str, *values: object) -> tuple[Where, ...]:
    return (Where(key, values.__contains__, values[0]),)


def _at_least(key: str, least: int) -> tuple[Where, ...]:
    return (Where(key, lambda value: isinstance(value, int) and value >= least, least),)


def _has_window(sizes: object) -> bool:
    return isinstance(sizes, list | tuple) and any(sizes)


_LONG_IN_TOKENS = (Where("training.tokens", bool, 20_000_000_000),)
_LONG_IN_STEPS = _one_of("training.tokens", 0)
_DECAYS = _one_of("lr_schedule.decay_style", "cosine", "linear", "wsd")
_SAVES = (*_at_least("checkpoint.save_interval", 1), *_at_least("checkpoint.keep_every", 1))

# A key is read where each of its conditions holds, one way or another. Keys that are not listed are always read: also a
# number that another number takes the sense of, such as momentum_form beside momentum = 0, for a sweep passes through
# such values.
READ_WHERE: dict[str, tuple[tuple[Where, ...], ...]] = {
    "model.window.rope_theta": (
        (Where("model.window.sizes", _has_window, [1024, 0]),),
        (Where("model.rope", lambda rope: rope is not False, {"theta": 10000.0}),),
    ),
    "optimizer.min_lr": (_one_of("lr_schedule.decay_style", "cosine", "linear", "wsd", "inverse_sqrt"),),
    "lr_schedule.warmup_steps": (_LONG_IN_STEPS,),
    "lr_schedule.warmup_tokens": (_LONG_IN_TOKENS,),
    "lr_schedule.decay_steps": (_DECAYS, _LONG_IN_STEPS),
    "lr_schedule.decay_tokens": (_DECAYS, _LONG_IN_TOKENS),
    "training.steps": (_LONG_IN_STEPS,),
    "precision.max_retries": (_one_of("precision.on_overflow", "requeue", "redo"),),
    "training.eval_batches": ((Where("data.valid", bool, "runs/data/valid"), Where("data.split", bool, [95, 5])),),
    "checkpoint.async_save": (_SAVES,),
    "checkpoint.on_save_failure": (_SAVES,),
    "metrics.sample_prompt": ((Where("data.tokenizer", bool, "runs/data/tokenizer.json"),),),
    "profiling.start_step": (_at_least("profiling.num_steps", 1),),
}


class Unread(NamedTuple):
    """A key, or a table, that stands in a configuration and is not read."""

    key: str
    value: object
    deciders: tuple[str, ...]  # the keys whose values make it so, set or not
    ways: tuple[tuple[str, object], ...]  # settings with which it would be read
    is_default: bool


def drop_unread(tree: Mapping[str, Any], bad: Sequence[tuple[int | str, ...]] = ()) -> tuple[Tree, list[Unread]]:
    """Return a configuration without the keys that its other keys make unread, and those keys.

    `bad`: the paths of unusable values; what they would decide is taken for read.
    """
    read, unread = drop_other_choices(tree)
    for key, wheres in [(key, wheres) for key, conditions in READ_WHERE.items() for wheres in conditions]:
        value, deciders = _found(read, key), tuple(where.key for where in wheres)
        if value is _MISSING or any(_holds(read, where) for where in wheres):
            continue
        if not any(_is_bad(decider, bad) for decider in deciders):
            ways = tuple((where.key, where.example) for where in wheres)
            unread.append(Unread(key, value, deciders, ways, _plain(value) == default(key, read)))
            read = without(read, key.split("."))
    return read, [item for item in unread if not any(_is_bad(decider, bad) for decider in item.deciders)]


def _holds(tree: Mapping[str, Any], where: Where) -> bool:
    """Return whether the condition holds, or its key is unknown: a model of another family may have what it decides."""
    value = setting(tree, where.key)
    return where.holds(value) or (value is None and where.key.startswith("model."))


def drop_other_choices(tree: Mapping[str, Any]) -> tuple[Tree, list[Unread]]:
    """Return a configuration without the keys that only other choices read, and those keys."""
    read, unread = dict(tree), []
    for path, chosen in CHOSEN.items():
        table = _found(read, ".".join(path))
        own = section_at(Tables, path, read)
        if own is None or not isinstance(table, dict):
            continue
        chooser = ".".join((*path, chosen.key))
        by_dtype = setting(read, chooser) == "auto"
        for key in [key for key in table if key not in own.model_fields]:
            readers = {name: kind for name, kind in chosen.sections().items() if key in kind.model_fields}
            if readers:  # a key that nobody knows is reported elsewhere
                deciders = (chooser, "precision.dtype") if by_dtype else (chooser,)
                usual = not any(without_defaults(kind, {key: table[key]}) for kind in readers.values())
                way = (chooser, next(iter(readers)))
                unread.append(Unread(".".join((*path, key)), table[key], deciders, (way,), usual))
                read = without(read, [*path, key])
    return read, unread


def is_set(tree: Mapping[str, Any], key: str) -> bool:
    """Tell whether a key, or a table, stands in a configuration."""
    return _found(tree, key) is not _MISSING


def setting(tree: Mapping[str, Any], key: str) -> Any:
    """Return a key's value, or its default."""
    value = _found(tree, key)
    return default(key, tree) if value is _MISSING else value


def _found(tree: Mapping[str, Any], key: str) -> Any:
    found: Any = tree
    for name in key.split("."):
        found = found.get(name, _MISSING) if isinstance(found, Mapping) else _MISSING
    return found


def default(key: str, tree: Mapping[str, Any]) -> Any:
    """Return a key's default; None for one that is required or unknown, too."""
    *tables, name = key.split(".")
    section = section_at(Tables, tables, tree)
    field = None if section is None else section.model_fields.get(name)
    return None if field is None or field.default is PydanticUndefined else field.default


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value  # a section holds TOML's lists as tuples


def with_defaults(section: type[Section], table: Tree) -> Tree:
    """Return a table with the default of every key that is missing and has one, as TOML has it."""
    defaults = {name: field.default for name, field in section.model_fields.items()}
    whole = {name: value for name, value in (defaults | table).items() if value not in (None, PydanticUndefined)}
    for name, value in whole.items():
        inner = section_at(section, [name], whole) if defaults.get(name) == {} else None
        if inner and isinstance(value, dict):
            whole[name] = with_defaults(inner, value)
        elif isinstance(value, tuple):
            whole[name] = list(value)
    return whole


def without_defaults(section: type[Section], table: Tree) -> Tree:
    """Return a table without the keys that have their defaults; those that choose stay."""
    defaults = {name: field.default for name, field in section.model_fields.items() if name not in CHOOSING}
    bare = {}
    for name, value in table.items():
        inner = section_at(section, [name], table) if defaults.get(name) == {} else None
        bare[name] = without_defaults(inner, value) if inner and isinstance(value, dict) else value
    return {name: value for name, value in bare.items() if name not in defaults or _plain(value) != defaults[name]}


def _is_bad(key: str, bad: Sequence[tuple[int | str, ...]]) -> bool:
    """Return whether an unusable value lies at a key, in it or around it."""
    path = tuple(key.split("."))
    return any(item[: len(path)] == path[: len(item)] for item in bad)


def without(tree: Mapping[str, Any], path: Sequence[str]) -> Tree:
    """Return a configuration without the key, or the table, at a path."""
    name, *inner = path
    if not inner:
        return {key: value for key, value in tree.items() if key != name}
    return {**tree, name: without(tree[name], inner)}
