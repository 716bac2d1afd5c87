"""What a configuration can name: what is built in, and what plugins add. A plugin is a module that calls these
functions when it is imported. No torch here.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Container, Iterable
from contextlib import redirect_stdout
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen table of a configuration: unknown keys, wrong types, inf and nan are errors; a whole number may stand
    for a float. The text under a field is its description.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Registry:
    """The things of one kind, by name: the keys of each, and what was registered under it."""

    def __init__(self, kind: str, names: str = r"[A-Za-z][\w-]*"):
        """`names`: what each must match, so that TOML can spell it as a table."""
        self.kind, self.names = kind, names
        self.sections: dict[str, type[Section]] = {}
        self.registered: dict[str, Any] = {}  # a function that builds one, or a family
        self.reserved: Container[str] = ()  # what megamix itself means by a name at that place

    def register(self, name: str, section: type[Section], thing: Any) -> None:
        """Add one. Raises: ValueError if the name is taken or none, or one of the others is not what it must be."""
        if wrong := self._wrong(name, section, thing):
            raise ValueError(f"{self.kind} {name!r} of {getattr(thing, '__module__', thing)}: {wrong}")
        self.sections[name], self.registered[name] = section, thing

    def _wrong(self, name: str, section: object, thing: object) -> str:
        if not re.fullmatch(self.names, name, re.ASCII):
            return f"a name must match {self.names}; give it another name"
        if not (isinstance(section, type) and issubclass(section, Section)):
            return f"its keys must be a subclass of megamix.plugins.Section, got {section!r}; write one"
        if not callable(thing):
            return "it must be a function or a class that builds one; pass that"
        if name in self.reserved:
            return f"{name} means something of megamix's own there; give it another name"
        taken = self.registered.get(name) or self.sections.get(name)
        return f"{taken.__module__} has registered one of that name; give it another name" if taken else ""


OPTIMIZERS = Registry("optimizer")
LOSS_SCALES = Registry("loss scale rule")
FAMILIES = Registry("model family")
SOURCES = Registry("data source")
READERS = Registry("reader", names=r"(\.[\w-]+)+")
TRACKERS = Registry("tracker")
# What is read of a corpus file, by the end of its name, without a plugin. Everything else is text, one document a file.
FILE_KINDS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".json": "json",  # or jsonl, by what it holds
    ".json.gz": "json",
    ".json.zst": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
LOSS_SCALES.reserved = ("auto",)  # goes by the dtype
READERS.reserved = FILE_KINDS


def register_optimizer(name: str, section: type[Section], build: Callable[..., Any]) -> None:
    """`optimizer.name = "NAME"`, with the section's keys in [optimizer.NAME].

    `build(**keys, lr=, weight_decay=, groups=)` returns a `megamix.mixed_precision.optimizers.Optimizer`; a class does.
    Raises, as all functions here: ValueError if the name is taken.
    """
    OPTIMIZERS.register(name, section, build)


def register_loss_scale(name: str, section: type[Section], build: Callable[..., Any]) -> None:
    """`precision.loss_scale.rule = "NAME"`, with the keys beside it. `build(**keys)` returns a `LossScale`."""
    LOSS_SCALES.register(name, section, build)


def register_family(family: Any) -> None:
    """`model.family = "NAME"`, with the keys of `family.section` beside it; the name is `family.name`."""
    FAMILIES.register(family.name, family.section, family)


def register_source(name: str, section: type[Section], build: Callable[..., Any]) -> None:
    """`{ NAME = { keys } }` in data.train, data.valid and stages, beside path and markov.

    `build(**keys, seq_len=, vocab_size=, seed=)` returns a `megamix.data.source.SampleSource`, whose `fingerprint` is a
    text that another one has only if all of its samples are the same. What is wrong with the keys is a ValueError.
    `seed`: from 0 to 2**64 - 1; validation's is never training's. Such a source takes no data.split.
    """
    SOURCES.register(name, section, build)


def register_reader(suffix: str, read: Callable[..., Any]) -> None:
    """Files that `megamix prepare --plugins` reads by the end of their name, as ".xyz".

    `read(path)` yields the texts of a file's documents, in the same order each time; a function at the top of its
    module, which workers import.
    """
    READERS.register(suffix, Section, read)


def register_tracker(name: str, section: type[Section], build: Callable[..., Any]) -> None:
    """A table [metrics.NAME] with the section's keys, which turns it on. See `megamix.report.trackers.Tracker`."""
    TRACKERS.register(name, section, build)


MODULE = re.compile(r"[\w.]{1,100}")


class PluginError(Exception):
    """A plugin that is needed and not there: one line, as for any wrong value."""


def require_plugins(names: Iterable[str]) -> None:
    """Raises: PluginError unless they are imported: what was saved imports nothing, for others may have written it."""
    if missing := ",".join(name for name in names if name not in sys.modules):
        raise PluginError(
            f"plugins: {missing} named by what was saved, which imports nothing by itself; write --plugins {missing} "
            "right behind the verb if you trust that code, or plugins on top of your configuration"
        )


def import_plugins(names: Iterable[str]) -> None:
    """Import modules that are installed or lie in the working folder. Raises: PluginError naming the one that fails."""
    for name in names:
        if not MODULE.fullmatch(name):
            raise PluginError(f"plugins: got {name!r}, which is no name of a module; write it as in Python's import")
        try:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())  # behind all that is installed: nothing there may take its place
            with redirect_stdout(sys.stderr):  # what a command shows begins with its own first line
                importlib.import_module(name)
        except (Exception, SystemExit) as error:
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
            fix = "install it, or start in the folder where it lies" if is_missing else "mend that module"
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise PluginError(f"plugins: {name} cannot be imported: {reason}; {fix}") from error
