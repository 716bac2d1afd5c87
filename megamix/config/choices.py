"""Tables whose keys depend on what is chosen or registered: their classes are looked up whenever one is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

from pydantic import Field, GetJsonSchemaHandler, create_model
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from megamix.plugins import Door, Section

Tree = dict[str, Any]


class OneOf:
    """Annotation of a key that names something registered."""

    def __init__(self, door: Door, *others: str):
        self._door, self._others = door, others

    def names(self) -> tuple[str, ...]:
        return (*self._others, *self._door.sections)

    def _check(self, value: object) -> object:
        if isinstance(value, str) and value in self.names():
            return value
        *most, last = map(repr, self.names())
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}" if most else last})

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Tree:
        return {"enum": list(self.names()), "type": "string"}


class LookedUp:
    """Annotation of a table whose class is looked up."""

    def section(self, table: object, beside: Mapping[str, Any]) -> type[Section]:
        """Return the table's class; `beside`: the values of the table around it, those that are known."""
        raise NotImplementedError

    def sections(self) -> list[type[Section]]:
        """Return all classes that it may have."""
        raise NotImplementedError

    def _validate(self, value: object, info: core_schema.ValidationInfo) -> Section:
        return self.section(value, info.data or {}).model_validate(value)

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Tree:
        tables = [handler(section.__pydantic_core_schema__) for section in self.sections()]
        for table in tables:
            table.pop("required", None)  # a file may leave to its base what it does not change
        return tables[0] if len(tables) == 1 else {"anyOf": tables}


class Extended(LookedUp):
    """One that has a table more for each thing that is registered; not set: it is not asked for."""

    def __init__(self, door: Door, base: type[Section]):
        self._door, self._base = door, base

    def section(self, table: object, beside: Mapping[str, Any]) -> type[Section]:
        return _with_tables(self._base, tuple(self._door.sections.items()), optional=True)

    def sections(self) -> list[type[Section]]:
        return [self.section({}, {})]


class Chosen(LookedUp):
    """One in which `key` names which others there are: beside it, or in a table beneath that has the same name."""

    def __init__(self, door: Door, base: type[Section], key: str, *, beneath: bool = False):
        self._door, self._base, self.key, self._beneath = door, base, key, beneath

    def choice(self, table: object, beside: Mapping[str, Any]) -> str:
        """Name what is chosen, by default where the name is none."""
        name = table.get(self.key) if isinstance(table, Mapping) else getattr(table, self.key, None)
        default: str = self._base.model_fields[self.key].default
        return name if isinstance(name, str) and name in self._door.sections else default

    def choosing(self, path: tuple[str, ...], table: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the keys that say what is chosen, by the table's path."""
        return (".".join((*path, self.key)),)

    def section(self, table: object, beside: Mapping[str, Any]) -> type[Section]:
        return self.section_of(self.choice(table, beside))

    def section_of(self, name: str) -> type[Section]:
        section = self._door.sections[name]
        if self._beneath:
            return _with_tables(self._base, ((name, section),), optional=False)
        return section if issubclass(section, self._base) else _beside(self._base, section)

    def sections(self) -> list[type[Section]]:
        return [self.section_of(name) for name in self._door.sections]

    def not_chosen(self, table: object, beside: Mapping[str, Any]) -> dict[str, dict[str, type[Section]]]:
        """Return the keys that only others have: by key and choice, the table with it."""
        found: dict[str, dict[str, type[Section]]] = {}
        for name in self._door.sections:
            for key in self.section_of(name).model_fields.keys() - self.section(table, beside).model_fields.keys():
                found.setdefault(key, {})[name] = self.section_of(name)
        return found


def left_out(description: str | None = None) -> Any:
    """Return the default of a table: its keys have theirs, or are missing."""
    return Field(default={}, validate_default=True, description=description)


@cache
def _with_tables(
    base: type[Section], tables: tuple[tuple[str, type[Section]], ...], *, optional: bool
) -> type[Section]:
    fields: dict[str, Any] = {
        name: (section | None, Field(None, description=section.__doc__))
        if optional
        else (section, left_out(section.__doc__))
        for name, section in tables
    }
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields) if fields else base


@cache
def _beside(base: type[Section], section: type[Section]) -> type[Section]:
    return create_model(section.__name__, __base__=(section, base), __doc__=section.__doc__)


def values(section: type[Section], table: object) -> Tree:
    """Return what a table holds, and the defaults of what it does not."""
    defaults = {name: field.default for name, field in section.model_fields.items()}
    return defaults | table if isinstance(table, dict) else defaults


def table_in(field: FieldInfo, table: object, beside: Mapping[str, Any]) -> type[Section] | None:
    """Return the class of the table that a key holds, or of those in its list; None: it holds none."""
    return _section_in((*field.metadata, field.annotation), table, beside)


def _section_in(parts: Sequence[Any], table: object, beside: Mapping[str, Any]) -> type[Section] | None:
    for part in parts:
        if isinstance(part, LookedUp):
            return part.section(table, beside)
        if isinstance(part, type) and issubclass(part, Section):
            return part
        # What annotates a class stands behind it, and says more.
        if found := _section_in(get_args(part)[::-1], table, beside):
            return found
    return None


def section_at(section: type[Section] | None, path: Sequence[int | str], table: object) -> type[Section] | None:
    """Return the class of the table at a path within another one; None: no table lies there."""
    for part in path:
        if isinstance(part, int):
            table = table[part] if isinstance(table, list | tuple) else {}
        elif section is None or part not in section.model_fields:
            return None
        else:
            beside = values(section, table)
            table = beside[part]
            section = table_in(section.model_fields[part], table, beside)
    return section


def chosen_tables(section: type[Section], table: Tree) -> Iterator[tuple[tuple[str, ...], Chosen, Tree, Tree]]:
    """Yield the path of each table that chooses, what it chooses from, what it holds and what stands around it."""
    beside = values(section, table)
    for name, field in section.model_fields.items():
        inner = beside[name]
        if not isinstance(inner, dict):
            continue
        chosen = next((item for item in field.metadata if isinstance(item, Chosen)), None)
        if chosen:
            yield (name,), chosen, inner, beside
        elif found := table_in(field, inner, beside):
            for path, chosen, table_within, around in chosen_tables(found, inner):
                yield (name, *path), chosen, table_within, around
