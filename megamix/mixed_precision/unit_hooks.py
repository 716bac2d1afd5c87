"""Where a unit's forward and its backward begin and end: hooks on modules, and on the nodes of what these give."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Gather(Protocol):
    """Who is told. `unit`: as the hook was given it."""

    def before_forward(self, unit: Any, module: nn.Module, output: object) -> None: ...

    def after_forward(self, unit: Any, module: nn.Module, output: object) -> None: ...

    def before_backward(self, unit: Any) -> None: ...


class OfModule:
    """The hook of a module. It holds the gathers weakly, as ParamGather's; in a copy or a pickle it does nothing."""

    def __init__(self, gather: Gather | None = None, method: str = "", unit: object = None):
        self._gather = (lambda: None) if gather is None else weakref.ref(gather)
        self._method, self._unit = method, unit
        if gather is not None:  # never traced, as in ParamGather
            self._run = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]  # no types

    def __call__(self, module: nn.Module, args: object, output: object = None) -> None:
        if (gather := self._gather()) is not None:
            self._run(gather, self._method, self._unit, module, output)

    def __reduce__(self) -> tuple[type[OfModule], tuple[()]]:
        return OfModule, ()


def on_gradient(gather: Gather, unit: object, module: nn.Module, output: object) -> None:
    """Let `gather` be told when the first gradient of what the unit has given is there: its backward begins."""
    for node in _nodes([output, _attributes(module)]):
        if _OnGradient not in node.metadata:  # else another unit has given it, or an earlier forward
            node.metadata[_OnGradient] = node.register_prehook(_OnGradient(gather, unit))


class _OnGradient:
    """The hook of a node."""

    def __init__(self, gather: Gather, unit: object):
        self._gather, self._unit = weakref.ref(gather), unit

    def __call__(self, grads: object) -> None:
        if (gather := self._gather()) is not None:
            gather.before_backward(self._unit)


def _run(gather: Gather, method: str, unit: object, module: nn.Module, output: object) -> None:
    getattr(gather, method)(unit, module, output)


def _nodes(given: object) -> Iterator[Any]:
    """Yield those of autograd whose results a unit gives: tensors in containers, and in dataclasses of them."""
    for leaf in tree_leaves(given):
        if isinstance(leaf, Tensor):
            yield from () if leaf.grad_fn is None else (leaf.grad_fn,)
        elif is_dataclass(leaf):
            yield from _nodes([getattr(leaf, field.name, None) for field in fields(leaf)])


def _attributes(unit: nn.Module) -> list[object]:
    """Return what a unit may give beside its output, as the loss of a router."""
    return [value for part in unit.modules() for name, value in vars(part).items() if not name.startswith("_")]
