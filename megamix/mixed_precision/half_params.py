"""The working copy: one flat half-precision buffer per bucket; the module's own Parameters are views into it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.host import gather_json
from megamix.comm.topology import Axis, Topology
from megamix.mixed_precision.flat_layout import FlatLayout, ParamSpec
from megamix.mixed_precision.optimizers import Optimizer, UpdateGroup
from megamix.mixed_precision.settings import Placement, Sharding
from megamix.names import by_plain_name, plain_name, prefix_of

SAVED_DTYPES = (  # what a checkpoint holds
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
log = logging.getLogger("megamix")

_REQUIRES_GRAD = attrgetter("requires_grad")


def single_device(model: nn.Module) -> torch.device:
    """Return where the model lies; one without a tensor anywhere. Raises: ValueError if on more than one device."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise ValueError(
            f"the model must lie on one device, found {sorted(map(str, devices))}; call model.to(device) first"
        )
    return devices.pop() if devices else torch.device("cpu")


class _Span(NamedTuple):
    """The memory of a tensor: addresses of its first byte and behind its last one."""

    start: int
    end: int
    name: str
    tensor: Tensor


def refuse_shared_elements(model: nn.Module) -> None:
    """Raises: ValueError naming two tensors of the model that share elements, of which at least one is trained. What is
    expanded has no values of its own.
    """
    spans = list[_Span]()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and tensor.layout == torch.strided and 0 not in tensor.stride():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append(_Span(start, start + (reach + 1) * tensor.itemsize, name, tensor))
    near = list[_Span]()  # those that reach the next one
    for span in sorted(spans, key=attrgetter("start")):
        near = [other for other in near if other.end > span.start]
        for other in near:
            if (other.tensor.requires_grad or span.tensor.requires_grad) and _share_elements(other, span):
                both = " and ".join(sorted((plain_name(other.name), plain_name(span.name))))
                raise ValueError(
                    f"{both} share elements, and the engine would train them apart: make them one Parameter: "
                    "module.weight = other.weight; or let them be two: nn.Parameter(other.weight.detach().clone())"
                )
        near.append(span)


