"""Start of every Python that `megamix audit -- COMMAND` starts: each update of a torch optimizer is told to the audit.

Python imports a module of this name by itself. This one imports nothing that a script may not want, and runs the
`sitecustomize` that it hides.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def tell(kind: str, **note: Any) -> None:
    """Write what this process has found, whole or not at all."""
    path = os.path.join(os.environ["MEGAMIX_AUDIT_FOLDER"], f"{os.getpid()}.{kind}")
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(note, file)
    os.replace(path + ".part", path)


class Updates:
    """Takes torch's call behind each update of any of its optimizers."""

    def __init__(self) -> None:
        self.made = 0
        self.audit: Any = None
        atexit.register(self.at_exit)

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.made += 1
        try:
            if self.audit is None:  # torch is whole only now
                sys.path.append(os.environ["MEGAMIX_AUDIT_PATH"])  # last, so that nothing there hides a module
                from megamix.tools.audit.in_script import ScriptAudit

                updates, folder = int(os.environ["MEGAMIX_AUDIT_UPDATES"]), os.environ["MEGAMIX_AUDIT_FOLDER"]
                self.audit = ScriptAudit(updates, folder, tell)
            self.audit.after_update(optimizer)
        except Exception as error:
            tell("refusal", text=f"{type(error).__name__}: {error}")
            os._exit(0)

    def at_exit(self) -> None:
        tell("end", made=self.made, engine="megamix.mixed_precision.engine" in sys.modules and self.audit is None)


class WhenImported:
    """Finder of one module that hands it, once it is imported, to a function."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self.name = name
        self.then = then

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: ModuleType) -> None:
                run(module)
                self.then(module)

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


def run_hidden() -> None:
    """Run the `sitecustomize` that would have been imported without this one."""
    others = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "MEGAMIX_AUDIT_FOLDER" in os.environ:
    listen = WhenImported("torch.optim.optimizer", lambda torch: torch.register_optimizer_step_post_hook(Updates()))
    sys.meta_path.insert(0, listen)
    run_hidden()
