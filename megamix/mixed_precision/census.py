"""The census of a model: its parameters, their groups and axes, links to the ranks that have a part in each, and the
entries that all ranks have together.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megamix.base import constants
from megamix.base.names import by_plain_name, plain_name, prefix_of
from megamix.comm.collectives import Collectives, gather_json, make_collectives
from megamix.comm.topology import Axis, Topology
from megamix.mixed_precision.flat_layout import BucketPlan, ParamSpec
from megamix.mixed_precision.guards.refusals import require_equal
from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.mixed_precision.settings import Placement, Precision, Sharding
from megamix.mixed_precision.update_slice import UpdateGroup

log = logging.getLogger("megamix")

_LOADED = 2.0  # least load that is logged, as a multiple of the bytes of a ring's sum
SAVED_DTYPES = (  # dtypes that a checkpoint can hold
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def single_device(model: nn.Module) -> torch.device:
    """Return the model's device; the CPU for a model without tensors. Raises: ValueError if it is on
    several devices.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise ValueError(
            f"the model must lie on one device, found {sorted(map(str, devices))}; call model.to(device) first"
        )
    return devices.pop() if devices else torch.device("cpu")


class _Span(NamedTuple):
    """The memory of a tensor: the address of its first byte, and the address behind its last byte."""

    start: int
    end: int
    name: str
    tensor: Tensor


def refuse_shared_elements(model: nn.Module) -> None:
    """Refuse two tensors of the model that share elements if at least one is trained. Raises: ValueError naming them.

    Expanded tensors are not checked, since they have no values of their own.
    """
    spans = list[_Span]()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and tensor.layout == torch.strided and 0 not in tensor.stride():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append(_Span(start, start + (reach + 1) * tensor.itemsize, name, tensor))
    near = list[_Span]()  # tensors that overlap the next one
    for span in sorted(spans, key=attrgetter("start")):
        near = [other for other in near if other.end > span.start]
        for other in near:
            if (other.tensor.requires_grad or span.tensor.requires_grad) and _share_elements(other, span):
                both = " and ".join(sorted((plain_name(other.name), plain_name(span.name))))
                raise ValueError(
                    f"{both} share elements, and the engine would train each by itself: make them one Parameter, "
                    "module.weight = other.weight, or two, nn.Parameter(other.weight.detach().clone())"
                )
        near.append(span)


