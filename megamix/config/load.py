"""From files and overrides to a Config: inheritance, dotted overrides, and every problem in one exception."""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megamix.config.checks import check_config, draft_of
from megamix.config.choices import Tree, is_off, section_at, without_off
from megamix.config.config import Config
from megamix.config.model_and_data import RECOMPUTE_TAGS
from megamix.config.old_keys import upgrade
from megamix.config.problems import (
    ConfigError,
    dropped_line,
    explain,
    explain_unread,
    nearest,
    short,
)
from megamix.config.sections import SECTIONS
from megamix.config.toml_text import parse_value
from megamix.config.unread import (
    Unread,
    drop_other_choices,
    drop_unread,
    is_set,
    setting,
    without_defaults,
)
from megamix.plugins import PluginError, import_plugins, require_plugins

# Keys that are not set, as an effective configuration lists them. There is one, unless data.split, data.valid and all
# others are set.
_NOT_SET = re.compile(r"^# \w+: not set$", re.MULTILINE)
_PROGRAMS = ("checkpoint.copy_command", "metrics.alert.command")
_OF_A_RUN = ("metrics.jsonl", "checkpoints", "journal.jsonl", "status.json")  # files beside the config.toml of a run


class Layer(NamedTuple):
    """Holds the keys of one file or override."""

    name: str
    tree: dict[str, Any]
    is_saved: bool = False  # whether a run has written it: then it has every key
    imports: bool = (
        True  # whether its plugins may be imported: others may write to a run's folder, so no file there may name code
    )


def load_config(
    path: str | Path,
    overrides: Iterable[str] = (),
    say: Callable[[str], None] = lambda line: None,
    *,
    imports: bool = True,
    starts: bool = False,
) -> Config:
    """Read a TOML file, its bases, and `section.key=value` overrides, the last of which win.

    A key that is not read, for what another key says, is refused where it stands beside that one or above it. Below, it
    was meant for what that one said before: it is dropped, and `say` gets a line. Plugins are imported, but not those
    that only the `config.toml` of a run's folder names, or nobody's file: without `imports`, none. `starts`: programs
    that the configuration names will be started, so those that only such a file names are refused.
    Raises: ConfigError with everything that is wrong in all of them.
    """
    above, problems = _parse_overrides(overrides)
    try:
        layers = _read_layers(Path(path), imports)
    except ConfigError as error:
        # Nothing is known of the file, so a list of its missing keys would not help; a bad override is still reported.
        raise ConfigError([*error.problems, *problems], str(path)) from error
    layers += above
    return _build(layers, [*problems, *(_foreign_programs(layers) if starts else ())], str(path), say)


def config_of_run(path: Path) -> Config | None:
    """Return the configuration that a run has written, or None if it cannot be read."""
    try:
        return load_config(path, imports=False)
    except ConfigError:
        return None


def config_from_dict(*trees: Mapping[str, Any]) -> Config:
    """Return a Config from nested plain values, as a file would give them; each further tree lies above the one before,
    as a file above its base.

    Raises: ConfigError with everything that is wrong, as `load_config`.
    """
    layers = [Layer("configuration", deepcopy(dict(tree))) for tree in trees]
    return _build(layers, [], "configuration", lambda line: None)


def _build(layers: list[Layer], problems: list[str], source: str, say: Callable[[str], None]) -> Config:
    unimported = _import_plugins(layers)  # first: a saved table's defaults are known to its plugin alone
    problems += _upgraded(layers)
    layers = [_without_saved_defaults(layer) for layer in layers]
    if unimported:
        # Names that the plugin would have registered are not reported as unknown.
        raise ConfigError([*problems, unimported], source)
    tree = without_off(Config, _merged(layers))
    errors = _errors(tree)
    bad = [item["loc"] for item in errors]
    read, found = drop_unread(tree, bad)
    unread = [(item, _origin(item.key, layers)) for item in found if not item.is_default]
    problems += explain(errors, tree)
    problems += [explain_unread(item, tree) for item, origin in unread if _is_refused(item, origin, layers)]
    config = None if bad else Config.model_validate(read)
    problems += check_config(config or draft_of(Config, read, bad))
    if config is None or problems:
        raise ConfigError(problems, source, config or _sound(read, bad))
    dropped = [dropped_line(item, tree, layers[origin].name) for item, origin in unread]
    for line in (*dropped, *_rate_of_another(tree, layers)):
        say(line)
    return config


