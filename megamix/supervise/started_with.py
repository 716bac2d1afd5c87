"""What a rank was started with, as far as all ranks must have it alike. No torch here: it may be the wrong one."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

from megamix.config import Config, DataSource, config_to_toml, effective_tables
from megamix.config.toml_text import value_text
from megamix.config.unread import part_read

# How long a rank waits is its own affair. What a path leads to may lie elsewhere on each node: of data and tokenizer
# the fingerprints count, and the run's folder is looked at once it is taken.
MAY_DIFFER = ("parallelism.timeout_s", "checkpoint.folder", "data.tokenizer")
PATHS_MAY_DIFFER = ("data.train", "data.stages", "data.valid")  # but not which of them are one
# A path in place of these words: the first rank's is everybody's.
RESUME_WORDS = ("auto", "never")

NOT_READ = "not read"  # in place of the value of a key that another one of the configuration makes so
PACKAGE = Path(__file__).parents[1]
_LONGEST = 1000  # characters of a value; of a longer one the rest is told by a hash
_DIGITS = 16  # of a hash, in hexadecimal: enough against chance


def started_with(config: Config, fingerprints: dict[str, str]) -> dict[str, str]:
    """Every key that must be alike, and its value as text. `fingerprints`: of the data, by the key that names it."""
    found = {key: _bounded(value_text(value)) for key, value in _settings(config).items()}
    found |= {item.key: NOT_READ for item in part_read(config.model_dump())[1]}
    found |= {f"content of {key} (SHA-256)": digest[:_DIGITS] for key, digest in fingerprints.items()}
    versions = {f"version of {name}": _version(name) for name in ("megamix", "torch")}
    return found | versions | {"source code of megamix (SHA-256)": _sources()}


def flat(config: str) -> dict[str, Any]:
    """Take an effective configuration apart, by `section.key`, to compare it with another one: a key that is not read
    has its default, one that is not set is not there. Raises: ValueError if it is no TOML.
    """
    tables = effective_tables(config)
    return {f"{section}.{key}": value for section, keys in tables.items() for key, value in keys.items()}


def _settings(config: Config) -> dict[str, Any]:
    settings = {key: value for key, value in flat(config_to_toml(config)).items() if key not in MAY_DIFFER}
    if settings["checkpoint.resume"] not in RESUME_WORDS:
        settings["checkpoint.resume"] = "a path"
    numbers: dict[str | int, int] = {}
    for key in PATHS_MAY_DIFFER:
        if key in settings:
            settings[key] = _without_paths(settings[key], numbers)
    return settings


def _without_paths(value: Any, numbers: dict[str | int, int]) -> Any:
    """Each path as the number of its file, in the order in which files first come: a file that comes again goes on
    where it was, so which ones are the same must be alike.
    """
    if isinstance(value, list):
        return [_without_paths(item, numbers) for item in value]
    if not isinstance(value, dict):
        return value
    named = {key: _without_paths(item, numbers) for key, item in value.items()}
    if "path" in named:
        name = DataSource(path=named.pop("path")).name
        named = {"file": numbers.setdefault(name, len(numbers) + 1)} | named
    return named


def _bounded(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} and more (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def _sources() -> str:
    """Two nodes may have one version and other code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:_DIGITS]
