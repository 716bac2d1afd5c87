"""Half parameters that have memory while a unit computes with them.

While the unit before it computes, a unit's parameters are cast from the ranks' masters and gathered, once for forward
and once for backward. They are freed after the unit. The last unit of a forward keeps them for the backward.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megamix.base.clock import Clock
from megamix.base.names import plain_name
from megamix.comm.collectives import Collectives, noting
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.guards.unseen_writes import UnseenWrites
from megamix.mixed_precision.observer import StepObserver
from megamix.mixed_precision.unit_hooks import (
    OfModule,
    OneThread,
    on_gradient,
    on_reads,
    refuse_transforms,
    tensors_in,
)

log = logging.getLogger("megamix")

FORWARD = 1 << 32  # turns reserved for one forward of the model and for calls of units after it


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters whose memory comes and goes together: those of one module, those of several small neighbours, or those
    of the root, which belong to no other unit alone.
    """

    buckets: list[Bucket]
    members: list[Member] = field(default_factory=list)  # in the order in which a forward calls them
    begun: bool = False  # True: the pass has come to this unit
    inside: int = 0  # number of members' forwards under way
    # Members whose backward in this step may still come. For each member: the turns in which its first forwards began,
    # by the number of the model's forward. {0: 0}: only this backward pass has called the member.
    due: dict[Member, dict[int, int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        first, last = self.members[0].name, self.members[-1].name
        return first if first == last else f"{first} to {last}"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Member:
    """A module of `Sharding.units`, or the model. Hooks hold it weakly, because its unit holds the buckets."""

    name: str
    param_names: list[str]
    storages: set[int]  # storages of its unit's half parameters


class UnitGather:
    """Gathers each unit once in a forward of the model, in registration order, and once in a backward pass, in reverse
    order.

    Skipped units are gathered, too, so that ranks which skip different units issue the same gathers.
    A forward begins with the gathers of its first two units, a backward with that of its first one. The pre-hook of a
    unit's first module launches the next unit's gather and awaits its own. The hook after the last module's forward
    frees the unit; if that module is not called, the pre-hook of the next unit frees it. In backward the gradient of a
    module's output takes the role of a pre-hook. A unit is freed once the pass is at another unit and no gradient of
    the freed unit can come any more. Gradients that have not come by then count as zeros, so that each rank starts a
    unit's sum between the same two gathers. Otherwise one rank would wait in a sum for a rank that waits in a gather.
    Two units have memory at a time. The root and the last unit of a forward stay for the backward, which begins with
    that unit. A unit that is called again, out of order, or outside of the model's forward is gathered when it is
    called; all ranks must call it then.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[nn.Module], overlap: bool, buckets: Sequence[Bucket],
        owners: Collectives, grads: GradReduce, unseen_writes: UnseenWrites, clock: Clock,
        observers: Sequence[StepObserver],
    ):  # fmt: skip
        """Hook the units. `owners`: the ranks that call them together."""
        self._overlap = overlap
        self._owners = owners
        self._grads = grads
        self._unseen_writes = unseen_writes
        self._clock = clock
        self._observers = observers
        by_number: dict[int, Unit] = {0: Unit([])}
        # Buckets lie in reverse registration order, and a forward needs the last one first.
        for bucket in reversed(buckets):
            by_number.setdefault(bucket.plan.unit, Unit([])).buckets.append(bucket)
        self._units = [by_number[number] for number in sorted(by_number)]
        self._root = self._units[0]
        self.order = [bucket for unit in self._units for bucket in unit.buckets]
        self._unit_of: dict[Member, Unit] = {}
        self._member_of: dict[nn.Parameter, Member] = {}
        self._hook(model, units)
        if owners.axis.ranks[owners.axis.rank] == 0:
            _warn_of_rest(buckets, [member.name for unit in self._units[1:] for member in unit.members])
        self._writes = 0  # number of writes to the masters, counted for all ranks
        self._live: dict[Unit, None] = {}  # units whose gathers are under way or have landed
        self._pass: Sequence[Unit] = ()  # units of the current pass, in its order
        self._place: dict[Unit, int] = {}  # position of each unit in the pass
        self._at = 0  # position that the pass has reached
        self._launched = 0  # number of the pass's units whose gathers are launched
        # Counts the beginnings and ends of members' forwards. A forward of the model starts at a multiple of FORWARD.
        self._turn = FORWARD
        self._reached = math.inf  # turn that the backward pass has reached; forwards that began later are done
        self._differentiated = set[int]()  # numbers of the model's forwards whose backward passes are over
        self._in_pass = set[int]()  # numbers of the forwards that this backward pass has come to
        self._kept: Sequence[Unit] = ()  # units that stay after this pass, for the next one
        self._in_backward = False
        self.is_whole = False
        self._thread = OneThread()

    def _hook(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        """Make each module a member of the unit that is gathered for it. A module without parameters of its own, such
        as a tied embedding, is in no unit.
        """
        paths = {module: plain_name(path) for path, module in model.named_modules()}
        own = {
            param: (name, unit)
            for unit in self._units[1:]
            for bucket in unit.buckets
            for name, param in bucket.named_params.items()
        }
        hooked = {model: Member("the model outside its units", [], set())}
        self._unit_of[hooked[model]] = self._root
        for module in units:
            params = [param for param in module.parameters() if param in own]
            if params:
                _, unit = own[params[0]]
                storages = {bucket.params.untyped_storage()._cdata for bucket in unit.buckets}
                member = Member(paths[module], [own[param][0] for param in params], storages)
                hooked[module] = member
                self._unit_of[member] = unit
                self._member_of |= dict.fromkeys(params, member)
        for module, member in hooked.items():
            self._unit_of[member].members.append(member)
            # Before the user's own hooks, which may read parameters.
            module.register_forward_pre_hook(OfModule(self.before_forward, member), prepend=True)
            module.register_forward_hook(OfModule(self.after_forward, member))

    def updated(self, bucket: Bucket) -> None:
        """Send nothing: the next gather of the bucket casts its masters."""

    def wait_all(self) -> None:
        """Return once no gather is under way. Free nothing: units kept for the next pass stay. So a rank may call this
        alone: in the next pass it still issues the same gathers as the others.
        """
        for unit in [*self._live]:
            self._await(unit)

    def release(self) -> None:
        """Finish all gathers and free all parameters, unless inside `whole`. Every rank must call it."""
        if not self.is_whole:
            self._end()
            self._drop()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give all parameters memory and values inside the block."""
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
        """Free all parameters, because the masters are about to be written. Every rank must call it."""
        self.release()
        self._writes += 1

    @contextmanager
    def backward_pass(self, grads: AbstractContextManager[None], loss: Tensor | None) -> Iterator[None]:
        """Gather units for a backward pass of the model, inside `grads`, which collects its gradients."""
        self._thread.enter("engine.backward", self._in_backward, stays=True)
        if loss is not None:
            for member in on_reads(self, self._member_of, loss):
                self._unit_of[member].due.setdefault(member, {})[0] = 0
        self._end()  # ends a pass that failed here, but that other ranks may have finished
        self._in_backward = True
        self._reached = math.inf
        try:
            self._begin(self._units[:0:-1], kept=[self._root])
            with grads:
                yield
            self._end()
            self._free(self._units[1:])
        finally:
            self._thread.leave()
            self._forget_passed()
            self._in_backward = False  # the next pass gathers the units that a failed pass has left

    def before_forward(self, member: Member, *_: object) -> None:
        unit = self._unit_of[member]
        if not self.is_whole:
            refuse_transforms(member.name)
            self._thread.enter(member.name, self._in_backward, stays=unit is self._root and not self._in_backward)
        if unit is self._root:
            if not self._in_backward:
                self._turn += FORWARD - self._turn % FORWARD
                self._end()
                # Frees the root, too, so that all ranks gather it: after an evaluation without gradients a rank has
                # already freed its own.
                self._free(self._units)
                kept = [self._root, *self._units[1:][-1:]]
                unit.inside = 1
                self._begin(self._units[1:], kept if torch.is_grad_enabled() else ())
            return
        if self._in_backward:
            unit.due.setdefault(member, {0: 0})
        elif torch.is_grad_enabled():
            self._turn += 1
            unit.due.setdefault(member, {}).setdefault(self._turn // FORWARD, self._turn)
        self._come_to(unit)
        unit.inside += not self._in_backward

    def after_forward(self, member: Member, module: nn.Module, output: object) -> None:
        if self._in_backward:  # a forward repeated by recompute
            return
        unit = self._unit_of[member]
        if unit is self._root:
            unit.inside = 0
            self._end()
            self._thread.leave()
            return
        given = [*tensors_in(output)]
        if not self.is_whole:
            _refuse_views(member, given)
        unit.inside = max(0, unit.inside - 1)
        if member is unit.members[-1] and self._is_over(unit):
            self._free([unit])
        if torch.is_grad_enabled():
            self._turn += 1
            on_gradient(self, member, self._turn, given)

    def before_backward(self, member: Member, turn: float) -> None:
        """Gather a member's weights before the backward of its outputs of this turn, or, if `turn` is infinite, before
        the backward of another operation that reads the weights.

        Autograd differentiates later operations first, so forwards that began in a later turn are done.
        """
        if not (self._in_backward or self.is_whole):
            raise RuntimeError(
                f"{member.name} is differentiated outside of engine.backward(loss), where its weights have no memory: "
                "call engine.backward(loss), or do forward and backward inside `with engine.whole_parameters():`"
            )
        unit = self._unit_of[member]
        unit.due.setdefault(member, {0: 0})
        self._reached = min(self._reached, turn)
        if math.isfinite(turn):
            self._in_pass.add(int(turn) // FORWARD)
            self._differentiated -= self._in_pass
        self._come_to(unit)

    def _begin(self, order: Sequence[Unit], kept: Sequence[Unit]) -> None:
        self._pass, self._kept = order, kept
        self._place = {unit: place for place, unit in enumerate(order)}
        self._at = -1
        self._launched = sum(unit in self._live for unit in order)  # 1 in backward: the unit that the forward has kept
        for unit in order:
            unit.begun = False
            unit.inside = 0
        self._launch(self._root)
        if self._overlap:
            # One unit for a backward: the loss still has its memory then, and leaves little time to overlap.
            self._advance(1 if self._in_backward else 2)
        self._await(self._root)

    def _end(self) -> None:
        """End the pass: gather the units that this rank has skipped, since other ranks may have called them."""
        self._go_to(len(self._pass))
        self._pass = ()
        self._place = {}
        if not self._in_backward:
            self._free(unit for unit in self._units if unit not in self._kept)

    def _drop(self) -> None:
        self._kept = ()
        self._thread.leave()
        self._free(self._units)
        self._differentiated.clear()
        for unit in self._units:
            unit.due.clear()

    def _advance(self, to: int) -> None:
        """Launch the gathers of the pass's first `to` units that are not launched yet."""
        while self._launched < min(to, len(self._pass)):
            self._launch(self._pass[self._launched])
            self._launched += 1

    def _go_to(self, place: int) -> None:
        """Move the pass on to the unit at `place`. Units skipped on the way are gathered, too, as on other ranks."""
        for at in range(min(self._at + 1, place), place + 1):
            self._leave([unit for unit in self._live if self._place.get(unit, at) < at])
            self._advance(at + 1 + self._overlap)
        self._at = max(self._at, place)

    def _leave(self, units: Iterable[Unit]) -> None:
        """Free those of `units` that this pass no longer needs; in backward, first complete the gradients of their
        buckets, so that their sums can start.
        """
        for unit in units:
            if self._is_over(unit):
                if self._in_backward:
                    self._grads.complete(unit.buckets)
                self._free([unit])

    def _come_to(self, unit: Unit) -> None:
        if unit.begun:
            return
        if unit in self._place:
            self._go_to(self._place[unit])
        else:
            self._leave([*self._live])
        if unit not in self._live:
            self._meet_out_of_turn(unit)
        self._await(unit)
        unit.begun = True

    def _is_over(self, unit: Unit) -> bool:
        """Return whether a pass that is past a unit needs the unit no more. A checkpoint around several units begins
        all of them before the first one ends.
        """
        if unit in self._kept or unit.inside:
            return False
        return not self._in_backward or all(
            self._is_done(turns) or all(map(self._grads.has_gradient, member.param_names))
            for member, turns in unit.due.items()
        )

    def _is_done(self, turns: Mapping[int, int]) -> bool:
        """Return whether this backward pass is past all forwards that began in these turns. Forwards of earlier
        micro-batches are not in its graph.
        """
        return all(began > self._reached for forward, began in turns.items() if forward not in self._differentiated)

    def _forget_passed(self) -> None:
        self._differentiated |= self._in_pass
        self._in_pass.clear()
        for unit in self._units:
            for member in [*unit.due]:
                unit.due[member].pop(0, None)
                if not unit.due[member]:
                    del unit.due[member]

    def _meet_out_of_turn(self, unit: Unit) -> None:
        """Wait until all ranks have launched the same number of the pass's gathers. All of them must call this unit
        now: on NCCL gathers match by order of issue.

        Raises: RuntimeError if another rank calls another unit.
        """
        mine = torch.tensor([self._units.index(unit), self._launched], device=unit.buckets[0].master.device)
        with noting(_gathering(unit)):
            # With a number, because a rank that does not come here goes on to its sums, and those must not be taken for
            # its answer.
            places, launched = self._owners.gather(mine, self._number(0)).T.tolist()
        if others := {self._units[place].name for place in places} - {unit.name}:
            raise RuntimeError(
                f"unit {unit.name} is called out of turn here, but {', '.join(sorted(others))} on another rank: calls "
                "of units that are repeated, or in another order than registered, must be the same on every rank"
            )
        self._advance(max(launched))

    def _launch(self, unit: Unit) -> None:
        if unit in self._live or self.is_whole:
            return
        self._live[unit] = None
        for bucket in unit.buckets:
            bucket.allocate_params()
            bucket.cast_shown()
            pending = bucket.launch_gather(self._number(bucket.place), _gathering(unit))
            for observer in self._observers:
                observer.on_transfer("all_gather", bucket, pending)

    def _number(self, place: int) -> int:
        """Return a gather's number, from the bucket's place and the number of writes. Ranks at different units or
        values then wait for each other instead of mixing them up.
        """
        return place + (self._writes << 20)

    def _await(self, unit: Unit) -> None:
        """Launch the unit's gather unless it is launched; return once its parameters may be read."""
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
            if unit in self._live:
                self._await(unit)  # a gather under way still writes this memory
                self._unseen_writes.look_if_due(unit.buckets)
                for bucket in unit.buckets:
                    bucket.free_params()
                del self._live[unit]
            unit.begun = False


def _gathering(unit: Unit) -> str:
    return (
        f"while the weights of {unit.name} were gathered: every rank must call the model, its units and their backward "
        "equally often, and finish each call"
    )


def _warn_of_rest(buckets: Sequence[Bucket], units: Sequence[str]) -> None:
    """Log the share of the model that is in no unit, judged by the units' paths, if it is over a quarter. Parameters
    with several names, such as a tied table, are not counted: they can be in none.
    """
    specs = [slot.spec for bucket in buckets for slot in bucket.plan.slots]
    inside = tuple(f"{unit}." for unit in units)
    rest = [spec for spec in specs if not (spec.aliases or spec.name.startswith(inside))]
    left = sum(spec.numel for spec in rest)
    whole = sum(spec.numel for spec in specs)
    if left > whole / 4:
        log.warning(
            'shard = "parameters": %d of %d parameters, such as %s, are in none of `units`, so every rank holds them '
            "from a forward to the end of its backward. Add the modules that hold them to `units`; a parameter that is "
            "read outside of its module, such as a tied table, cannot be in one",
            left, whole, rest[-1].name,
        )  # fmt: skip


def _refuse_views(member: Member, given: Iterable[Tensor]) -> None:
    """Refuse outputs of a module that are parameters of its unit or views of them. Raises: RuntimeError naming the
    module.
    """
    for tensor in given:
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata in member.storages:
            raise RuntimeError(
                f"{member.name} returns a parameter or a view of one, which has no memory after its forward: return a "
                "copy, as tensor.clone(), or leave it out of `units`"
            )
