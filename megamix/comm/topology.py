"""Where this process stands among the ranks, and which machine it computes on."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that divide something among them, as one of them sees it. `group` connects them; None: not connected, as
    where this process is alone.
    """

    ranks: Sequence[int] = range(1)  # their numbers in the world, ascending
    rank: int = 0  # this one's place among them
    group: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Topology:
    """The mesh of pipeline stages, data-parallel copies and tensor-parallel parts, as seen by one rank.

    Neighbours in the world are tensor-parallel, then data-parallel, then stages:
    rank = (pp.rank * dp.size + dp.rank) * tp.size + tp.rank. So the axis that talks most stays within a machine.
    """

    world: Axis = Axis()
    pp: Axis = Axis()  # pipeline stages of one copy of the model
    dp: Axis = Axis()  # ranks that hold the same part of the model and read other data
    tp: Axis = Axis()  # ranks that divide each layer of one stage, and read the same data
    stage: Axis = Axis()  # dp x tp: all ranks of this pipeline stage
    ends: Axis = Axis()  # on the first and the last pipeline rank: dp of both, which hold one table if it is tied

    def __str__(self) -> str:
        sizes = (
            f" (pp {self.pp.size} x dp {self.dp.size} x tp {self.tp.size})" if self.dp.size < self.world.size else ""
        )
        return f"{self.world.size} rank(s){sizes}"

    @property
    def tells_loss(self) -> bool:
        """Of the ranks that compute one loss together, one counts it: the first of the last stage, if each has one."""
        return self.tp.rank == 0 and self.pp.rank == self.pp.size - 1

    @staticmethod
    def current(group: dist.ProcessGroup | None = None) -> Topology:
        """Data-parallel ranks and nothing else: those of `group`; without one, of the whole world; without a world,
        one process.
        """
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return Topology()
            group = dist.group.WORLD
            assert group is not None
        axis = Axis(tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group)
        return Topology(world=axis, dp=axis, stage=axis)

    @staticmethod
    def place(rank: int, *, pp_size: int = 1, dp_size: int = 1, tp_size: int = 1) -> Topology:
        """Return where that rank stands in a mesh of these sizes: arithmetic, nothing is connected.

        Raises: ValueError if there is no such rank.
        """
        stage_size = dp_size * tp_size
        world_size = pp_size * stage_size
        if not 0 <= rank < world_size:
            sizes = f"pp_size {pp_size} * dp_size {dp_size} * tp_size {tp_size} = {world_size}"
            raise ValueError(f"rank {rank} is none of a mesh of {sizes} ranks; give one from 0 to {world_size - 1}")
        pp_rank, within = divmod(rank, stage_size)
        dp_rank, tp_rank = divmod(within, tp_size)
        first = rank - within  # of this stage
        last = world_size - stage_size  # of the last one
        ends = sorted({start + part for start in (0, last) for part in range(tp_rank, stage_size, tp_size)})
        return Topology(
            world=Axis(range(world_size), rank),
            pp=Axis(range(within, world_size, stage_size), pp_rank),
            dp=Axis(range(first + tp_rank, first + stage_size, tp_size), dp_rank),
            tp=Axis(range(rank - tp_rank, rank - tp_rank + tp_size), tp_rank),
            stage=Axis(range(first, first + stage_size), within),
            ends=Axis(tuple(ends), ends.index(rank)) if first in (0, last) else Axis((rank,)),
        )

    @staticmethod
    def connect(*, pp_size: int = 1, tp_size: int = 1, timeout_s: float | None = None) -> Topology:
        """This rank's place in the mesh of the whole world, its axes connected. Every rank must call it.

        Raises: ValueError if the sizes do not divide the world.
        """
        if not dist.is_initialized():
            return Topology.place(0, pp_size=pp_size, tp_size=tp_size)
        world_size, model_size = dist.get_world_size(), pp_size * tp_size
        if world_size % model_size:
            raise ValueError(
                f"pp_size {pp_size} * tp_size {tp_size} = {model_size} must divide the number of ranks, which is "
                f"{world_size}; start a multiple of {model_size}"
            )
        here = Topology.place(dist.get_rank(), pp_size=pp_size, dp_size=world_size // model_size, tp_size=tp_size)
        groups = {tuple(here.world.ranks): dist.group.WORLD}
        # The same order on every rank: those of a group meet in its creation. With NCCL each of these calls splits the
        # world, so every rank must be in one group of each axis, as it is.
        names = ("world", "tp", "dp", "stage", "pp")
        axes = {name: _connected(getattr(here, name), groups, timeout_s) for name in names}
        if 0 < here.pp.rank < here.pp.size - 1:
            # Between the ends, one of its own: torch names these groups by their ranks and by how many this rank has,
            # so that one which has fewer would find no peer for any later group.
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return Topology(**axes, ends=_connected(here.ends, groups, timeout_s))


def _connected(axis: Axis, groups: dict[tuple[int, ...], dist.ProcessGroup | None], timeout_s: float | None) -> Axis:
    """With a group, unless it is of one rank. `groups`: those there are; a new one is added."""
    ranks = tuple(axis.ranks)
    if len(ranks) > 1 and ranks not in groups:
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        groups[ranks] = dist.new_group(list(ranks), timeout, use_local_synchronization=True)
    return replace(axis, group=groups[ranks]) if len(ranks) > 1 else axis


def local_device() -> torch.device:
    """Return the GPU that LOCAL_RANK names, or the CPU where torch sees no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # pragma: CUDA only


def side_store(world: Axis) -> Store:
    """Return the store in which the ranks have met, for messages beside the collectives: by a connection of its own,
    and with keys that no job before this one in the same processes has used. Every rank must call it.
    """
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    job = store.add(f"megamix/rank {world.rank}", 1)
    return PrefixStore(f"megamix/job {job}", store)


def start_ranks(device: torch.device, timeout_s: float) -> None:
    """Meet the ranks that torchrun started (NCCL on GPUs, Gloo on CPUs); alone, stay alone. `Topology.connect` then
    gives the world its axes: not here, since ranks that disagree on them would make other groups, and wait for ever.

    Units: `timeout_s` bounds every collective: a peer that died or hangs is an error after it, never a silent wait.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if device.type == "cuda":  # pragma: CUDA only
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
