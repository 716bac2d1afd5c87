"""Half parameters that live as long as a unit computes with them: gathered from the ranks' shards for its forward and
again for its backward, the next unit's beside it, and freed behind it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megamix.clock import Clock
from megamix.comm.collectives import Collectives, Pending
from megamix.mixed_precision.flat_buffers import FlatBuffers, PassingBuffers
from megamix.mixed_precision.half_params import HalfParams
from megamix.mixed_precision.param_gather import ParamGather
from megamix.mixed_precision.passing_params import PassingHalfParams
from megamix.mixed_precision.settings import Shard


@dataclass(slots=True, eq=False)
class _Unit:
    name: str
    buckets: list[int]
    params: list[str]
    live: bool = False  # its gathers are under way, or have landed
    begun: bool = False  # the pass has come to it
    called: bool = False  # by a forward whose backward is still to come


class UnitGather:
    """Gathers each unit once in a forward of the model, in registration order, and once in a backward pass, in the
    reverse one, whether it is called or not: so ranks that skip different units issue the same gathers.

    A unit's pre-hook awaits its gather and launches the next unit's; its hook behind forward frees it. In backward the
    gradient of its output does what the pre-hook does, and a unit is freed when all its gradients have come and the
    pass is at another one. Two units have memory at a time, and the root, the parameters that no unit has alone, from
    the first forward of a step to its end. A unit that is called again, earlier than the order says, or outside of the
    model's forward is gathered when it is called, if all ranks call it.
    `came(parameter)`: its gradient has come in this backward pass.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[nn.Module], half_params: PassingHalfParams,
        collectives: Sequence[Collectives], overlap: bool, clock: Clock, came: Callable[[str], bool],
    ):  # fmt: skip
        self._half_params, self._collectives, self._overlap, self._clock = half_params, collectives, overlap, clock
        self._came, self.pending = came, dict[int, Pending]()
        paths = {id(module): path for path, module in model.named_modules()}
        names = ["the model outside its units", *(paths[id(unit)] for unit in units)]
        self._units = [_Unit(name, [], []) for name in names]
        for bucket in reversed(range(len(half_params.layout.buckets))):
            unit = self._units[half_params.layout.buckets[bucket].unit]
            unit.buckets.append(bucket)
            unit.params += [slot.spec.name for slot in half_params.layout.buckets[bucket].slots]
        self._root = self._units[0]
        self.order_of_need = [bucket for unit in self._units for bucket in unit.buckets]
        self._to_come: deque[_Unit] = deque()  # not yet launched in this pass
        self._in_backward = self._is_whole = False
        self._keeps_root = True  # behind the forward, for its backward
        # Never traced, as in ParamGather.
        self.run = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]  # no types
        for number, module in enumerate([model, *units]):
            # In front of the user's own, which may read parameters.
            module.register_forward_pre_hook(_Hook(self, "before_forward", number), prepend=True)
            module.register_forward_hook(_Hook(self, "after_forward", number))

    def launch(self, bucket: int) -> None:
        """Send nothing: who next computes with the bucket's parameters gathers them."""

    def publish(self, masters: Sequence[Tensor]) -> None:
        """Cast every bucket's master shard into this rank's half shard."""
        for bucket, master in enumerate(masters):
            self._half_params.shards[bucket].copy_(master)

    def wait_all(self) -> None:
        """Return once no parameter has memory, nor is under way, unless all shall have it."""
        if not self._is_whole:
            self._end()
            self._free(self._units)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let all parameters be there inside."""
        if self._is_whole:
            yield
            return
        self.wait_all()
        try:
            for unit in self._units:
                self._launch(unit)
                self._await(unit)
            self._is_whole = True
            yield
        finally:
            self._is_whole = False
            self._free(self._units)

    def leave(self, call: str) -> None:
        """Free all, since `call` is about to write the shards. Raises: RuntimeError inside `whole`."""
        if self._is_whole:
            raise RuntimeError(f"{call} inside engine.whole_parameters(): end the block first")
        self.wait_all()

    @contextmanager
    def backward_pass(self, grads: AbstractContextManager[None]) -> Iterator[None]:
        """Gather for a backward pass of the model, inside `grads`, which takes its gradients."""
        self._begin(reversed(self._units[1:]))
        self._in_backward = True
        try:
            self._await(self._root)
            with grads:
                yield
            self._end()
        finally:
            self._to_come.clear()
            self._free(self._units[1:])
            self._in_backward = False

    def before_forward(self, number: int, *_: object) -> None:
        unit = self._units[number]
        if not self._is_whole and torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(
                f"{unit.name} is called within a transform of torch.func (vmap, grad), which cannot take gathers. Take "
                'shard = "gradients", or do so inside `with engine.whole_parameters():`'
            )
        if unit is self._root:
            if not self._in_backward:
                self._begin(self._units[1:])
                self._keeps_root = torch.is_grad_enabled()
            self._await(unit)
        else:
            unit.called = unit.called or (torch.is_grad_enabled() and not self._in_backward)
            self._come_to(unit)

    def after_forward(self, number: int, module: nn.Module, output: object) -> None:
        unit = self._units[number]
        if self._in_backward:  # a forward that recompute repeats
            return
        if unit is self._root:
            self._end()
            return
        self._free([unit])
        if torch.is_grad_enabled():
            for node in _nodes([output, _attributes(module)]):
                if _OnGrad not in node.metadata:  # else another unit has given it, or an earlier forward
                    node.metadata[_OnGrad] = node.register_prehook(_OnGrad(self, unit))

    def come_to_backward(self, unit: _Unit) -> None:
        if not (self._in_backward or self._is_whole):
            raise RuntimeError(
                f"{unit.name} is differentiated outside of engine.backward(loss), where its weights have no memory. "
                'Take shard = "gradients", or do forward and backward inside `with engine.whole_parameters():`'
            )
        self._come_to(unit)

    def _begin(self, units: Iterable[_Unit]) -> None:
        self._end()  # a forward that failed: other ranks may have come to its end
        self._to_come = deque(units)

    def _end(self) -> None:
        """Gather what other ranks may have called, and this one has not."""
        while self._to_come:
            self._launch(skipped := self._to_come.popleft())
            self._free([skipped])
        if not self._in_backward:
            self._free(self._units[1:] if self._keeps_root else self._units)

    def _come_to(self, unit: _Unit) -> None:
        if unit.begun:
            return
        self._free(other for other in self._units[1:] if other is not unit and self._is_over(other))
        while not unit.live and unit in self._to_come:
            self._launch(skipped := self._to_come.popleft())
            if skipped is not unit and self._is_over(skipped):
                self._free([skipped])
        if not unit.live:
            self._require_all_here(unit)
        self._await(unit)
        unit.begun = True
        if self._overlap and self._to_come:
            self._launch(self._to_come.popleft())

    def _is_over(self, unit: _Unit) -> bool:
        """Whether the pass is through with a unit, or past it. A checkpoint of several begins all before one ends."""
        return not (self._in_backward and (unit.begun or unit.called)) or all(map(self._came, unit.params))

    def _require_all_here(self, unit: _Unit) -> None:
        """Raises: RuntimeError if another rank calls another unit out of turn: each would get the other's weights."""
        for among in dict.fromkeys(self._collectives[bucket] for bucket in unit.buckets):
            mine = torch.full_like(self._half_params.shards[0][:1], self._units.index(unit), dtype=torch.float64)
            with self._named(unit):
                others = {self._units[int(other)].name for other in among.table(mine).view(-1).tolist()} - {unit.name}
            if others:
                raise RuntimeError(
                    f"unit {unit.name} is called out of turn here, {', '.join(sorted(others))} on another rank: what "
                    "is called twice, or in another order than registered, must be so on every rank"
                )

    def _launch(self, unit: _Unit) -> None:
        if unit.live or self._is_whole:
            return
        unit.live = True
        for bucket in unit.buckets:
            flat, among = self._half_params.flat[bucket], self._collectives[bucket]
            self._half_params.take(bucket)
            own = among.own_part(flat)
            own.copy_(self._half_params.shards[bucket])
            self.pending[bucket] = among.all_gather(flat, own)
            self._clock.watch("all_gather", bucket, self.pending[bucket])

    def _await(self, unit: _Unit) -> None:
        self._launch(unit)
        for bucket in unit.buckets:
            if (pending := self.pending.pop(bucket, None)) is not None:
                with self._clock.span("exposed_all_gather"), self._named(unit):
                    pending.wait()
                self._half_params.show(bucket)

    def _free(self, units: Iterable[_Unit]) -> None:
        if self._is_whole:
            return
        for unit in units:
            if unit.live:
                for bucket in unit.buckets:
                    if (pending := self.pending.pop(bucket, None)) is not None:
                        with self._named(unit):
                            pending.wait()
                    self._half_params.free(bucket)
            unit.live = unit.begun = False
            unit.called = unit.called and not self._in_backward

    @contextmanager
    def _named(self, unit: _Unit) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            error.add_note(
                f"while the weights of {unit.name} were gathered: every rank must call the model, its units and their "
                "backward as often, and end all of it or none"
            )
            raise


