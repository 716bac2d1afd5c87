"""TOML text of single values and of a whole configuration (the standard library reads TOML but does not write it)."""

import json
import tomllib
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from megamix.config.sections import Config


def parse_value(text: str) -> object:
    """The TOML value that a text spells, or the text itself, so that dtype=bf16 needs no quotes."""
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:  # no TOML, or a number of thousands of digits
        return text
    # A line break would smuggle in further keys: then the text was no single value.
    return table["value"] if len(table) == 1 else text


def value_text(value: object) -> str:
    """A value as TOML spells it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML wants DEL escaped and JSON does not.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, BaseModel):
        return value_text({key: item for key, item in value if item is not None})
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {value_text(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return str(value)  # int, float (the shortest text that reads back the same), date


def config_to_toml(config: Config) -> str:
    """The effective configuration with every key; reading it back gives an equal one.

    TOML has no null, so a key that is not set stands as a comment.
    """
    return "\n".join(section_to_toml(name, section) for name, section in config)


def section_to_toml(name: str, section: BaseModel) -> str:
    """One table of it."""
    lines = [f"[{name}]"]
    for key, value in section:
        lines.append(f"# {key} is not set" if value is None else f"{key} = {value_text(value)}")
    return "\n".join(lines) + "\n"
