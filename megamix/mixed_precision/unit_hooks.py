"""Hooks at the beginning and end of a member's forward, on the modules of units, and at the beginning of its backward,
on the autograd nodes of its outputs.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from threading import get_ident
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megamix.mixed_precision.guards.foreign_params import LEAF, readers_of

Member = TypeVar("Member")
OnForward = Callable[[Any, nn.Module, object], None]  # takes the hook's `given`, the module and its output


class Gather(Protocol):
    """Is called before a member's backward begins. `member`: the object that the hook was given."""

    def before_backward(self, member: Any, turn: float) -> None: ...


class OneThread:
    """Lets one thread at a time use parameters whose memory comes and goes. A second thread could free what the first
    one reads.
    """

    _inside: int | None = None

    def enter(self, name: str, in_backward: bool, stays: bool) -> None:
        """Let this thread call `name`; with `stays`, keep other threads out of the model until `leave`. Raises:
        RuntimeError if another thread is inside.
        """
        # On a GPU a backward runs in a thread of its own, in which a recompute calls units.
        may = torch._C._current_graph_task_id() >= 0 if in_backward else self._inside in (None, get_ident())
        if not may:
            raise RuntimeError(
                f"{name} is called while another thread is inside the model's forward or backward: with shard = "
                '"parameters" only one thread may be there, except inside `with engine.whole_parameters():`. If a '
                "forward has failed there, call engine.discard_step() first"
            )
        if stays:
            self._inside = get_ident()

    def leave(self) -> None:
        self._inside = None


def refuse_transforms(name: str) -> None:
    """Refuse a call of member `name` within a transform of torch.func. Raises: RuntimeError."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError(
            f"{name} is called within a transform of torch.func (vmap, grad), which cannot contain gathers. Use "
            'shard = "gradients", or transform inside `with engine.whole_parameters():`'
        )


class OfModule:
    """The hook of a module, which calls a method with `given`.

    The hook holds the method's object and `given` weakly: a module that outlives its engine must not keep the buffers
    and process groups alive. In a copy or a pickle of the module the hook does nothing. torch's compiler never traces
    the hook if `may_import` is True; this imports the compiler, which takes seconds. If False, the hook is excluded
    from tracing only if the compiler is loaded already.
    """

    def __init__(self, method: OnForward | None = None, given: object = None, *, may_import: bool = True):
        self._method = (lambda: None) if method is None else weakref.WeakMethod(method)
        self._given = (lambda: None) if given is None else weakref.ref(given)
        self._run = _run
        if method is not None and (may_import or "torch._dynamo" in sys.modules):  # never traced
            self._run = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]  # untyped in torch

    def __call__(self, module: nn.Module, args: object, output: object = None) -> None:
        if (method := self._method()) is not None:
            self._run(method, self._given(), module, output)

    def __reduce__(self) -> tuple[type[OfModule], tuple[()]]:
        return OfModule, ()


def _run(method: OnForward, given: object, module: nn.Module, output: object) -> None:
    method(given, module, output)


def on_gradient(gather: Gather, member: object, turn: int, given: Iterable[Tensor]) -> None:
    """Tell `gather` when the first gradient of the member's outputs of this turn arrives, which begins the
    member's backward.
    """
    for tensor in given:
        node: Any = tensor.grad_fn
        if node is not None and _OnGradient not in node.metadata:  # otherwise an earlier forward has hooked it
            _tell(gather, member, turn, node)


def on_reads(gather: Gather, member_of: Mapping[nn.Parameter, Member], loss: Tensor) -> Iterator[Member]:
    """Tell `gather` also before the backward of operations that read a member's parameters outside its outputs, and
    yield these members.

    Such operations lie on a path from the loss that passes no output of a member: a penalty on a weight, or a loss that
    a member has put into a list or keeps as an attribute.
    """
    readers = readers_of([loss.grad_fn], hidden=_OnGradient)
    for leaf in [node for node in readers if node.name() == LEAF and node.variable in member_of]:
        yield member_of[leaf.variable]
        todo = [leaf]
        while todo:
            for node in readers[todo.pop()]:
                _tell(gather, member_of[leaf.variable], math.inf, node)
                if len(node.next_functions) == 1:  # the result may be a view, so operations that read it count, too
                    todo.append(node)


def _tell(gather: Gather, member: object, turn: float, node: Any) -> None:
    told = node.metadata.setdefault(_OnGradient, {})
    held = weakref.ref(member)  # a graph that outlives its engine must not keep its unit's buckets alive
    if held not in told:
        told[held] = node.register_prehook(_OnGradient(gather, held, turn))


class _OnGradient:
    """The hook of an autograd node."""

    def __init__(self, gather: Gather, member: weakref.ref[object], turn: float):
        self._gather = weakref.ref(gather)
        self._member = member
        self._turn = turn

    def __call__(self, grads: object) -> None:
        if (gather := self._gather()) is None:
            raise RuntimeError(
                "a backward through a module whose engine is gone, with its weights: keep the engine until its last "
                "backward"
            )
        gather.before_backward(self._member(), self._turn)


def tensors_in(given: object) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and dataclasses."""
    for leaf in tree_leaves(given):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name, None) for field in fields(leaf)])