def _share_elements(first: _Span, second: _Span) -> bool:
    """Return whether two tensors with overlapping memory share an element. Slices of one matrix may overlap without a
    common element. `second` must not begin before `first`.
    """
    one, other = first.tensor, second.tensor
    apart, rest = divmod(second.start - first.start, one.itemsize)
    if rest or one.itemsize != other.itemsize:
        return True
    taken = torch.zeros((max(first.end, second.end) - first.start) // one.itemsize, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), apart).any())


@dataclass(frozen=True, slots=True)
class Census:
    """The trainable parameters of this rank."""

    specs: list[ParamSpec]  # in registration order
    groups: list[UpdateGroup]  # the optimizer's, by `ParamSpec.group`
    axes: list[Axis]  # axes of owners, by `ParamSpec.axis`


def take_census(model: nn.Module, optimizer: Optimizer, topology: Topology, sharding: Sharding) -> Census:
    """Describe the parameters that this rank trains. A shared parameter is described once, under its first name; frozen
    and empty ones are left out.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in by_plain_name(model.named_parameters(remove_duplicate=False)).items():
        if param.requires_grad and param.numel():
            names.setdefault(param, []).append(name)
        elif param.numel() and topology.tp.size * topology.pp.size * topology.ep_size > 1:
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
        spec = replace(spec, matrices=optimizer.matrices(name, at.full_shape), axis=axis, counts=at.counts)
        specs.append(replace(spec, full_shape=at.full_shape, offset=at.offset, along=at.along))
    if sharding.shard == "parameters":
        others = {number for axis, number in axes.items() if {*axis.ranks} - {*topology.owners.ranks}}
        specs = _with_units(specs, model, sharding.units, others)
    return Census(specs, [*groups], [*axes])


def _with_units(
    specs: Sequence[ParamSpec], model: nn.Module, units: Sequence[nn.Module], with_others: Collection[int]
) -> list[ParamSpec]:
    """Return the specs with the numbers of their units, 1 for the first.

    The root has number 0. Its parameters are those in no unit or in several, and those whose owners are not
    data-parallel ranks alone: `with_others` has the numbers of their axes. Raises: ValueError if a unit is inside
    another one.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(prefix_of(path))
    for unit in units:
        if any(other is not unit and other in units for other in unit.modules()):
            raise ValueError(f"a unit must not contain another unit, but a {type(unit).__name__} does; pass one")
    numbers = []
    sizes = [0] * (1 + len(units))
    for spec in specs:
        # A parameter in two units has a name in each, so all names must lie in one unit.
        names = (spec.name, *spec.aliases)
        of = (k for k, unit in enumerate(units, start=1) if all(name.startswith(tuple(paths[unit])) for name in names))
        number = 0 if spec.axis in with_others else next(of, 0)
        numbers.append(number)
        sizes[number] += spec.numel
    joined = [0, *_joined(sizes[1:], sum(sizes))]
    return [replace(spec, unit=joined[number]) for spec, number in zip(specs, numbers, strict=True)]


def _joined(sizes: Sequence[int], whole: int) -> list[int]:
    """Return the number, from 1 on, of the gather that each unit belongs to.

    Neighbouring units that are smaller than the least size are joined until they reach it together. The reason: a
    gather, or the update of a bucket, takes as much host time for ten thousand elements as for a million. `sizes`:
    elements of each unit. `whole`: elements of the model.
    """
    least = min(constants.LEAST_UNIT, whole / constants.LEAST_UNITS)
    numbers = []
    number = 0
    held = math.inf  # elements of the last gather
    for size in sizes:
        if max(held, size) >= least:
            number += 1
            held = 0
        held += size
        numbers.append(number)
    return numbers


@dataclass(frozen=True, slots=True)
class Links:
    """The collectives of an engine."""

    device: torch.device
    world: Collectives  # all ranks of the model
    along: Mapping[str, Collectives]  # ranks that divide this rank's parameters, by `ParamSpec.along`
    pp: Collectives  # ranks that hold other layers
    replicas: Collectives  # ranks that own the same share
    owners: list[Collectives]  # one per axis of `ParamSpec.axis`, the data-parallel ranks first

    @staticmethod
    def connect(
        topology: Topology, census: Census, precision: Precision, sharding: Sharding, device: torch.device
    ) -> Links:
        for axis in census.axes:
            _warn_of_load(axis, precision, device)
        dividing = {spec.along for spec in census.specs if spec.shape != spec.full_shape}
        return Links(
            device,
            world=make_collectives(topology.world, device),
            along={name: make_collectives(topology.along(name), device) for name in sorted(dividing)},
            pp=make_collectives(topology.pp, device),
            replicas=make_collectives(topology.replicas, device),
            owners=[sharding.collectives(axis, device) for axis in census.axes],
        )

    def require_equal_order(self, plans: Sequence[BucketPlan]) -> None:
        """Refuse different buckets, or another order of them, on ranks that own them together. Raises: ValueError on
        every rank.
        """
        for number, owners in enumerate(self.owners):
            require_equal(owners, self.device, [plan for plan in plans if plan.axis == number])


def _warn_of_load(axis: Axis, precision: Precision, device: torch.device) -> None:
    """Log if the owners load the network between machines far more than the library's own sum would."""
    exchanges = precision.sum_dtype(axis.size) != precision.own_grad_dtype
    # In an exchange each rank of a machine sends a part to every rank of other machines. A ring sends one sum from a
    # machine to the next.
    on_machine, me = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), axis.ranks[axis.rank]
    here, size = sum(rank // on_machine == me // on_machine for rank in axis.ranks), axis.size
    load = here * (size - here) / max(1, size - 1)
    if exchanges and device.type == "cuda" and load >= _LOADED and me == 0:
        log.warning(
            'reduce_dtype "half_fp32_sum" on %d machines: each sends about %.1f times the bytes that "half" would. '
            'If steps wait for reduce_scatter, write reduce_dtype = "half"',
            size // here, load,
        )  # fmt: skip


class Entry(NamedTuple):
    """A trained parameter of the model that all ranks hold together, or a buffer in its state_dict. If the ranks of a
    stage have different values of a buffer, those of the first rank count.
    """

    name: str
    full_shape: tuple[int, ...]
    dtype: str  # as torch prints it; for a parameter its master's
    stage: int  # the first pipeline stage that has it
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entries:
    """Holds the parameters and buffers of the model that all ranks train, stage by stage, in registration order."""

    params: list[Entry]
    buffers: list[Entry]


def describe_whole(model: nn.Module, specs: Sequence[ParamSpec], pp: Collectives, device: torch.device) -> Entries:
    """Describe the model that all ranks train, from this rank's part of it. `pp`: the collectives among its stages.
    Every rank must call it. Raises: ValueError naming a buffer that cannot be saved.
    """
    persistent = {*map(plain_name, model.state_dict())}
    stage = pp.axis.rank
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
    by_stage = gather_json(pp, [params, buffers], device)
    return Entries(_each_once(own for own, _ in by_stage), _each_once(own for _, own in by_stage))


def _each_once(by_stage: Iterable[list[Any]]) -> list[Entry]:
    found: dict[str, Entry] = {}
    for name, full_shape, dtype, stage, aliases in chain.from_iterable(by_stage):  # two stages may hold the same entry
        found.setdefault(name, Entry(name, tuple(full_shape), dtype, stage, tuple(aliases)))
    return list(found.values())
