"""From files and overrides to a Config: inheritance, dotted overrides, and every problem in one exception."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megamix.config.checks import check_config, check_draft
from megamix.config.files import Layer, read_layers
from megamix.config.problems import ConfigError, dropped_line, explain, explain_unread, one_line, short
from megamix.config.sections import SECTIONS, Config
from megamix.config.toml_text import MOST_LEVELS, TooDeepError, parse_toml, parse_value
from megamix.config.unread import Unread, is_default, is_set, part_read, with_defaults

Tree = dict[str, Any]


def load_config(
    path: str | Path, overrides: Iterable[str] = (), say: Callable[[str], None] = lambda line: None
) -> Config:
    """Read a TOML file, its bases, and `section.key=value` overrides, the last of which win.

    A key that is not read, for what another key says, is refused where it stands beside that one or above it. Below, it
    was meant for what that one said before: it is dropped, and `say` gets a line.
    Raises: ConfigError with everything that is wrong in all of them.
    """
    above, problems = _parse_overrides(overrides)
    try:
        layers = read_layers(Path(path))
    except ConfigError as error:
        # Nothing is known of the file, so its missing keys would be noise; a bad override is not.
        raise ConfigError([*error.problems, *problems], str(path)) from error
    return _build([*layers, *above], problems, str(path), say)


def config_from_dict(*trees: Mapping[str, Any]) -> Config:
    """A Config from nested plain values, as a file would give them; each further tree lies above the one before, as a
    file above its base.

    Raises: ConfigError with everything that is wrong, as `load_config`.
    """
    return _build([Layer("configuration", dict(tree)) for tree in trees], [], "configuration", lambda line: None)


def toml_tables(text: str) -> Tree:
    """A configuration as it was written, section by section.

    Raises: ValueError if the text is no TOML, or not made of tables; the message goes on with "the configuration".
    """
    try:
        tables = parse_toml(text)
    except TooDeepError:
        raise
    except ValueError as error:
        raise ValueError(f"is no TOML: {error}") from None
    for name, keys in tables.items():
        if not isinstance(keys, dict):
            raise ValueError(f"holds {one_line(name)}, which is no table")
    return tables


def effective_tables(text: str) -> Tree:
    """What an effective configuration says, for comparing two: the keys that are read, and for all others, which one
    written earlier may list and another one need not know, their defaults.

    Raises: ValueError, as `toml_tables`.
    """
    read, _ = part_read(toml_tables(text))
    return with_defaults(read)


def config_schema() -> dict[str, Any]:
    """JSON Schema of a configuration file, with a description for every key."""
    schema = Config.model_json_schema()
    base = {
        "description": "Another file, relative to this one, whose keys hold where this one is silent.",
        "title": "Base",
        "type": "string",
    }
    schema["properties"] = {"base": base, **schema["properties"]}
    # A file may leave to its base what it does not change, so no table and no key is required of a single file.
    for table in (schema, *(schema["$defs"][section.__name__] for section in SECTIONS.values())):
        table.pop("required", None)
    return schema


def _build(layers: Sequence[Layer], problems: list[str], source: str, say: Callable[[str], None]) -> Config:
    # A table that is left out has its defaults, or misses keys.
    tree: Tree = {name: {} for name in SECTIONS}
    for layer in layers:
        tree = _merge(tree, layer.tree)
    config: Config | None = None
    wrong: list[tuple[int | str, ...]] = []
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = [*problems, *explain(errors)]
        wrong = [item["loc"] for item in errors]
    read, unread = part_read(tree, wrong)
    unread = [item for item in unread if not is_default(item.key, item.value)]
    refused = [item for item in unread if _is_refused(item, layers)]
    problems = [*problems, *(explain_unread(item, tree) for item in refused)]
    if wrong:
        problems += check_draft(read, {loc[:2] for loc in wrong})
    else:
        config = Config.model_validate(read)
        problems += check_config(config)
    if config is None or problems:
        raise ConfigError(problems, source)
    for item in unread:
        say(dropped_line(item, tree, layers[_origin(item.key, layers)].name))
    return config


def _is_refused(item: Unread, layers: Sequence[Layer]) -> bool:
    origin = _origin(item.key, layers)
    return origin >= max(_origin(key, layers) for key in item.deciders) and not layers[origin].lists_all


def _origin(key: str, layers: Sequence[Layer]) -> int:
    """The last layer that sets a key, or a part of it; -1: none, its default holds."""
    return max((number for number, layer in enumerate(layers) if is_set(layer.tree, key)), default=-1)


def _merge(below: Tree, above: Tree) -> Tree:
    """Both trees as one, table by table and key by key; `above` wins."""
    return below | {
        name: _over(below.get(name), value)
        for name, value in above.items()
        if isinstance(below.get(name, {}), dict)  # anything else is a mistake that must not vanish under a table
    }


def _over(below: object, above: object) -> object:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _over(below.get(key), value) for key, value in above.items()}
    return above


def _parse_overrides(overrides: Iterable[str]) -> tuple[list[Layer], list[str]]:
    """A layer for each, and what is wrong with the others."""
    layers, problems = [], []
    for text in overrides:
        name, equals, value = text.partition("=")
        section, *keys = name.strip().split(".")
        if equals and section and keys and all(keys) and len(keys) < MOST_LEVELS:
            nested: Any = parse_value(value.strip())
            for key in reversed(keys):
                nested = {key: nested}
            layers.append(Layer("the command line", {section: nested}))
        else:
            problems.append(
                f"{one_line(name)}: got {short(text)} as an override, must be section.key=value; "
                "write for example optimizer.lr=3e-4"
            )
    return layers, problems