def _share_elements(first: _Span, second: _Span) -> bool:
    """Return whether they do: slices of one matrix may lie between each other. `second` begins not before `first`."""
    one, other = first.tensor, second.tensor
    apart, rest = divmod(second.start - first.start, one.itemsize)
    if rest or one.itemsize != other.itemsize:
        return True
    taken = torch.zeros((max(first.end, second.end) - first.start) // one.itemsize, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), apart).any())


def describe_params(
    model: nn.Module, optimizer: Optimizer, topology: Topology, sharding: Sharding
) -> tuple[list[ParamSpec], list[UpdateGroup], list[Axis]]:
    """Return specs of this rank's trainable parameters in registration order, the optimizer groups and the axes of
    owners that their numbers mean.

    A shared parameter is described once, under its first name; frozen and empty parameters are not described.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in by_plain_name(model.named_parameters(remove_duplicate=False)).items():
        if param.requires_grad and param.numel():
            names.setdefault(param, []).append(name)
        elif param.numel() and topology.tp.size * topology.pp.size > 1:
            raise ValueError(
                f"parameter {name} is frozen, but ranks that divide the model must train every parameter: the parts of "
                "a frozen one are unknown; give it a group with lr_factor=0, or let every rank hold the model"
            )
    placements = by_plain_name(sharding.placements.items())
    groups: dict[UpdateGroup, int] = {}
    axes = {topology.owners: 0}
    specs = []
    for param, (name, *aliases) in names.items():
        if not param.is_floating_point():
            raise ValueError(
                f"parameter {name} is {param.dtype}; the engine trains real floating-point parameters only"
            )
        shape = tuple(param.shape)
        at = placements.get(name) or Placement(shape, (0,) * len(shape), topology.owners)
        group = groups.setdefault(optimizer.group_of(name, at.full_shape), len(groups))
        axis = axes.setdefault(at.owners, len(axes))
        spec = ParamSpec.whole(name, shape, group, tuple(aliases))
        spec = replace(spec, matrices=optimizer.matrices(name, at.full_shape))
        specs.append(replace(spec, full_shape=at.full_shape, offset=at.offset, axis=axis, counts=at.counts))
    if sharding.shard == "parameters":
        specs = _with_units(specs, model, sharding.units)
    return specs, list(groups), list(axes)


def _with_units(specs: Sequence[ParamSpec], model: nn.Module, units: Sequence[nn.Module]) -> list[ParamSpec]:
    """Return the specs with the numbers of their units, 1 for the first; 0 for what belongs to the root: parameters
    that no unit has alone, and those of other owners than the data-parallel ranks, which lie together.

    Raises: ValueError if a unit is inside another one.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(prefix_of(path))
    for unit in units:
        if any(other is not unit and other in units for other in unit.modules()):
            raise ValueError(f"units must not lie in each other, but a {type(unit).__name__} holds another one")
    numbered = []
    for spec in specs:
        # By its names: what two units share is one module, with a name in each.
        names = (spec.name, *spec.aliases)
        of = (k for k, unit in enumerate(units, start=1) if all(name.startswith(tuple(paths[unit])) for name in names))
        numbered.append(replace(spec, unit=0 if spec.axis else next(of, 0)))
    return numbered


class Entry(NamedTuple):
    """A trained parameter of the model that all ranks hold together, or a buffer that its state_dict has: equal on all
    ranks of its stage, or the first one's counts.
    """

    name: str
    full_shape: tuple[int, ...]
    dtype: str  # as torch prints it; of a parameter its master's
    stage: int  # the first of the pipeline that has it
    aliases: tuple[str, ...] = ()


def describe_whole(model: nn.Module, specs: Sequence[ParamSpec], topology: Topology) -> tuple[list[Entry], list[Entry]]:
    """Return (parameters, buffers) of the model that all ranks train, from what this one trains of it, stage by stage.
    Every rank must call it. Raises: ValueError naming a buffer that cannot be saved.
    """
    persistent, stage = {*map(plain_name, model.state_dict())}, topology.pp.rank
    params = [Entry(spec.name, spec.full_shape, str(torch.float32), stage, spec.aliases) for spec in specs]
    buffers = [
        Entry(name, tuple(buffer.shape), str(buffer.dtype), stage)
        for name, buffer in by_plain_name(model.named_buffers(remove_duplicate=False)).items()
        if name in persistent and buffer.numel()
    ]
    for buffer in buffers:
        if buffer.dtype not in map(str, SAVED_DTYPES):
            raise ValueError(
                f"buffer {buffer.name} is {buffer.dtype}, which no checkpoint holds; keep it out of the state_dict by "
                "module.register_buffer(..., persistent=False)"
            )
    device = single_device(model)
    pp = make_collectives(topology.pp, device)
    params, buffers = map(_each_once, zip(*gather_json(pp, (params, buffers), device), strict=True))
    return params, buffers


def _each_once(by_stage: Iterable[list[Any]]) -> list[Entry]:
    found: dict[str, Entry] = {}
    for name, full_shape, dtype, stage, aliases in chain.from_iterable(by_stage):  # one may be held by two stages
        found.setdefault(name, Entry(name, tuple(full_shape), dtype, stage, tuple(aliases)))
    return list(found.values())


def without_values(model: nn.Module, device: torch.device) -> None:
    """Give each trainable parameter its place on `device` without memory for its values, for an engine with `fill`.
    What is shared stays so; what is frozen, and buffers, are left as they are.
    """
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in [*model.named_parameters(remove_duplicate=False)]:
        if param.requires_grad:
            if param not in empty:
                element = torch.zeros((), dtype=param.dtype, device=device)
                empty[param] = nn.Parameter(element.expand(param.shape))
            put_parameter(model, name, empty[param])


def put_parameter(model: nn.Module, name: str, param: nn.Parameter) -> None:
    """Let the model have this parameter under that name."""
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, param)


