"""Keys that were: a configuration from before they moved is read through one table, and a file is rewritten by it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, MutableMapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from megamix.config.choices import Tree, section_at, without_off
from megamix.config.model_and_data import ModelConfig
from megamix.config.problems import ConfigError
from megamix.config.sections import Tables
from megamix.config.toml_text import value_text
from megamix.config.unread import default

_ROWS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def upgrade(tree: MutableMapping[str, Any], whole: Mapping[str, Any] | None = None) -> list[tuple[str, Any, str]]:
    """Replace old keys in a tree by the present ones. Return each with its value, and in words what to write now.

    `whole`: the configuration that the tree is a layer of, which decides the model's family; not set: the tree.
    """
    model = section_at(Tables, ["model"], dict(tree if whole is None else whole))
    is_ours = model is not None and issubclass(model, ModelConfig)  # another family may have such keys of its own
    told, off = list[tuple[str, Any, str]](), list[str]()
    for old, row in _ROWS.items():
        *path, name = old.split(".")
        table = _table(tree, path)
        if table is None or name not in table or (path[0] == "model" and not is_ours):
            continue
        value, now = table[name], _now(row, table[name], tree, off)
        if now is None:
            continue
        if old not in now:  # one that stays keeps its place in the text, too
            del table[name]
        for key, item in now.items():
            if item is False and key != row.get("new"):  # at the end, for a base may have other keys of the table
                off.append(key)
            else:
                _put(tree, key.split("."), item)
        settings = " and ".join(f"{key} = {value_text(item)}" for key, item in now.items())
        told.append((old, value, f"write {settings}" if now else f"leave {name} out"))
    for key in off:
        if key == "model.rope" or not _table(tree, key.split(".")):
            _put(tree, key.split("."), False)
    return told


def _now(row: dict[str, Any], value: Any, tree: MutableMapping[str, Any], off: list[str]) -> Tree | None:
    """Return the settings that a key with such a value stands for; None: it is one of the present keys. `off`: tables
    that keys before it have turned off.
    """
    if "became" in row:
        became: dict[str, Tree] = row["became"]
        return deepcopy(became.get(value_text(value)))
    new, (home, _, _) = row["new"], row["new"].rpartition(".")
    if value == row.get("none", ...):
        return {home: False}
    # A default alone makes no table, unless a base may say otherwise.
    is_on = _table(tree, home.split(".")) is not None or (default(home, tree) is not None and home not in off)
    is_bare = "base" not in tree and not is_on
    return {} if is_bare and value == default(new, tree) else {new: value}


def _table(tree: MutableMapping[str, Any], path: list[str]) -> MutableMapping[str, Any] | None:
    table: Any = tree
    for name in path:
        table = table.get(name) if isinstance(table, MutableMapping) else None
    return table if isinstance(table, MutableMapping) else None


def _put(tree: MutableMapping[str, Any], path: list[str], value: Any) -> None:
    """Set a key within its tables, unless one of them is off."""
    *tables, name = path
    table: Any = tree
    for inner in tables:
        table = table.setdefault(inner, {})
        if not isinstance(table, MutableMapping):
            return
    if value == {}:
        table.setdefault(name, value)  # on, with the keys that are there
    else:
        table[name] = value


def saved_tree(text: str) -> Tree:
    """Return what a run's configuration said, by the present keys. Raises: ValueError if it is no TOML."""
    tree = tomllib.loads(text)
    upgrade(tree)
    return without_off(Tables, tree)


def upgraded_text(text: str) -> tuple[str, list[str]]:
    """Return a file's text with the present keys, and a line for each old one; its comments stay.

    Raises: ConfigError if it must be rewritten by hand; ImportError without tomlkit.
    """
    import tomlkit

    document, tree = tomlkit.parse(text), tomllib.loads(text)
    upgrade(document)
    lines = [f"{key} = {value_text(value)}: {now}" for key, value, now in upgrade(tree)]
    new = tomlkit.dumps(document)
    if tomllib.loads(new) != tree:
        raise ConfigError([f"config: its keys cannot be moved by this command; {line}" for line in lines], "--upgrade")
    return new, lines