def _sound(read: Tree, bad: Sequence[tuple[int | str, ...]]) -> Config | None:
    """Return a Config with the sections [data] and [model] alone; None if one of them is unusable."""
    sections = dict[str, Any]()
    for name in ("data", "model"):
        section = section_at(Config, [name], read)
        if section is None or name in {path[0] for path in bad}:
            return None
        sections[name] = section.model_validate(read.get(name, {}))
    return Config.model_construct(**sections)


def _upgraded(layers: Sequence[Layer]) -> list[str]:
    """Put the present keys for old ones. Return a line for each, unless a run has written it."""
    problems, whole = list[str](), _merged(layers)
    for layer in layers:
        rewrites = f"; megamix config --upgrade {layer.name} does so" if os.path.isfile(layer.name) else ""
        for key, value, now in upgrade(layer.tree, whole):
            line = f"{key}: got {short(value)}, a key of an earlier version; {now}{rewrites}"
            problems += [] if layer.is_saved else [line]
    return problems


def _without_saved_defaults(layer: Layer) -> Layer:
    """Return a layer; of a run's effective configuration without the defaults that it lists, which nobody chose."""
    if not layer.is_saved:
        return layer
    return layer._replace(tree=without_defaults(Config, layer.tree))


def _merged(layers: Sequence[Layer]) -> Tree:
    tree: Tree = {}
    for layer in layers:
        # A section that is no table is a mistake, and a table of a later file must not hide it.
        wrong = {name for name in SECTIONS if not isinstance(tree.get(name, {}), dict)}
        tree = _over(tree, {name: keys for name, keys in layer.tree.items() if name not in wrong})
    return tree


def _errors(tree: Tree) -> list[ErrorDetails]:
    try:
        Config.model_validate(drop_other_choices(tree)[0])
    except ValidationError as error:
        return [{**item, "loc": _as_set(item["loc"])} for item in error.errors(include_url=False)]
    return []