class ModuleGuard:
    """Sees that the module keeps the parameters with which the engine was built, each under its names, no more and no
    fewer.

    Modules may come and go, and be wrapped by what `by_plain_name` knows, as long as that is so.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._names = {param: name for name, param in by_plain_name(model.named_parameters()).items()}
        self._by_name = by_plain_name(model.named_parameters(remove_duplicate=False))
        self._trains = [param.requires_grad for param in self._names]
        self._note_parts()
        self._told_of_compile = False
        self._tell_of_compile()

    def _note_parts(self) -> None:
        self._modules = [*self._model.modules()]  # held, so that none of their ids is given to another
        self._parts = [part.values() for module in self._modules for part in (module._parameters, module._modules)]
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        # By id: tensors would be compared by their elements. Twice a step, 0.2 us for each module.
        return [*map(id, chain.from_iterable(self._parts))]

    def check(self) -> None:
        """Raise RuntimeError if a parameter was added, replaced, renamed, taken out, frozen or thawed."""
        if self._ids_now() != self._ids:
            self._compare()
            self._note_parts()
        self._tell_of_compile()
        if [*map(_REQUIRES_GRAD, self._names)] != self._trains:
            for (param, name), trains in zip(self._names.items(), self._trains, strict=True):
                if param.requires_grad != trains:
                    raise RuntimeError(_frozen_or_thawed(name, trains))

    def _tell_of_compile(self) -> None:
        # By name: to import the compiler takes seconds.
        is_compiled = self._model._compiled_call_impl is not None or type(self._model).__name__ == "OptimizedModule"
        if is_compiled and not self._told_of_compile:
            self._told_of_compile = True
            log.warning(
                "torch.compile stands around the whole model: its backward is one piece, so all gradients come at its "
                "end, and their sums over the ranks run beside nothing. Compile what is inside: "
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
                "would be another model's than the one that trains"
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


class HalfParams:
    """Owns the flat buffers and sees to it that the module keeps computing with them.

    `flat[k]`: half (padded_numel,) of bucket k; its padding is zero. `shards[k]`: this rank's part of it
    (shard_numel,), which the update writes. Each comes with `install`, when the module's own weights of the bucket go:
    with all of them at once a model would need 1.5 times the memory of its FP32 weights.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout, dtype: torch.dtype, device: torch.device):
        self.layout, self.dtype, self._device = layout, dtype, device
        self.params: dict[str, nn.Parameter] = by_plain_name(model.named_parameters())
        self.flat: list[Tensor] = []
        self.shards: list[Tensor] = []
        # By bucket: name, parameter, and how far its address is from the buffer's; beside it its version, as the engine
        # has left it. Both must still be true for the engine's writes to reach the module.
        self._installed: list[list[tuple[str, nn.Parameter, int]]] = []
        self._versions: list[list[int]] = []
        self._guard = ModuleGuard(model)
        # Called with a bucket whose memory goes after somebody could write there.
        self.before_free: Callable[[int], object] = lambda bucket: None

    def full_precision(self, bucket: int, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return one bucket's parameters (or this rank's blocks of full `values` by name), flat and padded: FP32
        (padded_numel,).
        """
        full = torch.zeros(self.layout.buckets[bucket].padded_numel, dtype=torch.float32, device=self._device)
        for slot in self.layout.buckets[bucket].slots:
            spec = slot.spec
            value = self.params[spec.name] if values is None else values[spec.name][spec.block]
            full[slot.start : slot.end].copy_(value.detach().reshape(-1))
        return full

    def install(self, full: Tensor, among: Collectives) -> None:
        """Let the module's Parameters of the next bucket be views into its flat buffer, which takes these values in
        half. `among`: its owners'. Shapes: full FP32 or half (padded_numel,).

        `param.data = view` and not `nn.Parameter(view)`: the view then has its own version counter, so that a gather
        which lands in the buffer during forward does not make backward refuse its saved tensors, and the user's
        references stay good.
        """
        bucket, flat = len(self.flat), full.to(self.dtype)
        self.flat.append(flat)
        self.shards.append(among.own_part(flat))
        self._installed.append([])
        self._versions.append([])
        for slot in self.layout.buckets[bucket].slots:
            param = self.params[slot.spec.name]
            param.data = flat[slot.start : slot.end].view(slot.spec.shape)
            place = param.data_ptr() - flat.data_ptr()
            self._installed[-1].append((slot.spec.name, param, place))
            self._versions[-1].append(param._version)

    def copies(self) -> list[Tensor]:
        """Return what every rank keeps between steps: of each bucket half (padded_numel,), or nothing of any."""
        return self.flat

    def take(self, bucket: int) -> None:
        """Let a bucket have memory. It has."""

    def put(self, bucket: int, full: Tensor) -> None:
        """Set a bucket's values. Shapes: full FP32 (padded_numel,)."""
        self.flat[bucket].copy_(full)

    def check(self) -> None:
        """Raise RuntimeError if a call has changed which parameters there are, broken a view, written to one or given
        it a gradient, since the engine took the module over.

        The engine itself writes through the flat buffers, which moves no parameter's own version counter, but by
        `note_written`.
        """
        with torch._C.DisableTorchFunctionSubclass():  # of what has no memory these may be asked, and fast
            self._guard.check()
            for flat, installed, versions in zip(self.flat, self._installed, self._versions, strict=True):
                self._check(flat.data_ptr(), installed, versions)

    def note_written(self) -> None:
        """Let torch refuse the backward of a graph that was made before the engine wrote the parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([param for own in self._installed for _, param, _ in own])
            # Read, not counted: parameters that were made of one tensor's views share one counter.
            self._versions = [[param._version for _, param, _ in own] for own in self._installed]

    @staticmethod
    def _check(buffer: int, installed: Sequence[tuple[str, nn.Parameter, int]], versions: Sequence[int]) -> None:
        for (name, param, place), version in zip(installed, versions, strict=True):
            if param.data_ptr() - buffer != place:
                broken = (
                    "has lost its place in the engine's buffer: .to(), .float(), load_state_dict(assign=True) or "
                    "`param.data = ...` gave it new storage. To change weights call engine.load_weights(state_dict)"
                )
            elif param._version != version:
                broken = (
                    "was written in place: load_state_dict(), an initialiser or a weight average changed the half copy "
                    "and not its FP32 master. To change weights call engine.load_weights(state_dict)"
                )
            elif param.grad is not None:
                broken = (
                    "has a .grad that is not the engine's: a backward would add to it what no loss scale and no sum "
                    "over the ranks knows. Call model.zero_grad(); to change a gradient take param.register_hook(...)"
                )
            else:
                continue
            raise RuntimeError(f"parameter {name} {broken}")
