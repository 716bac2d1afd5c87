"""The place of this process among the ranks, and the device on which it computes."""

from __future__ import annotations

import datetime
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in its __all__

from megamix.base.axes import AXES, AxisKind


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that divide something among them, as seen by one of them. `group` connects them; None: not connected, e.g.
    because this process is alone.
    """

    ranks: Sequence[int] = (0,)  # the ranks' numbers in the world, ascending
    rank: int = 0  # this rank's place among them, from 0 on
    group: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Topology:
    """A mesh of named axes, as seen by one rank. Neighbouring ranks differ in the last axis first.

    `megamix.base.axes.AXES` says what the ranks along each axis have in common. An axis without a size has one rank.
    `ep_size`: the neighbouring owners that divide the experts of a model. They are ranks of other axes: "ep" is no
    further axis, and takes no ranks of its own.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    place_in_mesh: int = 0
    ranks: Sequence[int] | None = None  # numbers of the mesh's ranks in the world; None: their places in the mesh
    groups: Mapping[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict, compare=False, repr=False)
    ep_size: int = 1

    def __post_init__(self) -> None:
        _require_axes(self.sizes)
        owners = {name: self.sizes[name] for name in self._sharded}
        if (number := math.prod(owners.values())) % self.ep_size:
            product = " * ".join(f"{name} {size}" for name, size in owners.items())
            raise ValueError(
                f"ep_size {self.ep_size} must divide {product} = {number}, the number of ranks that share out the "
                f"masters; take {math.gcd(number, self.ep_size)}"
            )

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1 or name == "dp")
        experts = f", ep {self.ep_size}" if self.ep_size > 1 else ""
        return f"{self.world.size} rank(s)" + (f" ({sizes})" if self.dp.size < self.world.size else "") + experts

    def along(self, *names: str) -> Axis:
        """Return the ranks that differ from this one only in these axes, or with "ep" alone those that divide the
        experts. They are connected if the mesh is.

        Raises: ValueError if there is no such axis.
        """
        if names == ("ep",):
            first = self.owners.rank // self.ep_size * self.ep_size
            return self._axis(self._places(self._sharded)[first : first + self.ep_size])
        _require_axes(names)
        return self._axis(self._places(names))

    def _places(self, names: Sequence[str]) -> list[int]:
        strides = self._strides
        chosen = [name for name in self.sizes if name in names]
        first = self.place_in_mesh - sum(self._place(name) * strides[name] for name in chosen)
        steps = (range(0, self.sizes[name] * strides[name], strides[name]) for name in chosen)
        return [first + sum(moves) for moves in itertools.product(*steps)]

    @cached_property
    def world(self) -> Axis:
        """Return all ranks of the mesh."""
        return self.along(*self.sizes)

    @cached_property
    def pp(self) -> Axis:
        return self.along("pp")

    @cached_property
    def dp(self) -> Axis:
        return self.along("dp")

    @cached_property
    def tp(self) -> Axis:
        return self.along("tp")

    @cached_property
    def cp(self) -> Axis:
        return self.along("cp")

    @cached_property
    def stage(self) -> Axis:
        """Return all ranks of this pipeline stage."""
        return self.along(*(name for name in self.sizes if name != "pp"))

    @cached_property
    def data(self) -> Axis:
        """Return the ranks that read different data for the same part of the model."""
        return self.along(*self._named(lambda kind: kind.reads))

    @cached_property
    def parts(self) -> Axis:
        """Return the ranks whose losses are parts of one loss."""
        return self.along(*self._named(lambda kind: kind.parts))

    @cached_property
    def readers(self) -> Axis:
        """Return the ranks whose losses are those of different tokens: of different samples, or parts of one."""
        return self.along(*self._named(lambda kind: kind.reads or kind.parts))

    @cached_property
    def owners(self) -> Axis:
        """Return the ranks that each own a share of the part of the model that all of them hold."""
        return self.along(*self._sharded)

    @cached_property
    def replicas(self) -> Axis:
        """Return the ranks that own the same share. Each has a copy."""
        return self.along(*self._named(lambda kind: kind.weights == "copied"))

    def owners_of(self, divided: str | None) -> Axis:
        """Return the ranks that own shares of this rank's block of a parameter. `divided`: the axis whose ranks divide
        the parameter, or "ep"; None: no ranks divide it.
        """
        if divided == "ep" and self.ep_size > 1:
            return self._axis(self._places(self._sharded)[self.owners.rank % self.ep_size :: self.ep_size])
        holders = self._named(lambda kind: kind.weights != "copied")
        return self.along(*(name for name in holders if name not in ("pp", divided)))

    @property
    def _sharded(self) -> list[str]:
        return self._named(lambda kind: kind.weights == "sharded")

    def _named(self, suits: Callable[[AxisKind], bool]) -> list[str]:
        return [name for name in self.sizes if suits(AXES[name])]

    @cached_property
    def ends(self) -> Axis:
        """Return the owners on the first and the last pipeline rank, which hold a tied table. On the ranks between
        these, return this rank alone.
        """
        if 0 < self.pp.rank < self.pp.size - 1:
            return self._axis([self.place_in_mesh])
        stride = self._strides.get("pp", 0)
        own = {place - self.pp.rank * stride for place in self._places(self._sharded)}
        return self._axis(sorted(own | {place + (self.pp.size - 1) * stride for place in own}))

    @property
    def counts_sums(self) -> bool:
        """Return whether this rank is the first of its stage's ranks that compute the same loss together: only its sums
        count.
        """
        return self._is_first(lambda name, kind: not (kind.reads or kind.parts or name == "pp"))

    @property
    def counts_loss(self) -> bool:
        """Return whether this rank counts the loss: only the first of the last stage's ranks that compute one loss
        together does.
        """
        return self.counts_sums and self.pp.rank == self.pp.size - 1

    @property
    def computes_with_first(self) -> bool:
        """Return whether this rank takes part in a forward of its stage's first rank: it divides layers, positions or
        experts with that rank, or with one that does.
        """
        return self.data.rank == 0 or (self.saves_shard and self.owners.rank < self.ep_size)

    @property
    def saves_shard(self) -> bool:
        """Return whether this rank is the first of the ranks that own the same share: it counts and saves the share."""
        return self._is_first(lambda name, kind: kind.weights == "copied")

    def _is_first(self, along: Callable[[str, AxisKind], bool]) -> bool:
        return all(self._place(name) == 0 for name in self.sizes if along(name, AXES[name]))

    def _place(self, name: str) -> int:
        return self.place_in_mesh // self._strides[name] % self.sizes[name]

    @cached_property
    def _strides(self) -> dict[str, int]:
        return {name: math.prod([*self.sizes.values()][number + 1 :]) for number, name in enumerate(self.sizes)}

    def _axis(self, places: Sequence[int]) -> Axis:
        ranks = tuple(places if self.ranks is None else (self.ranks[place] for place in places))
        return Axis(ranks, places.index(self.place_in_mesh), self.groups.get(ranks))

    @staticmethod
    def current(group: dist.ProcessGroup | None = None) -> Topology:
        """Return a mesh that has only data-parallel ranks: those of `group`. Without a group they are all ranks of the
        world; without a world, this process is alone.
        """
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return Topology()
            group = dist.group.WORLD
            assert group is not None
        ranks = tuple(dist.get_process_group_ranks(group))
        return Topology({"dp": len(ranks)}, dist.get_rank(group), ranks=ranks, groups={ranks: group})

    @staticmethod
    def place(rank: int, *, ep_size: int = 1, **sizes: int) -> Topology:
        """Return the place of rank `rank` in a job's mesh, by arithmetic alone and without connected axes. `sizes`:
        number of ranks along each axis, by the axis's name; an axis that is not named has 1.

        Raises: ValueError if there is no such axis or rank, or if ep_size does not divide the owners.
        """
        _require_axes(sizes)
        mesh = {name: sizes.get(name, 1) for name in AXES}
        world_size = math.prod(mesh.values())
        if not 0 <= rank < world_size:
            product = " * ".join(f"{name} {size}" for name, size in mesh.items() if name in sizes)
            raise ValueError(
                f"rank {rank} is none of a mesh of {product} = {world_size} ranks; give one from 0 to {world_size - 1}"
            )
        return Topology(mesh, rank, ep_size=ep_size)

    @staticmethod
    def connect(timeout_s: float | None = None, *, ep_size: int = 1, **sizes: int) -> Topology:
        """Return this rank's place in the mesh of the whole world, with connected axes. Every rank must call it.

        `sizes`: number of ranks along each axis except dp, by the axis's name. The size of dp is the number of ranks of
        the world divided by their product.
        Raises: ValueError if there is no such axis, or the sizes do not divide the world.
        """
        if not dist.is_initialized():
            return Topology.place(0, ep_size=ep_size, **sizes)
        world_size, size = dist.get_world_size(), math.prod(sizes.values())
        if world_size % size:
            product = " * ".join(f"{name} {ranks}" for name, ranks in sizes.items())
            raise ValueError(
                f"{product} = {size} must divide the number of ranks, which is {world_size}; start a multiple of {size}"
            )
        placed = Topology.place(dist.get_rank(), ep_size=ep_size, **sizes, dp=world_size // size)
        return placed.connected(timeout_s)

    def connected(self, timeout_s: float | None = None) -> Topology:
        """Return this mesh with its axes connected. Every rank of the world must call it, and be in the mesh."""
        groups = {tuple(self.world.ranks): dist.group.WORLD}
        # The order is the same on every rank, because a group's ranks meet when it is created. With NCCL each of these
        # calls splits the world, which requires every rank to be in one group of each axis. It is.
        own = (self.along(name) for name in reversed([*self.sizes]))
        reading = (self.data, self.parts, self.readers)
        experts = (self.along("ep"), self.owners_of("ep"))
        for axis in (*own, self.owners, self.owners_of(None), *reading, *experts, self.replicas, self.stage):
            _connect(axis, groups, timeout_s)
        if 0 < self.pp.rank < self.pp.size - 1:
            # A rank between the ends makes a group of itself alone. torch names these groups by their ranks and by the
            # number of groups that this rank has, so a rank with fewer groups would find no peer for any later group.
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        else:
            _connect(self.ends, groups, timeout_s)
        return replace(self, groups=groups)


def _require_axes(names: Iterable[str]) -> None:
    for name in names:
        if name not in AXES:
            told = f"there is no axis {name!r}; there are {', '.join(AXES)}"
            raise ValueError(f"{told}: megamix.plugins.register_axis adds one")


def _connect(axis: Axis, groups: dict[tuple[int, ...], dist.ProcessGroup | None], timeout_s: float | None) -> None:
    """Add the axis's group to `groups`, unless it is there or has one rank."""
    ranks = tuple(axis.ranks)
    if len(ranks) > 1 and ranks not in groups:
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        groups[ranks] = dist.new_group(list(ranks), timeout, use_local_synchronization=True)


def local_device() -> torch.device:
    """Return the GPU that LOCAL_RANK names, or the CPU if torch sees no GPU. If torch sees a single GPU, return this
    one: with --gpus-per-task Slurm shows each task only its own GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.device_count() > 1 else 0)


def side_store(world: Axis) -> Store:
    """Return the store in which the ranks have met, for messages beside the collectives. The returned object has a
    connection of its own, and keys that no earlier job of these processes has used. Every rank must call it.
    """
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    job = store.add(f"megamix/rank {world.rank}", 1)
    return PrefixStore(f"megamix/job {job}", store)


class NotMetError(RuntimeError):
    """Ranks that were started but have not come; `late` holds their numbers."""

    def __init__(self, late: Sequence[int], timeout_s: float):
        self.late = late
        which = ", ".join(map(str, late[:8])) + " and more" * (len(late) > 8)
        super().__init__(
            f"no sign of rank {which} within {timeout_s:g} s: an import (such as a plugin's) or a read of a file may "
            "hang there"
        )


def meet_ranks(device: torch.device, timeout_s: float) -> None:
    """Meet the ranks that torchrun started (NCCL on GPUs, Gloo on CPUs); do nothing in a process that is alone.

    `Topology.connect` then gives the world its axes. It is not done here, because ranks that disagree on the axes would
    create different groups and wait for ever.
    Units: `timeout_s` bounds every collective: a peer that died or hangs is an error then, never a silent wait.
    Raises: NotMetError if a rank does not come.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=timeout_s)
    store, rank, size = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]  # not in its __all__
    store.set(f"megamix/came {rank}", "")
    if store.add("megamix/have come", 1) == size:
        store.set("megamix/all have come", "")
    try:
        store.wait(["megamix/all have come"], limit)
    except RuntimeError:
        late = [number for number in range(size) if not store.check([f"megamix/came {number}"])]
        raise NotMetError(late, timeout_s) from None
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store, rank=rank, world_size=size, timeout=limit,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip


def leave_ranks(*, alike: bool) -> None:
    """Leave the ranks that `meet_ranks` has met.

    `alike`: all ranks leave now. If they do not, NCCL could wait for the others for ever. So the groups stay, and an
    uncaught error is printed and then ends the process at once. If the error is caught, torch drops the groups when the
    process ends.
    """
    if dist.is_initialized() and alike:
        dist.destroy_process_group()
    elif dist.is_initialized():
        sys.excepthook = partial(_end_at_once, sys.excepthook)


def _end_at_once(tell: Callable[..., object], *error: Any) -> None:
    try:
        tell(*error)
        sys.stdout.flush()
    except Exception:  # the user's own hook failed, or nobody reads the pipe
        sys.__excepthook__(*error)
    os._exit(1)
