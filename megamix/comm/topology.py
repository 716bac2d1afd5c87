"""Where this process stands among the ranks, and which machine it computes on."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store


@dataclass(frozen=True, slots=True)
class Topology:
    """The data-parallel axis as seen by one rank. `dp_group` is None when this process is alone."""

    dp_size: int = 1
    dp_rank: int = 0
    dp_group: dist.ProcessGroup | None = None

    @staticmethod
    def current(group: dist.ProcessGroup | None = None) -> Topology:
        """The topology of `group`; without one, of the whole world; without a world, of one process."""
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return Topology()
            group = dist.group.WORLD
            assert group is not None
        return Topology(dist.get_world_size(group), dist.get_rank(group), group)


def local_device() -> torch.device:
    """The GPU that LOCAL_RANK names, or the CPU where torch sees no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # pragma: CUDA only


def side_store(topology: Topology) -> Store:
    """The store in which the ranks have met, for messages beside the collectives: by a connection of its own, and with
    keys that no job before this one in the same processes has used. Every rank must call it.
    """
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    job = store.add(f"megamix/rank {topology.dp_rank}", 1)
    return PrefixStore(f"megamix/job {job}", store)


def start_ranks(device: torch.device, timeout_s: float) -> Topology:
    """Join the ranks that torchrun started (NCCL on GPUs, Gloo on CPUs); alone, stay alone.

    Units: `timeout_s` bounds every collective: a peer that died or hangs is an error after it, never a silent wait.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Topology()
    if device.type == "cuda":  # pragma: CUDA only
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return Topology.current()