def _as_set(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a place without what nobody has written: the name of a set that has none, the form of a value."""
    loc = tuple(part for part in loc if part not in RECOMPUTE_TAGS)
    return (*loc[:2], *loc[3:]) if loc[:3] == ("data", "valid", "") else loc


def _is_refused(item: Unread, origin: int, layers: Sequence[Layer]) -> bool:
    """Return whether a key that is not read stands beside what makes it so, or above it."""
    return origin >= max(_origin(key, layers) for key in item.deciders)


def _rate_of_another(tree: Tree, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield a line if the learning rate was chosen below the present choice of the optimizer, for another one."""
    rate, chosen = (_origin(f"optimizer.{key}", layers) for key in ("lr", "name"))
    below, above = (setting(each, "optimizer.name") for each in (_merged(layers[: rate + 1]), tree))
    if rate < chosen and layers[rate].name != layers[chosen].name and below != above:
        kept = f"optimizer.lr = {setting(tree, 'optimizer.lr')} of {layers[rate].name}"
        yield f'{kept} was chosen for name = "{below}", and {layers[chosen].name} has "{above}": write its lr, too'


def _import_plugins(layers: Sequence[Layer]) -> str:
    """Import them; return what is wrong, or an empty text. A run's folder imports nothing: others may write to it."""
    names = next((layer.tree["plugins"] for layer in reversed(layers) if "plugins" in layer.tree), None)
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        return ""  # a value that is no list of names is reported like any wrong value
    own = [layer.tree.get("plugins") for layer in layers if layer.imports]
    by_user = [name for said in own if isinstance(said, list) for name in said]
    try:
        require_plugins([name for name in names if name not in by_user])
        import_plugins(names)
    except PluginError as error:
        return str(error)
    return ""


def _foreign_programs(layers: Sequence[Layer]) -> list[str]:
    """Return a line for each program that a run's folder names and nobody else."""
    origins = {key: layers[_origin(key, layers)] for key in _PROGRAMS if _origin(key, layers) >= 0}
    return [
        f"{key}: {layer.name} names a program, and a run's folder starts none; if you trust it, write it "
        "into a file of your own, or on the command line"
        for key, layer in origins.items()
        if setting(layer.tree, key) and not layer.imports
    ]


def _origin(key: str, layers: Sequence[Layer]) -> int:
    """Return the last layer that sets a key, or a part of it; -1: none, its default holds."""
    return max((number for number, layer in enumerate(layers) if is_set(layer.tree, key)), default=-1)


def _over(below: Any, above: Any) -> Any:
    """Merge two trees, table by table and key by key; `above` wins. One that turns a table off leaves nothing of it."""
    if isinstance(below, dict) and isinstance(above, dict) and not is_off(above):
        return below | {key: _over(below.get(key), value) for key, value in above.items()}
    return above


def _parse_overrides(overrides: Iterable[str]) -> tuple[list[Layer], list[str]]:
    """Return a layer for each, and what is wrong with the others."""
    layers, problems = [], []
    for text in overrides:
        name, equals, value = text.partition("=")
        section, *keys = name.strip().split(".")
        if equals and section and keys and all(keys):
            nested: Any = parse_value(value.strip())
            for key in reversed(keys):
                nested = {key: nested}
            layers.append(Layer("the command line", {section: nested}))
        else:
            problems.append(
                f"{name}: got {short(text)} as an override, must be section.key=value; "
                "write for example optimizer.lr=3e-4"
            )
    return layers, problems


def _read_layers(path: Path, imports: bool) -> list[Layer]:
    """Return a file's layer behind those of its bases, the lowest base first. A file in a run's folder may import no
    plugins, and neither may the bases that it names.

    Raises: ConfigError
    """
    layers = list[Layer]()
    files = list[str]()
    while True:
        files.append(str(path))
        what = f"base: got {files[-1]}, named by {files[-2]}" if layers else f"config: got {files[-1]}"
        text, tree = read_file(path, what)
        if any(os.path.samefile(path, layer.name) for layer in layers):
            raise ConfigError([f"{what}, files inherit in a circle: {' -> '.join(files)}; remove one base"])
        base = tree.pop("base", None)
        imports = imports and not _is_of_a_run(path)
        is_saved = _is_of_a_run(path) or bool(_NOT_SET.search(text))
        layers.insert(0, Layer(str(path), tree, is_saved, imports))
        if base is None:
            return layers
        if not isinstance(base, str) or not base:
            raise ConfigError([f'base: got {short(base)} in {files[-1]}, must be a path; write base = "other.toml"'])
        path = path.parent / base


def _is_of_a_run(path: Path) -> bool:
    """Return whether a run has written this file, or it is a link that leads there, maybe over more links."""
    if path.name == "config.toml" and any((path.parent / name).exists() for name in _OF_A_RUN):
        return True
    return path.is_symlink() and _is_of_a_run(path.parent / path.readlink())


def read_file(path: Path, what: str) -> tuple[str, Tree]:
    """Return a file's text and what it says. `what`: begins a line about it. Raises: ConfigError with what to write."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        # without their ending: names that share it alone are not similar
        near = nearest(path.stem, [file.stem for file in path.parent.glob("*.toml")])
        place = "a base's as seen from its file; megamix's own are in configs/ of its repository: copy the one you want"
        fix = f"did you mean {path.with_name(f'{near}.toml')}?" if near else f"write the path of a TOML file, {place}"
        raise ConfigError([f"{what}, there is no such file; {fix}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8, so no TOML"
        job = f"a run goes on by the file that began it, or by {path / 'config.toml'}"
        fix = job if os.path.isfile(path / "config.toml") else "write the path of a TOML file"
        raise ConfigError([f"{what}, cannot be read: {reason}; {fix}"]) from error
    except ValueError as error:
        other = what.endswith((".json", ".yaml", ".yml"))
        fix = "write it as configs/quickstart.toml is written" if other else "correct that line (text needs quotes)"
        raise ConfigError([f"{what}, is no TOML: {error}; {fix}"]) from error
