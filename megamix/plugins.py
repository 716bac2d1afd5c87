"""The names that a configuration can use: those built in, and those that plugins add. A plugin is a module that calls
these functions when it is imported. No torch here.
"""

import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Container, Iterable
from contextlib import redirect_stdout, suppress
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from megamix.base.axes import AxisKind, add_axis


class Section(BaseModel):
    """A frozen table of a configuration. Unknown keys, wrong types, inf and nan are errors; an integer may stand for a
    float. The text under a field is its description.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        table = handler(schema)
        entries = handler.resolve_ref_schema(table).get("properties", {})
        for key in entries.keys() & texts(cls).keys():
            entries[key].setdefault("description", texts(cls)[key])
        return table


@cache
def texts(section: type[Section]) -> dict[str, str]:
    """Return the text under each field of a section, in it or in a class that it inherits.

    Pydantic could read them, but would whenever a section is defined, which takes twice as long as all else about it.
    """
    found: dict[str, str] = {}
    for kind in reversed([kind for kind in section.__mro__ if kind not in Section.__mro__]):
        with suppress(OSError, SyntaxError, TypeError):  # a class that is made has no source
            source = inspect.getsource(kind)
            within = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
            body = next(node for node in ast.walk(within) if isinstance(node, ast.ClassDef))
            for pair in pairwise(ast.iter_child_nodes(body)):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[key] = inspect.cleandoc(text)
    return found


class Registry:
    """Holds the things of one kind by name: the keys of each, and the thing registered under it."""

    def __init__(self, kind: str, names: str = r"[A-Za-z][\w-]*"):
        """Start empty. `names`: the pattern that each name must match, so that TOML can spell it as a table."""
        self.kind, self.names = kind, names
        self.sections: dict[str, type[Section]] = {}
        self.registered: dict[str, Any] = {}  # by name: a function that builds the object, or a family
        self.reserved: Container[str] = ()  # names with a meaning of megamix's own at that place

    def register(self, name: str, section: type[Section], thing: Any) -> None:
        """Add a thing. Raises: ValueError if the name is taken or no valid name, or if section or thing have a wrong
        type.
        """
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
MORE_AXES = Registry("axis")
# Kinds of corpus files, by the end of their names, that are read without a plugin. All other files are text, one
# document each.
FILE_KINDS = {".parquet": "parquet", ".arrow": "arrow"}
COMPRESSIONS = (".gz", ".gzip", ".zst", ".zstd")
for _more in ("", *COMPRESSIONS):
    FILE_KINDS |= dict.fromkeys((f".jsonl{_more}", f".ndjson{_more}", f".jsonlines{_more}"), "jsonl")
    FILE_KINDS[f".json{_more}"] = "json"  # or jsonl, by its content
LOSS_SCALES.reserved = ("auto",)  # chosen by the dtype
READERS.reserved = FILE_KINDS


def register_optimizer(name: str, section: type[Section], build: Callable[..., Any]) -> None:
    """Add an optimizer: `optimizer.name = "NAME"`, with the section's keys in [optimizer.NAME].

    `build(**keys, lr=, weight_decay=, groups=)` returns a `megamix.Optimizer`; a class does, too. Raises, as all
    functions here: ValueError if the name is taken.
    """
    OPTIMIZERS.register(name, section, build)


def register_loss_scale(name: str, section: type[Section], build: Callable[..., Any]) -> None:
    """Add a loss scale rule: `precision.loss_scale.rule = "NAME"`, with the keys beside it. `build(**keys)` returns a
    `LossScale`.
    """
    LOSS_SCALES.register(name, section, build)


def register_family(family: Any) -> None:
    """Add a model family: `model.family = "NAME"`, with the keys of `family.section` beside it. The name is
    `family.name`.
    """
    FAMILIES.register(family.name, family.section, family)


def register_source(name: str, section: type[Section], build: Callable[..., Any]) -> None:
    """Add a data source: `{ NAME = { keys } }` in data.train, data.valid and stages, beside path and markov.

    `build(**keys, seq_len=, vocab_size=, seed=)` returns a `megamix.data.source.SampleSource`. Its `fingerprint` is a
    text that another source has only if all its samples are the same. `build` raises ValueError for wrong keys. `seed`:
    from 0 to 2**64 - 1; the seed for validation is never the one for training. Such a source takes no data.split.
    """
    SOURCES.register(name, section, build)


def register_reader(suffix: str, read: Callable[..., Any]) -> None:
    """Add a reader: `megamix prepare --plugins` then reads files by the end of their name, such as ".xyz".

    `read(path)` yields the texts of a file's documents, in the same order each time. It must be a function at the top
    of its module, which workers import.
    """
    READERS.register(suffix, Section, read)


def register_tracker(name: str, section: type[Section], build: Callable[..., Any]) -> None:
    """Add a tracker: a table [metrics.NAME] with the section's keys turns it on. See
    `megamix.log.trackers.Tracker`.
    """
    TRACKERS.register(name, section, build)


def register_axis(name: str, section: type[Section], divide: Callable[..., Any], kind: AxisKind) -> None:
    """Add an axis to a job's mesh: a table [parallelism.NAME] with the section's keys turns it on, and its key `size`
    is the number of ranks along it. `kind` says what these ranks have in common.

    `divide(model, collectives, **keys)` makes a `megamix.model.decoder.Decoder` compute this rank's part; its rules say
    by `along` which parameters the axis divides. `collectives`: those of the axis (megamix/comm/collectives.py).
    """
    if "size" not in getattr(section, "model_fields", {}):
        raise ValueError(f"axis {name!r}: its section needs the key size, a PositiveInt: the ranks along the axis")
    MORE_AXES.register(name, section, divide)
    add_axis(name, kind)


MODULE = re.compile(r"[\w.]{1,100}")


class PluginError(Exception):
    """A plugin that is needed but missing. The message is one line, as for any wrong value."""


def require_plugins(names: Iterable[str]) -> None:
    """Refuse plugins that are not imported. Saved files import nothing, because others may have written them. Raises:
    PluginError.
    """
    if missing := ",".join(name for name in names if name not in sys.modules):
        raise PluginError(
            f"plugins: {missing} named by a saved file, which imports nothing by itself; if you trust that code, write "
            f"--plugins {missing} right after the verb, or plugins at the top of your configuration"
        )


def import_plugins(names: Iterable[str]) -> None:
    """Import modules that are installed or lie in the working folder. Raises: PluginError naming the one that fails."""
    for name in names:
        if not MODULE.fullmatch(name):
            raise PluginError(f"plugins: got {name!r}, which is no name of a module; write it as in Python's import")
        try:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())  # last, so that no file of the working folder hides an installed module
            with redirect_stdout(sys.stderr):  # so that a command's own first line is the first of its output
                importlib.import_module(name)
        except (Exception, SystemExit) as error:
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
            fix = "install it, or start in the folder where it lies" if is_missing else "mend that module"
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise PluginError(f"plugins: {name} cannot be imported: {reason}; {fix}") from error
