"""A whole configuration: all its tables, and what they say as one canonical text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Self

from megamix.config.choices import Tree
from megamix.config.old_keys import saved_tree
from megamix.config.pace import Pace
from megamix.config.sections import Tables
from megamix.config.toml_text import tables_to_toml
from megamix.config.unread import default, drop_unread, with_defaults
from megamix.plugins import import_plugins


class Config(Tables):
    """A whole run. It is frozen, so what it says is written once: that text is compared, kept and logged."""

    @cached_property
    def text(self) -> str:
        """Return every key that is read, as TOML; reading it back gives an equal configuration.

        TOML has no null, so a key that is not set stands as a comment.
        """
        return tables_to_toml(self.model_dump())

    @cached_property
    def values(self) -> dict[str, Any]:
        """Return its `values_of`."""
        return values_of(self.text)

    @cached_property
    def pace(self) -> Pace:
        return Pace(self.training, self.model.seq_len)

    def with_keys(self, **sections: Mapping[str, object]) -> Self:
        """Return another configuration, with these keys of its sections changed. The values are not checked.

        Raises: KeyError for a name that is no key.
        """
        tables = {name: getattr(self, name) for name in type(self).model_fields}
        for name, keys in sections.items():
            if unknown := keys.keys() - type(tables[name]).model_fields.keys():
                raise KeyError(f"{name}.{min(unknown)}")
            tables[name] = tables[name].model_copy(update=keys)
        return type(self).model_construct(**tables)

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_tree, (self.model_dump(),)  # a class that holds plugins' keys cannot be pickled by its name


def _from_tree(tree: Mapping[str, Any]) -> Config:
    import_plugins(tree["plugins"])
    return Config.model_validate(tree)


def effective_tables(text: str) -> Tree:
    """Return what an effective configuration says, for comparing two: the keys that are read, and the defaults of all
    others, which a file that was written before a key came need not know. Raises: ValueError if it is no TOML.
    """
    read, _ = drop_unread(saved_tree(text))
    return with_defaults(Tables, read)


def values_of(text: str) -> dict[str, Any]:
    """Return what an effective configuration says, by `section.key`. A key that is not there is not set: one that is
    not read has its default.
    """
    tree = effective_tables(text)
    return dict(_flat(tree, "", tree))


def _flat(tree: Tree, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    # an optional table is compared as a whole, and so is a table in [model]
    if not name or (default(name, tree) == {} and not name.startswith("model.")):
        for key, inner in value.items():
            yield from _flat(tree, f"{name}.{key}".lstrip("."), inner)
    else:
        yield name, value


def config_schema() -> dict[str, Any]:
    """Return JSON Schema of a configuration file, with a description for every key."""
    schema = Config.model_json_schema()
    base = {
        "description": "Another file, relative to this one. Its keys apply where this file does not set them.",
        "title": "Base",
        "type": "string",
    }
    schema["properties"] = {"base": base, **schema["properties"]}
    # A file leaves to its base what it does not change, so no table and no key is required of one file. The tables of
    # a list come from one file, so their keys are required.
    in_lists = {"DataStage", "OptimizerGroup"}
    for name, table in [("", schema), *schema["$defs"].items()]:
        if name not in in_lists:
            table.pop("required", None)
        for entry in table.get("properties", {}).values():  # a table may be off
            kinds = entry.get("anyOf", [])
            if any("$ref" in kind for kind in kinds) and {"type": "null"} in kinds:
                kinds[kinds.index({"type": "null"})] = {"const": False}
    return schema
