"""Half parameters that live as long as a unit computes with them: cast from the ranks' masters and gathered for its
forward and again for its backward, the next unit's beside it, and freed behind it. The last unit's stay in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamix.clock import Clock
from megamix.comm.collectives import noting
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.observer import StepObserver
from megamix.mixed_precision.unit_hooks import OfModule, OneThread, on_gradient, on_reads, refuse_transforms, tensors_in
from megamix.mixed_precision.unseen_writes import UnseenWrites
from megamix.names import plain_name

log = logging.getLogger("megamix")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Unit:
    """Parameters that come and go together. Hooks hold it weakly, for it holds the buckets."""

    name: str
    buckets: list[Bucket]
    params: dict[str, nn.Parameter]
    live: bool = False  # its gathers are under way, or have landed
    begun: bool = False  # the pass has come to it
    called: bool = False  # by a forward of this step, whose backward may be still to come


class UnitGather:
    """Gathers each unit once in a forward of the model, in registration order, and once in a backward pass, in the
    reverse one, whether it is called or not: so ranks that skip different units issue the same gathers.

    A forward begins with the gathers of its first two units, a backward with its first one's. A unit's pre-hook
    launches the next unit's and awaits its own; its hook behind forward frees it. In backward the gradient of its
    output does what the pre-hook does, and a unit is freed when all its gradients have come and the pass is at another
    one. Two units have memory at a time. The last one of a forward stays for the backward, which begins with it, and so
    does the root, the parameters that no unit has alone. A unit that is called again, earlier than the order says, or
    outside of the model's forward is gathered when it is called, if all ranks call it.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[nn.Module], overlap: bool, buckets: Sequence[Bucket],
        grads: GradReduce, unseen_writes: UnseenWrites, clock: Clock, observers: Sequence[StepObserver],
    ):  # fmt: skip
        self._overlap = overlap
        self._has_gradient = grads.has_gradient
        self._unseen_writes = unseen_writes
        self._clock = clock
        self._observers = observers
        paths = {module: plain_name(path) for path, module in model.named_modules()}
        names = ["the model outside its units", *(paths[unit] for unit in units)]
        # Buckets lie in reverse registration order, a forward needs the last one first.
        found = [Unit(name, [], {}) for name in names]
        for bucket in reversed(buckets):
            unit = found[bucket.plan.unit]
            unit.buckets.append(bucket)
            unit.params |= bucket.named_params
        self._root = found[0]
        axis = buckets[0].owners.axis
        if axis.ranks[axis.rank] == 0:
            _warn_of_rest(buckets, names[1:])
        # A unit without parameters of its own, as a tied embedding, would be a step of nothing between two gathers.
        self._units = [unit for unit in found if unit is self._root or unit.buckets]
        self.order = [bucket for unit in self._units for bucket in unit.buckets]
        self._unit_of = {param: unit for unit in self._units[1:] for param in unit.params.values()}
        self._writes = 0  # of the masters, by all ranks
        self._pass: Sequence[Unit] = ()  # the units in this pass, in its order
        self._launched = 0  # of these
        self._kept: Sequence[Unit] = ()  # behind this pass, for the next one
        self._in_backward = False
        self.is_whole = False
        self._thread = OneThread()
        for unit, module in zip(found, [model, *units], strict=True):
            if unit in self._units:
                # In front of the user's own, which may read parameters.
                module.register_forward_pre_hook(OfModule(self.before_forward, unit), prepend=True)
                module.register_forward_hook(OfModule(self.after_forward, unit))

    def updated(self, bucket: Bucket) -> None:
        """Free what the update has written: who computes with the bucket's parameters gathers the masters' casts."""
        bucket.free_params()

    def wait_all(self) -> None:
        """Return once nothing is under way. What is kept for the next pass stays: a rank that calls this alone gathers
        in that pass what the others do.
        """
        for unit in self._units:
            if unit.live:
                self._await(unit)

    def release(self) -> None:
        """Return once no parameter has memory, nor is under way, unless all shall have it. Every rank must call it."""
        if not self.is_whole:
            self._end()
            self._drop()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let all parameters be there inside."""
        if self.is_whole:
            yield
            return
        self.release()
        try:
            for unit in self._units:
                self._await(unit)
            self.is_whole = True
            yield
        finally:
            self.is_whole = False
            self._drop()

    def release_for_write(self) -> None:
        """Free all, for the masters are about to be written. Every rank must call it."""
        self.release()
        self._writes += 1

    @contextmanager
    def backward_pass(self, grads: AbstractContextManager[None], loss: Tensor | None) -> Iterator[None]:
        """Gather for a backward pass of the model, inside `grads`, which takes its gradients."""
        self._thread.enter("engine.backward", self._in_backward, stays=True)
        if loss is not None:
            on_reads(self, self._unit_of, loss)
        self._end()  # a pass that failed: other ranks may have come to its end
        self._in_backward = True
        try:
            self._begin(self._units[:0:-1], kept=[self._root])
            with grads:
                yield
            self._end()
            self._free(self._units[1:])
        finally:
            self._thread.leave()
            self._in_backward = False  # what is left of a pass that failed is gathered with the next one

    def before_forward(self, unit: Unit, *_: object) -> None:
        if not self.is_whole:
            refuse_transforms(unit.name)
            self._thread.enter(unit.name, self._in_backward, stays=unit is self._root and not self._in_backward)
        if unit is self._root:
            if not self._in_backward:
                self._end()
                self._free(self._units)  # the root, too: after an evaluation without gradients a rank has none
                kept = [self._root, *self._units[1:][-1:]]
                self._begin(self._units[1:], kept if torch.is_grad_enabled() else ())
        else:
            unit.called = unit.called or (torch.is_grad_enabled() and not self._in_backward)
            self._come_to(unit)

    def after_forward(self, unit: Unit, module: nn.Module, output: object) -> None:
        if self._in_backward:  # a forward that recompute repeats
            return
        if unit is self._root:
            self._end()
            self._thread.leave()
            return
        if not self.is_whole:
            _refuse_views(unit, tensors_in(output))
        if unit not in self._kept:
            self._free([unit])
        if torch.is_grad_enabled():
            on_gradient(self, unit, module, output)

    def before_backward(self, unit: Unit) -> None:
        if not (self._in_backward or self.is_whole):
            raise RuntimeError(
                f"{unit.name} is differentiated outside of engine.backward(loss), where its weights have no memory: "
                "call engine.backward(loss), or do forward and backward inside `with engine.whole_parameters():`"
            )
        self._come_to(unit)

    def _begin(self, order: Sequence[Unit], kept: Sequence[Unit]) -> None:
        self._pass, self._kept = order, kept
        self._launched = sum(unit.live for unit in order)  # the first one of a backward, which its forward has kept
        for unit in order:
            unit.begun = False
        self._launch(self._root)
        if self._overlap:
            # A backward begins beside the loss's last memory, of which little time is left.
            self._advance(1 if self._in_backward else 2)
        self._await(self._root)

    def _end(self) -> None:
        """Gather what other ranks may have called, and this one has not."""
        self._advance(len(self._pass), at=len(self._pass))
        self._pass = ()
        if not self._in_backward:
            self._free(unit for unit in self._units if unit not in self._kept)

    def _drop(self) -> None:
        self._kept = ()
        self._thread.leave()
        self._free(self._units)
        for unit in self._units:
            unit.called = False

    def _advance(self, to: int, at: int = 0) -> None:
        """Launch the first `to` units of the pass, as far as they are not. It is at place `at`: those in front of it
        were skipped here, and are gathered for other ranks.
        """
        while self._launched < min(to, len(self._pass)):
            self._launch(unit := self._pass[self._launched])
            if self._launched < at and self._is_over(unit):
                self._free([unit])
            self._launched += 1

    def _come_to(self, unit: Unit) -> None:
        if unit.begun:
            return
        at = self._pass.index(unit) if unit in self._pass else 0
        self._free(passed for passed in self._pass[:at] if self._is_over(passed))
        self._advance(at + 1 + self._overlap, at)
        if not unit.live:
            self._meet_out_of_turn(unit)
        self._await(unit)
        unit.begun = True

    def _is_over(self, unit: Unit) -> bool:
        """Whether a pass that is past a unit needs it no more. A checkpoint of several begins all before one ends."""
        if self._in_backward:
            return not (unit.begun or unit.called) or all(map(self._has_gradient, unit.params))
        return not (unit.begun or unit in self._kept)  # what has begun is freed behind its own forward

    def _meet_out_of_turn(self, unit: Unit) -> None:
        """Let all ranks, which call this unit now, have launched as much of the pass: on NCCL gathers match by order of
        issue. Raises: RuntimeError if another rank calls another unit.
        """
        first = unit.buckets[0]
        mine = torch.tensor([self._units.index(unit), self._launched], device=first.master.device)
        with noting(_gathering(unit)):
            # By number: a rank that does not come goes on to its sums, which must not be taken for its answer.
            places, launched = first.owners.gather(mine, self._number(0)).T.tolist()
        if others := {self._units[place].name for place in places} - {unit.name}:
            raise RuntimeError(
                f"unit {unit.name} is called out of turn here, {', '.join(sorted(others))} on another rank: what "
                "is called twice, or in another order than registered, must be so on every rank"
            )
        self._advance(max(launched))

    def _launch(self, unit: Unit) -> None:
        if unit.live or self.is_whole:
            return
        unit.live = True
        for bucket in unit.buckets:
            bucket.take_params()
            bucket.cast_master()
            pending = bucket.launch_gather(self._number(bucket.place), _gathering(unit))
            for observer in self._observers:
                observer.on_transfer("all_gather", bucket, pending)

    def _number(self, place: int) -> int:
        """Return a gather's number: ranks that are not at the same unit and values wait, where they could mix them."""
        return place + (self._writes << 20)

    def _await(self, unit: Unit) -> None:
        """Return once a unit's parameters may be read, which are gathered unless they are there."""
        self._launch(unit)
        for bucket in unit.buckets:
            if bucket.gather_pending is not None:
                with self._clock.span("exposed_all_gather"):
                    bucket.wait_for_params()
                bucket.show_params()

    def _free(self, units: Iterable[Unit]) -> None:
        if self.is_whole:
            return
        for unit in units:
            if unit.live:
                self._await(unit)  # what arrives has nowhere else to go
                self._unseen_writes.before_free(unit.buckets)
                for bucket in unit.buckets:
                    bucket.free_params()
            unit.live = unit.begun = False


