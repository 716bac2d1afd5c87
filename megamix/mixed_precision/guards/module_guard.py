"""The guard of a module: it keeps the parameters with which the engine was built, each in its place in the engine's
buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

from megamix.base.names import by_plain_name
from megamix.mixed_precision.bucket import Bucket

log = logging.getLogger("megamix")

_REQUIRES_GRAD = attrgetter("requires_grad")
_VERSION = attrgetter("_version")
_GRAD = attrgetter("grad")

_MOVED = (
    "has lost its place in the engine's buffer: .to(), .float(), load_state_dict(assign=True) or `param.data = ...` "
    "gave it new storage. To change weights call engine.load_weights(state_dict)"
)
_WRITTEN = (
    "was written in place: load_state_dict(), an initialiser or a weight average changed the half copy and not its "
    "FP32 master. To change weights call engine.load_weights(state_dict)"
)
_GRADIENT = (
    "has a .grad that is not the engine's: it has no loss scale and no sum over the ranks, and a backward would "
    "add to it. Call model.zero_grad(); to change a gradient use param.register_hook(...)"
)


class ModuleGuard:
    """Checks that the module keeps the parameters with which the engine was built, each under its names, no more and no
    fewer, and that these are views into the engine's buffers, written by the engine alone.

    Modules may come and go, and be wrapped by anything that `by_plain_name` knows, as long as the parameters pass this
    check. The engine itself writes through the flat buffers, which leaves the parameters' version counters as they are;
    `note_written` moves the counters.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]):
        self._model = model
        self._names = {param: name for name, param in by_plain_name(model.named_parameters()).items()}
        self._by_name = by_plain_name(model.named_parameters(remove_duplicate=False))
        self._trains = [param.requires_grad for param in self._names]
        self._note_parts()
        self._told_of_compile = False
        self._tell_of_compile()
        self._buckets = buckets
        self._params = [param for bucket in buckets for param in bucket.named_params.values()]
        self._no_grads: list[object] = [None] * len(self._params)
        self._places = list[int]()  # addresses of the parameters' data
        self._versions = self._versions_now()  # versions after the engine's last write

    def _versions_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # allowed on parameters without memory, and faster
            return [*map(_VERSION, self._params)]

    def _note_parts(self) -> None:
        self._modules = [*self._model.modules()]  # held, so that none of their ids is given to another object
        self._parts = [part.values() for module in self._modules for part in (module._parameters, module._modules)]
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        # Ids are compared, because == on tensors would compare their elements. This runs twice a step, and takes 0.2 us
        # for each module.
        return [*map(id, chain.from_iterable(self._parts))]

    def check(self) -> None:
        """Raise RuntimeError if a parameter was added, replaced, renamed, removed, frozen, unfrozen or written, has
        lost its view, or has a gradient that is not the engine's.
        """
        self.check_gradients()
        with torch._C.DisableTorchFunctionSubclass():
            places = [*map(Tensor.data_ptr, self._params)]
            if places != self._places:
                self._check_places(places)
            versions = [*map(_VERSION, self._params)]
            if versions != self._versions:
                self._refuse(versions, self._versions, _WRITTEN)

    def check_gradients(self) -> None:
        """Check names and gradients only, which a backward needs. To save time, only the step checks the rest."""
        with torch._C.DisableTorchFunctionSubclass():
            self._check_names()
            grads = [*map(_GRAD, self._params)]
            if grads != self._no_grads:
                self._refuse(grads, self._no_grads, _GRADIENT)

    def _check_places(self, places: list[int]) -> None:
        """Compare the addresses with the buckets' present ones, since a bucket's memory may have been freed and taken
        again.
        """
        self._places = [
            bucket.params.data_ptr() + slot.start * bucket.params.itemsize
            for bucket in self._buckets
            for slot in bucket.plan.slots
        ]
        if places != self._places:
            self._refuse(places, self._places, _MOVED)

    def _refuse(self, seen: Sequence[object], expected: Sequence[object], problem: str) -> None:
        all_three = zip(self._params, seen, expected, strict=True)
        param = next(param for param, one, other in all_three if one is not other and one != other)
        raise RuntimeError(f"parameter {self._names[param]} {problem}")

    def note_written(self) -> None:
        """Move all version counters, so that torch refuses the backward of a graph from before the engine's write."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version(self._params)
        # Read, not counted: parameters made of one tensor's views share one counter.
        self._versions = self._versions_now()

    def _check_names(self) -> None:
        if self._ids_now() != self._ids:
            self._compare()
            self._note_parts()
        self._tell_of_compile()
        if [*map(_REQUIRES_GRAD, self._names)] != self._trains:
            for (param, name), trains in zip(self._names.items(), self._trains, strict=True):
                if param.requires_grad != trains:
                    raise RuntimeError(_frozen_or_thawed(name, trains))

    def _tell_of_compile(self) -> None:
        # By name: importing the compiler takes seconds.
        is_compiled = self._model._compiled_call_impl is not None or type(self._model).__name__ == "OptimizedModule"
        if is_compiled and not self._told_of_compile:
            self._told_of_compile = True
            log.warning(
                "torch.compile wraps the whole model: its backward is one graph, so all gradients come at its end, and "
                "no sum over the ranks overlaps with backward. Compile the blocks inside: "
                "`for block in model.blocks: block.compile()`"
            )

    def _compare(self) -> None:
        now = by_plain_name(self._model.named_parameters(remove_duplicate=False))
        changed = (name for name in {**self._by_name, **now} if now.get(name) is not self._by_name.get(name))
        if (name := next(changed, None)) is not None:
            raise RuntimeError(
                f"parameter {name} {self._change(name, now)}; build the engine after the model is complete"
            )

    def _change(self, name: str, now: Mapping[str, nn.Parameter]) -> str:
        if name not in now:
            return "is no longer in the module under this name: it was taken out, or its module wrapped"
        if now[name] in self._names:
            return (
                f"is now the one that the engine trains as {self._names[now[name]]}: full_weights() and checkpoints "
                "would hold another model than the one that trains"
            )
        was = "is another Parameter now than the one that the engine trains" if name in self._by_name else "was added"
        return f"{was}: nothing would train it"


def _frozen_or_thawed(name: str, trains: bool) -> str:
    if trains:
        return (
            f"parameter {name} was frozen after the engine was built: weight decay and momentum would go on moving it. "
            "Set requires_grad_(True) again; to freeze it, build the model anew with engine.full_weights(), freeze it "
            "there, and build an engine on that"
        )
    return (
        f"parameter {name} was frozen when the engine was built and is not now: it has no master, and nothing would "
        "train it. Build the engine with it trainable; lr_factor=0.0 of a ParamGroup keeps a parameter as it is"
    )
