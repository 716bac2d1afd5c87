"""From files and overrides to a Config: inheritance, dotted overrides, and every problem in one exception."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megamix.config.checks import check_config, check_draft
from megamix.config.problems import ConfigError, explain, nearest
from megamix.config.sections import SECTIONS, Config
from megamix.config.toml_text import parse_value, value_text

Tree = dict[str, Any]


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file, its bases, and `section.key=value` overrides, the last of which win.

    Raises: ConfigError with everything that is wrong in all of them.
    """
    assignments, problems = _parse_overrides(overrides)
    try:
        tree = _read_with_bases(Path(path), ())
    except ConfigError as error:
        # Nothing is known of the file, so its missing keys would be noise; a bad override is not.
        raise ConfigError([*error.problems, *problems], str(path)) from error
    return _build(_merge(tree, assignments), problems, str(path))


def config_from_dict(tree: Mapping[str, Any]) -> Config:
    """A Config from nested plain values, as TOML would give them.

    Raises: ConfigError with everything that is wrong.
    """
    return _build(dict(tree), [], "configuration")


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


def _build(tree: Tree, problems: list[str], source: str) -> Config:
    tree = {**{name: {} for name in SECTIONS}, **tree}  # a table that is left out has its defaults, or misses keys
    config: Config | None = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems = [*problems, *explain(error)]
        bad = {item["loc"][:2] for item in error.errors()}
        problems += check_draft(tree, bad)
    else:
        problems = [*problems, *check_config(config)]
    if config is None or problems:
        raise ConfigError(problems, source)
    return config


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


def _parse_overrides(overrides: Iterable[str]) -> tuple[Tree, list[str]]:
    tree: Tree = {}
    problems = []
    for text in overrides:
        name, equals, value = text.partition("=")
        section, *keys = name.strip().split(".")
        if equals and section and keys and all(keys):
            nested: Any = parse_value(value.strip())
            for key in reversed(keys):
                nested = {key: nested}
            tree = _merge(tree, {section: nested})
        else:
            problems.append(
                f"{name}: got {value_text(text)} as an override, must be section.key=value; "
                "write for example optimizer.lr=3e-4"
            )
    return tree, problems


def _read_with_bases(path: Path, children: tuple[Path, ...]) -> Tree:
    """The tree of a file over that of its base; `children` are the files that led here, outermost first."""
    tree = _read(path, children)
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str) or not base:
        raise ConfigError([f'base: got {value_text(base)} in {path}, must be a path; write base = "other.toml"'])
    chain = (*children, path)
    base_path = path.parent / base
    if base_path.resolve() in [child.resolve() for child in chain]:
        names = " -> ".join(str(file) for file in (*chain, base_path))
        raise ConfigError([f"base: got {value_text(base)}, files inherit in a circle: {names}; remove one base"])
    return _merge(_read_with_bases(base_path, chain), tree)


def _read(path: Path, children: tuple[Path, ...]) -> Tree:
    what = f"base: got {path}, named by {children[-1]}" if children else f"config: got {path}"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = nearest(path.name, [file.name for file in path.parent.glob("*.toml")])
        fix = f"did you mean {path.parent / near}?" if near else "write the path of a TOML file"
        raise ConfigError([f"{what}, there is no such file; {fix}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{what}, cannot be read: {error}; write the path of a TOML file"]) from error
    except ValueError as error:
        raise ConfigError([f"{what}, is no TOML: {error}; correct that line (text needs quotes)"]) from error
