"""The all-gather of parameters: every rank's updated half shard travels to all ranks while the next forward already
runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import torch
from torch import nn

from megamix.base.clock import Clock
from megamix.base.names import first_few, prefix_of
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.observer import StepObserver
from megamix.mixed_precision.unit_hooks import OfModule

log = logging.getLogger("megamix")


class ParamGather:
    """Launches gathers in the order in which forward needs them, and awaits each one before its weights are read.

    With units, gathers overlap with the forward, and a pre-hook on each unit awaits them. A unit is a submodule whose
    parameters are first read inside its own forward (a transformer block). Its hook awaits every bucket that its
    subtree touches; the root awaits parameters outside all units. Hooks on smaller modules than units would fail: some
    modules read a child's weight without calling the child. The `state_dict()` of any submodule awaits all gathers.
    Code that reads in another way calls `wait_all` first.
    Without units nothing would overlap: the last `updated` of a step awaits all gathers, and every later read is right.
    """

    is_whole = False  # constant here, where parameters always have memory; `UnitGather` sets it within `whole()`

    def __init__(
        self, model: nn.Module, units: Sequence[nn.Module], overlap: bool, buckets: Sequence[Bucket],
        grads: GradReduce, clock: Clock, observers: Sequence[StepObserver],
    ):  # fmt: skip
        self._buckets = buckets
        self._overlap = overlap
        self._grads = grads
        self._clock = clock
        self._observers = observers
        self._needs = _needs(model, units, buckets)
        # The root's own buckets first, then unit by unit. The order is equal on every rank, since collectives match by
        # order of issue.
        self.order = [*dict.fromkeys(chain.from_iterable(self._needs.values()))]
        self.under_way: dict[Bucket, None] = {}  # buckets whose gather is under way, in launch order
        self._beside_forward = overlap and bool(units) and any(bucket.owners.axis.size > 1 for bucket in buckets)
        if self._beside_forward:
            # The hook is never traced: the compiler would refuse the collective or, if the whole model is compiled,
            # silently split the graph.
            for module in (model, *units):
                module.register_forward_pre_hook(_Await(self.before_forward))
        for module in model.modules():
            hook = _Await(self.before_state_dict, may_import=False)
            module.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
        self._told_of_copy = buckets[0].params.dtype == torch.float32

    def updated(self, bucket: Bucket) -> None:
        """Send this rank's updated shard of a bucket and receive the others'. After the last bucket await all gathers,
        unless they can overlap with the next forward.
        """
        pending = bucket.launch_gather()
        self.under_way.setdefault(bucket)
        for observer in self._observers:
            observer.on_transfer("all_gather", bucket, pending)
        if not self._overlap:
            self.wait([bucket])
        if bucket is self.order[-1] and not self._beside_forward:
            self.wait_all()

    def before_forward(self, given: object, module: nn.Module, output: object) -> None:
        # Without gradients `backward_pass` could not notice a read that no unit awaits, so wait for everything.
        self.wait(self._needs[module] if torch.is_grad_enabled() else [*self.under_way])

    def before_state_dict(self, *_: object) -> None:
        self.wait_all()

    @contextmanager
    def backward_pass(self, grads: AbstractContextManager[None]) -> Iterator[None]:
        """Collect the gradients of one backward pass, inside `grads`.

        Raises: RuntimeError if a gradient belongs to weights that no call has awaited.
        """
        with grads:
            yield
            names = (name for bucket in self.under_way for name in bucket.named_params)
            if early := [*filter(self._grads.has_gradient, names)]:
                raise RuntimeError(
                    f"the forward read {first_few(early, 1)} while the values "
                    "were still on their way from the other ranks: only modules in Sharding.units, called as unit(x), "
                    "wait for their weights, and the model for all others. Pass units that the model calls, unit(x) "
                    "and not unit.forward(x), such as [*model.blocks]; or call engine.wait() before each forward"
                )

    def whole(self) -> AbstractContextManager[None]:
        """Return an empty context: after the wait all parameters are whole."""
        self.wait_all()
        return nullcontext()

    def wait_all(self) -> None:
        """Return once the half parameters of the whole model may be read."""
        self.wait([*self.under_way])

    release = release_for_write = wait_all  # gathered parameters keep their memory

    def wait(self, buckets: Iterable[Bucket]) -> None:
        """Return once these half parameters may be read. On NCCL only the current stream waits, not the host."""
        for bucket in buckets:
            if bucket in self.under_way:
                self.under_way.pop(bucket)
                with self._clock.span("exposed_all_gather"):
                    bucket.wait_for_params()

    def note_copy(self) -> None:
        """Log once that a copy in half is unfit for an average of weights."""
        if not self._told_of_copy:
            log.warning(
                "the module was copied in %s. The copy is fit for evaluation. An average of weights (EMA, "
                "AveragedModel) in this dtype would lose every change below its rounding: for an average make a "
                "megamix.WeightAverage(engine, decay), or call .float() on the copy",
                self._buckets[0].params.dtype,
            )
        self._told_of_copy = True


class _Await(OfModule):
    """The hook of a module, which awaits gathers before the module's forward or state_dict."""

    def _gather(self) -> ParamGather | None:
        gather: ParamGather | None = getattr(self._method(), "__self__", None)
        return gather

    def __reduce__(self) -> tuple[type[_Await], tuple[()]]:
        """Return an empty hook for a copy or a pickle of the module, whose weights belong to no engine.

        Raises: RuntimeError while gathers are under way: the copy may already contain some of the module's weights.
        """
        gather = self._gather()
        if gather is not None and gather.under_way:
            raise RuntimeError(
                "this module's weights are still on their way from the other ranks (Sharding.units): call "
                "engine.wait() before you copy or pickle it"
            )
        return _Await, ()

    def __deepcopy__(self, memo: dict[int, object]) -> _Await:
        self.__reduce__()  # raises while gathers are under way
        if (gather := self._gather()) is not None:
            gather.note_copy()
        return _Await()


def _needs(model: nn.Module, units: Sequence[nn.Module], buckets: Sequence[Bucket]) -> dict[nn.Module, list[Bucket]]:
    """Return the buckets that must have arrived before a module runs: the root's own first, then those of the units in
    registration order.
    """
    bucket_of = {
        name: bucket
        for bucket in reversed(buckets)  # buckets lie in reverse registration order, forward needs the last one first
        for slot in bucket.plan.slots
        for name in (slot.spec.name, *slot.spec.aliases)
    }
    prefixes = {prefix_of(path): module for path, module in model.named_modules() if module in units}
    of_root = dict.fromkeys(one for name, one in bucket_of.items() if not name.startswith(tuple(prefixes)))
    needs = {model: [*of_root]}
    for prefix, module in prefixes.items():
        needs[module] = [*dict.fromkeys(one for name, one in bucket_of.items() if name.startswith(prefix))]
    return needs
