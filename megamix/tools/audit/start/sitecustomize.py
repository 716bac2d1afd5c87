"""Start of every Python that `megamix audit -- COMMAND` starts. It reports each update of a torch optimizer to the
audit, and ends a script whose updates cannot be seen.

Python imports a module of this name by itself. This one imports nothing that a script may not want, and runs the
`sitecustomize` that it hides.
"""

from __future__ import annotations

import atexit
import functools
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
MOST_PASSES = 512  # backward passes without an update that is seen: more than gradients are accumulated over


def tell(kind: str, **note: Any) -> None:
    """Write what this process has found, whole or not at all."""
    path = os.path.join(os.environ["MEGAMIX_AUDIT_FOLDER"], f"{os.getpid()}.{kind}")
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(note, file)
    os.replace(path + ".part", path)


def refuse(text: str) -> None:
    """End the process, which cannot be audited: its own way out would save checkpoints."""
    tell("refusal", text=text)
    os._exit(0)


class Updates:
    """Takes note of each backward pass, and of each update by any of torch's optimizers."""

    def __init__(self, optimizer_module: Any):
        self.made = self.passes = 0
        self.losses = list[Any]()
        self.audit: Any = None
        self.torch = optimizer_module.torch
        autograd = self.torch.autograd
        autograd.backward = self.told(autograd.backward, self.before_backward)
        autograd.grad = self.told(autograd.grad, self.count_pass)
        optimizer_module.register_optimizer_step_post_hook(self.after_update)
        atexit.register(lambda: tell("end", made=self.made))

    def told(self, function: Callable[..., Any], before: Callable[..., None]) -> Callable[..., Any]:
        """Return torch's function, with a call of `before` in front of it."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.torch._C._current_graph_task_id() == -1:  # else inside a backward pass, as a checkpoint's is
                before(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    def before_backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        """Keep the losses and count the pass."""
        given = [tensors] if isinstance(tensors, self.torch.Tensor) else tensors
        self.losses = [one.detach() for one in given if isinstance(one, self.torch.Tensor)]  # others are edges
        self.count_pass()

    def count_pass(self, *_: Any, **__: Any) -> None:
        """Count a backward pass, and end the process if too many of them made no update."""
        self.passes += 1
        if self.passes > MOST_PASSES:
            refuse(
                f"{MOST_PASSES} backward passes in a row made no update that can be seen. An update by hand, or by an "
                "optimizer that is no torch.optim.Optimizer, cannot: megamix verify --trainer judges such a loop by "
                "its results, see docs/verify.md. If a GradScaler skips every update, look whether its loss is finite"
            )

    def after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.made += 1
        self.passes = 0
        try:
            if self.audit is None:  # torch is whole only now
                sys.path.append(os.environ["MEGAMIX_AUDIT_PATH"])  # last, so that nothing there hides a module
                from megamix.tools.audit.in_script import ScriptAudit

                updates, folder = int(os.environ["MEGAMIX_AUDIT_UPDATES"]), os.environ["MEGAMIX_AUDIT_FOLDER"]
                self.audit = ScriptAudit(updates, folder, tell)
            self.audit.after_update(optimizer, self.losses)
        except Exception as error:
            refuse(f"{type(error).__name__}: {error}")


def refuse_engine(engine: Any) -> None:
    """Have the first step of megamix's own engine end the process."""
    engine.ShardedEngine.step = lambda *_: refuse(
        "it trains by megamix's own engine; write with megamix.audit(model, engine): around a step, or audit a job "
        "by its file: megamix audit job.toml"
    )


class WhenImported:
    """Finder of one module that hands it, once it is imported, to a function."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]):
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
    sys.meta_path.insert(0, WhenImported("torch.optim.optimizer", Updates))
    sys.meta_path.insert(0, WhenImported("megamix.mixed_precision.engine", refuse_engine))
    run_hidden()
