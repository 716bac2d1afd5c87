"""Dtypes and losses of one step's computation, traffic and gradients, seen operation by operation below autocast."""

from __future__ import annotations

import functools
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megamix.tools.audit.facts import DTYPES, ESTIMATED, EXACT, ParamFacts, dtype_name, joined, local
from megamix.tools.audit.finite import NotFinite
from megamix.tools.verify.core.tape import tensors_in

_COPIES = {"_to_copy", "clone"}
# Operations that do not count as computing with a parameter: they move, copy or inspect it. Views are not listed;
# torch names those.
_NOT_COMPUTED = {
    "detach", "alias", "empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "copy_", "set_",
    "resize_", "_foreach_copy_", "record_stream", "split_with_sizes_copy", "cat", "isfinite", "equal",
}  # fmt: skip
_OF_PARTS = "all_to_all", "alltoall", "send", "recv"  # traffic that averages no gradient
_TRAFFIC = {"c10d", "_c10d_functional", "fsdp"}
_FEW = 16  # numbers that ranks may send for a log or a norm
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"

T = TypeVar("T")
_Weak: Any = StorageWeakRef  # torch has no types for it


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Watch over all operations while it is entered.

    Every operation runs as it is. Compiled code runs compiled, and its operations are not observed. The watch notes in
    which dtypes the parameters given to `follow` are computed with, what becomes of their gradients, which dtypes ranks
    sum, and what a GradScaler finds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.computed = defaultdict[str, set[torch.dtype]](set)
        self.reduced = set[torch.dtype]()  # dtypes that ranks summed behind the forward
        self.loss_scale: float | None = None
        self.steps, self.overflowed = 0, False
        self.losses = list[Tensor]()  # those of the last backward pass
        self.first: NotFinite | None = None
        self.sent = False  # whether ranks sent more than a few numbers
        self.divided = False  # whether they sent activations, so that each may hold a part of the model
        self.moved = set[str]()  # parameters that were copied into another tensor in forward
        self.inside_forward = False  # forward of the whole model
        self.hooks = ExitStack()
        self._followed = set[Tensor]()
        self._places = dict[int, tuple[_Weak, list[tuple[int, str]]]]()  # by storage: starts and names
        # Casts in backward: the dtype before, and how many elements became zero.
        self._sources = dict[int, tuple[_Weak, tuple[torch.dtype, Tensor | None]]]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # False would run compiled code eagerly, which rounds otherwise

    def follow(self, facts: ParamFacts, param: nn.Parameter) -> None:
        """Watch for uses of this parameter, its views and its casts, and look at each gradient that backward makes.

        A gradient is seen before it is added to anything.
        """
        if param not in self._followed and param.requires_grad:
            self.hooks.enter_context(param.register_hook(lambda grad: self._look(facts, grad)))  # type: ignore[no-untyped-call]  # untyped in torch
        self._followed.add(param)
        self._place(facts.name, local(param))

    def follow_gathered(self, facts: ParamFacts, gathered: Any, *_: object) -> None:
        """Watch the tensor that FSDP2 has gathered in place of a parameter, from a forward's hook."""
        if hasattr(gathered, "_unsharded_param"):
            self.follow(facts, gathered._unsharded_param)

    def _place(self, name: str, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # a parameter without memory refuses reads, but has a place
            storage, place = tensor.untyped_storage(), (_start(tensor), name)
        starts = _alive(self._places, storage._cdata)
        if starts is None:
            self._places[storage._cdata] = (_Weak(storage), starts := [])
        if place not in starts:
            insort(starts, place)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        room, _, name = func._schema.name.partition("::")
        if name == _UNSCALE and (scale := 1 / float(args[2])) != 1:  # 1: the optimizer unscales by itself
            self.loss_scale = scale
        out = func(*args, **(kwargs or {}))
        if name == _UNSCALE:
            self.overflowed |= bool(args[1])
        elif room in _TRAFFIC:
            sent = {one.dtype for one in tensors_in(args[:1]) if one.numel() > _FEW}
            self.sent |= bool(sent)
            self.divided |= bool(sent) and (name.startswith(_OF_PARTS) or ("reduce" in name and self.inside_forward))
            if ("reduce" in name or "to_all" in name or "toall" in name) and not self.inside_forward:
                self.reduced.update(dtype for dtype in sent if dtype.is_floating_point)
        elif name in _COPIES and torch._C._current_graph_task_id() != -1:  # in backward
            storage = local(out).untyped_storage()
            self._sources[storage._cdata] = (_Weak(storage), (args[0].dtype, flushed(local(args[0]), out.dtype)))
        elif not func.is_view and name not in _NOT_COMPUTED and (self.inside_forward or torch.is_grad_enabled()):
            for tensor in map(local, tensors_in(args)):  # elsewhere an operation updates or averages parameters
                param = self._name_of(tensor)
                if param is not None and name in _COPIES:
                    self._place(param, local(out))
                elif param is not None:
                    self.computed[param].add(tensor.dtype)
        elif self.inside_forward and name in ("cat", "copy_"):
            self.moved.update(filter(None, map(self._name_of, map(local, tensors_in(args)))))
        return out

    def _name_of(self, tensor: Tensor) -> str | None:
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            return None
        starts = _alive(self._places, tensor.untyped_storage()._cdata)
        return starts[max(0, bisect_right(starts, (_start(tensor), "\uffff")) - 1)][1] if starts else None

    @torch.no_grad()
    def _look(self, facts: ParamFacts, grad: Tensor) -> None:
        grad = local(grad)
        if grad.layout != torch.strided or not grad.numel():
            return
        # Autocast's backward ends with a cast: the dtype and the zeros count as they were before it.
        made, lost = _alive(self._sources, grad.untyped_storage()._cdata) or (grad.dtype, None)
        kept = DTYPES.get(facts.dtypes["wire"]) or DTYPES.get(facts.dtypes["sum"]) or grad.dtype
        lost = flushed(grad, kept) if lost is None else lost
        facts.dtypes["gradient"] = joined(facts.dtypes["gradient"], dtype_name(made))
        facts.note_largest(gradient=grad.abs().amax().nan_to_num(nan=torch.inf))
        counted = {ESTIMATED: zeros_among_subnormals(grad, made)} if lost is None else {EXACT: lost}
        facts.count(**counted, looked_at=grad.numel())


def losses_told(watch: Watch) -> AbstractContextManager[object]:
    """Keep the losses of the last backward pass of the block in `watch.losses`."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def run(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # else inside a backward pass, as a checkpoint's is
            watch.losses = [one.detach() for one in tensors_in(tensors)]
        backward(tensors, *args, **kwargs)

    return mock.patch.object(torch.autograd, "backward", run)


def flushed(values: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return how many elements become zero in that dtype, INT64 (); None if it holds numbers as small as theirs."""
    if not (values.is_floating_point() and dtype.is_floating_point):
        return None
    narrower = torch.finfo(dtype).smallest_normal > torch.finfo(values.dtype).smallest_normal
    return ((values != 0) & (values.to(dtype) == 0)).sum() if narrower else None


def zeros_among_subnormals(grad: Tensor, made: torch.dtype) -> int:
    """Return how many elements look as if they had underflowed.

    They are zeros in rows and columns that are not all zero, if the tensor has subnormal numbers of the dtype it was
    made in. Other zeros have other reasons, such as a token that did not occur.
    Shapes: grad (rows, ...).
    """
    there = grad != 0
    if grad.dim() < 2 or there.all() or not (there & (grad.abs() < torch.finfo(made).smallest_normal)).any():
        return 0
    there = there.flatten(1)
    return int((~there & there.any(1, keepdim=True) & there.any(0, keepdim=True)).sum())


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _alive(by_storage: Mapping[int, tuple[_Weak, T]], storage: int) -> T | None:
    """Return the entry of a storage, or None. While a weak reference lives, no other storage has its address."""
    ref, known = by_storage.get(storage, (None, None))
    return None if ref is None or ref.expired() else known
