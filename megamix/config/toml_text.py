"""TOML text of single values and of a whole configuration (the standard library reads TOML but does not write it)."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megamix.config.sections import CHOOSING, Config
from megamix.config.unread import drop_unread

# Deeper than any key lies. tomllib recurses into values, and takes 10 GB and minutes for a key of 50,000 parts.
MOST_LEVELS = 8
_TEXT_OR_COMMENT = re.compile(  # a text of several lines may end in quotes of its own
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*''', re.DOTALL
)
# More than TOML's 64 bits: Python refuses to print, or to turn to a float, what hexadecimal digits can spell.
_LONG_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:0x[\da-fA-F_]{17,}|0o[0-7_]{23,}|0b[01_]{65,}|\d[\d_]{19,}(?![\d_.eE]))")
_LONG_KEY = re.compile(rf"(?:\.[^.=,\n\[\]{{}}]*){{{MOST_LEVELS}}}")


class TooDeepError(ValueError):
    """A key of too many parts, or values within too many others."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises: ValueError for what is no TOML; TooDeepError before time and memory go into it.
    """
    bare = _TEXT_OR_COMMENT.sub("_", text)  # what is left are the dots and brackets that TOML reads as its own
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", bare):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_LEVELS:
            raise TooDeepError(f"holds values within more than {MOST_LEVELS} others")
    if _LONG_KEY.search(bare):
        raise TooDeepError(f"holds a key of more than {MOST_LEVELS} parts")
    if found := _LONG_NUMBER.search(bare):
        raise ValueError(f"{found[0][:20]}... is a number of more than 64 bits")
    return tomllib.loads(text)


def parse_value(text: str) -> object:
    """Return the TOML value that a text spells, or the text itself, so that dtype=bf16 needs no quotes."""
    try:
        table = parse_toml(f"value = {text}")
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
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return str(value)  # an integer, a date, or a float as the shortest text that gives the same number


def _key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else value_text(key)


def config_to_toml(config: Config) -> str:
    """Return the effective configuration, every key that is read; reading it back gives an equal one.

    TOML has no null, so a key that is not set stands as a comment.
    """
    return tables_to_toml(config.model_dump())


def tables_to_toml(tables: Mapping[str, Any]) -> str:
    """Return some tables of a configuration, or all, without the keys that others make unread."""
    read, _ = drop_unread(tables)
    return "\n".join(_lines(read, ""))


def _lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    """Return the text of a table, then of those in it. The key that chooses the others is the first one."""
    items = sorted(table.items(), key=lambda item: item[0] not in CHOOSING)
    keys = "".join(_key_line(_key_text(key), value) for key, value in items if not isinstance(value, Mapping))
    if name or keys:
        yield (f"[{name}]\n" if name else "") + keys
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{name}.{_key_text(key)}".lstrip("."))


def _key_line(key: str, value: object) -> str:
    return f"# {key}: not set\n" if value is None else f"{key} = {value_text(value)}\n"