def _run(gather: UnitGather, method: str, number: int, module: nn.Module, output: object) -> None:
    getattr(gather, method)(number, module, output)


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


class _Hook:
    """The hook of a module. It holds the gathers weakly, as ParamGather's; in a copy or a pickle it does nothing."""

    def __init__(self, gather: UnitGather | None = None, method: str = "", number: int = 0):
        self._gather = (lambda: None) if gather is None else weakref.ref(gather)
        self._method, self._number = method, number

    def __call__(self, module: nn.Module, args: object, output: object = None) -> None:
        if (gather := self._gather()) is not None:
            gather.run(gather, self._method, self._number, module, output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class _OnGrad:
    """The hook of a node whose result a unit has given: its gradient is there, so the unit's backward begins."""

    def __init__(self, gather: UnitGather, unit: _Unit):
        self._gather, self._unit = weakref.ref(gather), unit

    def __call__(self, grads: object) -> None:
        if (gather := self._gather()) is not None:
            gather.come_to_backward(self._unit)


# By `Sharding.shard`: what holds the half parameters, the gradients' memory, and who launches the gathers.
LIVES: dict[Shard, tuple[type[HalfParams], type[FlatBuffers], Callable[..., ParamGather | UnitGather]]] = {
    "states": (HalfParams, FlatBuffers, ParamGather),
    "gradients": (HalfParams, PassingBuffers, ParamGather),
    "parameters": (PassingHalfParams, PassingBuffers, UnitGather),
}
