"""Tells what differs between two configurations, by `section.key`, and what may differ."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megamix.config.model_and_data import DataSource
from megamix.config.sections import CHOSEN
from megamix.config.toml_text import value_text


class May(NamedTuple):
    """Says whether a key may differ between the ranks of a job, and between a checkpoint and the job that goes on."""

    ranks: bool = False
    resume: bool = True


_NEVER = May(resume=False)
# A key's own rule comes before that of its table. What no row names must be equal on all ranks, and may change.
_RULES = {
    "model.": _NEVER,  # another model
    # How a step is computed, and first weights, which a checkpoint replaces.
    **dict.fromkeys(("model.dropout", "model.compile", "model.recompute", "model.init_std"), May()),
    **dict.fromkeys(("model.scaled_init", "model.folder", "model.init"), May()),
    "optimizer.name": _NEVER,  # other states
    **dict.fromkeys(("training.seed", "data.split", "data.packing"), _NEVER),  # another order of the data
    "parallelism.timeout_s": May(ranks=True),
    # Paths may differ between nodes. Of data and tokenizer the fingerprints are compared, and the run's folder is
    # checked once it is taken.
    **dict.fromkeys(("checkpoint.folder", "data.tokenizer"), May(ranks=True)),
}


def may(key: str) -> May:
    """Return a key's rule."""
    return _RULES.get(key) or _RULES.get(f"{key.partition('.')[0]}.") or May()


class Change(NamedTuple):
    """A key with two values, as texts; of two tables only what differs."""

    key: str
    old: str
    new: str


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return what differs between two configurations' values, by key.

    Where another optimizer or rule is chosen, keys that only one of both has are left out: they are not comparable.
    """
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    choosers = {".".join((*path, "")): ".".join((*path, chosen.key)) for path, chosen in CHOSEN.items()}
    other = [table for table, key in choosers.items() if key in keys]
    if "precision.dtype" in keys:
        other.append("precision.loss_scale.")  # which rule "auto" is
    told = [key for key in keys if not key.startswith(tuple(other)) or (key in old and key in new)]
    return [Change(key, *_texts(old.get(key), new.get(key))) for key in told]


def _texts(one: Any, other: Any) -> tuple[str, str]:
    if isinstance(one, dict) and isinstance(other, dict):
        apart = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
        settings = ([f"{key} = {_text(table.get(key))}" for key in apart] for table in (one, other))
        one, other = (f"{{ {', '.join(each)} }}" for each in settings)
        return one, other
    return _text(one), _text(other)


def _text(value: Any) -> str:
    return "not set" if value is None else value_text(value)


def without_paths(value: Any, numbers: dict[str | int, int]) -> Any:
    """Return sources of data with the number of each file, counted in `numbers` in the order of first appearance, in
    place of its path. A file that is named twice goes on where it was, so equal runs repeat the same files.
    """
    if isinstance(value, list):
        return [without_paths(item, numbers) for item in value]
    if not isinstance(value, dict):
        return value
    # A plugin's own table is compared as it is.
    named: dict[str, Any] = {
        key: item if isinstance(item, dict) else without_paths(item, numbers) for key, item in value.items()
    }
    if "path" in named:
        name = DataSource(path=named.pop("path")).name
        named = {"file": numbers.setdefault(name, len(numbers) + 1)} | named
    return named