def _gathering(unit: Unit) -> str:
    return (
        f"while the weights of {unit.name} were gathered: every rank must call the model, its units and their backward "
        "as often, and end all of it or none"
    )


def _warn_of_rest(buckets: Sequence[Bucket], units: Sequence[str]) -> None:
    """Log how much of the model is in no unit, by the units' paths, if that is over a quarter. What has several names,
    as a tied table, can be in none.
    """
    specs = [slot.spec for bucket in buckets for slot in bucket.plan.slots]
    inside = tuple(f"{unit}." for unit in units)
    rest = [spec for spec in specs if not (spec.aliases or spec.name.startswith(inside))]
    left = sum(spec.numel for spec in rest)
    whole = sum(spec.numel for spec in specs)
    if left > whole / 4:
        log.warning(
            'shard = "parameters": %d of %d parameters, such as %s, are in none of `units`, so every rank holds them '
            "from a forward to the end of its backward. Let the modules that hold them be units, too; what is read "
            "outside of its module, as a tied table, cannot be",
            left, whole, rest[-1].name,
        )  # fmt: skip


def _refuse_views(unit: Unit, given: Iterable[Tensor]) -> None:
    """Raises: RuntimeError if a unit has given a parameter of its buckets or a view of one."""
    own = {bucket.params.untyped_storage()._cdata for bucket in unit.buckets}
    for tensor in given:
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata in own:
            raise RuntimeError(
                f"{unit.name} returns a parameter or a view of one, which has no memory after its forward: return a "
                "copy, as tensor.clone(), or leave it out of `units`"
            )
