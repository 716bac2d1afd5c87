"""Tables whose keys depend on what is chosen or registered: their classes are looked up whenever one is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args

from pydantic import Field, GetJsonSchemaHandler, create_model
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from megamix.plugins import Registry, Section

Tree = dict[str, Any]


def left_out(description: str | None = None) -> Any:
    """Return the default of a table: its keys have theirs, or are missing."""
    return Field(default={}, validate_default=True, description=description)


class OneOf:
    """Annotation of a key that names something registered."""

    def __init__(self, registry: Registry, *others: str):
        self._registry, self._others = registry, others

    def names(self) -> list[str]:
        return [*self._others, *self._registry.sections]

    def _check(self, value: object) -> object:
        if value in self.names():
            return value
        names = ", ".join(map(repr, self.names()))
        raise PydanticKnownError("literal_error", {"expected": " or ".join(names.rsplit(", ", 1))})

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Tree:
        return {"enum": self.names(), "type": "string"}


class ExtendedTable:
    """Annotation of a table whose class is looked up: it may have one beneath for each thing that is registered."""

    def __init__(self, registry: Registry, base: type[Section]):
        self._registry, self._base = registry, base

    def section(self, table: object, beside: Mapping[str, Any]) -> type[Section]:
        """Return the class of a table; `beside`: what is known of the table around it."""
        return self.sections()[""]

    def sections(self) -> dict[str, type[Section]]:
        """Return all classes that it may have, by what chooses them."""
        return {"": _made((self._base,), tuple(self._registry.sections.items()), optional=True)}

    def _validate(self, value: object, info: core_schema.ValidationInfo) -> Section:
        try:
            return self.section(value, info.data or {}).model_validate(value)
        except ValueError:  # pydantic's errors are ValueErrors, too
            raise
        except Exception as error:  # a plugin's check may raise anything
            raise ValueError(f"its own check fails: {type(error).__name__}: {error}") from error

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Tree:
        return handler(core_schema.union_schema([kind.__pydantic_core_schema__ for kind in self.sections().values()]))


class ChosenTable(ExtendedTable):
    """One in which `key` names which others there are: beside it, or in a table beneath that has the same name."""

    def __init__(self, registry: Registry, base: type[Section], key: str, *, beneath: bool = False):
        super().__init__(registry, base)
        self.key, self._beneath = key, beneath

    def choice(self, table: object, beside: Mapping[str, Any]) -> str:
        """Name what is chosen, by default where the name is none."""
        name = table.get(self.key) if isinstance(table, Mapping) else None
        chooser = self._base.model_fields[self.key]
        default: str = next(iter(self._registry.sections)) if chooser.is_required() else chooser.default
        return name if isinstance(name, str) and name in self._registry.sections else default

    def section(self, table: object, beside: Mapping[str, Any]) -> type[Section]:
        return self.sections()[self.choice(table, beside)]

    def sections(self) -> dict[str, type[Section]]:
        return {name: self._whole(name, section) for name, section in self._registry.sections.items()}

    def _whole(self, name: str, section: type[Section]) -> type[Section]:
        if self._beneath:
            return _made((self._base,), ((name, section),))
        return section if issubclass(section, self._base) else _made((section, self._base))


@cache
def _made(
    bases: tuple[type[Section], ...], tables: tuple[tuple[str, type[Section]], ...] = (), *, optional: bool = False
) -> type[Section]:
    if len(bases) == 1 and not tables:
        return bases[0]
    fields: dict[str, Any] = {
        name: (kind | None, Field(None, description=kind.__doc__)) if optional else (kind, left_out(kind.__doc__))
        for name, kind in tables
    }
    return create_model(bases[0].__name__, __base__=bases, __doc__=bases[0].__doc__, **fields)


def section_at(section: type[Section] | None, path: Sequence[int | str], table: Any) -> type[Section] | None:
    """Return the class of the table at a path within another one, or of those in its list; None: there is none."""
    for part in path:
        if isinstance(part, int):
            table = table[part] if isinstance(table, list | tuple) else None
            continue
        field = None if section is None else section.model_fields.get(part)
        around = table if isinstance(table, dict) else {}
        table = around.get(part)
        if field is None and isinstance(table, list):
            continue  # the name of a list of tables whose class is known
        section = None if field is None else _section_in((*field.metadata, field.annotation), table, around)
    return section


def _section_in(parts: Sequence[Any], table: object, beside: Mapping[str, Any]) -> type[Section] | None:
    for part in parts:
        if isinstance(part, ExtendedTable):
            return part.section(table, beside)
        if isinstance(part, type) and issubclass(part, Section):
            return part
        # A note on a class follows its name, and says more than the name.
        if found := _section_in(get_args(part)[::-1], table, beside):
            return found
    return None


def is_off(value: object) -> bool:
    """Tell whether a value turns an optional table off: false, or of ranks along an axis a single one."""
    return value is False or value == {"size": 1}


def without_off(section: type[Section] | None, table: Tree) -> Tree:
    """Return a table without the optional ones in it that are turned off. One that must be there keeps its value, which
    its type refuses.
    """
    kept: Tree = {}
    for name, value in table.items():
        inner, field = section_at(section, [name], table), None if section is None else section.model_fields.get(name)
        if not (inner and field and field.default is None and is_off(value)):
            kept[name] = without_off(inner, value) if inner is not None and isinstance(value, dict) else value
    return kept
