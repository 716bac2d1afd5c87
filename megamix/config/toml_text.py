"""TOML text of single values and of a whole configuration (the standard library reads TOML but does not write it)."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megamix.config.sections import CHOOSING
from megamix.config.unread import drop_unread


def parse_value(text: str) -> object:
    """Return the TOML value that a text spells, or the text itself, so that dtype=bf16 needs no quotes."""
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:  # the text is no TOML, or a number of thousands of digits
        return text
    # A line break would add further keys, so such a text is no single value.
    return table["value"] if len(table) == 1 else text


def value_text(value: object) -> str:
    """Return a value as TOML spells it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML wants DEL escaped and JSON does not.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):  # TOML has no null, so a key that is not set is left out
        items = [f"{_key_text(key)} = {value_text(item)}" for key, item in value.items() if item is not None]
        return "{ " + ", ".join(items) + " }" if items else "{}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return str(value)  # an integer, a date, or a float as the shortest text that gives the same number


def _key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else value_text(key)


def tables_to_toml(tables: Mapping[str, Any]) -> str:
    """Return some tables of a configuration, or all, without the keys that others make unread."""
    read, _ = drop_unread(tables)
    return "\n".join(_lines(read, ""))


def _lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    """Return the text of a table, then of those in it. The key that chooses the others is the first one."""
    items = sorted(table.items(), key=lambda item: item[0] not in CHOOSING)
    keys = "".join(
        f"# {key}: not set\n" if value is None else f"{_key_text(key)} = {value_text(value)}\n"
        for key, value in items
        if not isinstance(value, Mapping)
    )
    if name or keys:
        yield (f"[{name}]\n" if name else "") + keys
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{name}.{_key_text(key)}".lstrip("."))
