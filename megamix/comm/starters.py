"""Turns the processes that torchrun, srun or mpirun start into ranks, by the environment variables that these set."""

import os
import re
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from megamix.comm.collectives import noting
from megamix.comm.topology import local_device, meet_ranks


class _Starter(NamedTuple):
    """Holds the names of the variables in which one starter tells each rank its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str  # a number, or a number for each machine, as in 2(x3),1
    job: tuple[str, ...] = ()  # variables whose values together tell this job from others on its machines
    hosts: str = "SLURM_JOB_NODELIST"  # lists the machines, rank 0's first


_TORCHRUN = _Starter("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# mpirun comes before srun: it may start its ranks by srun, whose variables then describe mpirun's own helpers. The PMI
# variables of srun lack the local rank and size.
_STARTERS = (
    _Starter(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",),
    ),
    _Starter("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("SLURM_JOB_ID",)),
    _Starter(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_STEP_NODELIST",
    ),
)  # fmt: skip


def start_ranks(timeout_s: float = 600.0) -> torch.device:
    """Meet the ranks that torchrun, srun or mpirun has started beside this process (NCCL on GPUs, Gloo on CPUs), and
    return this rank's device. A process that was started alone stays alone. Every rank must call it.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set from the variables of srun or
    mpirun. If RANK and WORLD_SIZE are set already, all stay as they are. MASTER_ADDR and MASTER_PORT stay if they are
    set already.
    Units: `timeout_s` bounds every collective.
    Raises: ValueError naming missing variables; OSError if ranks cannot meet at that address and port; NotMetError
    naming ranks that do not come.
    """
    starter = _started_by()
    if starter is not None and _size(starter) > 1 and not dist.is_initialized():
        if starter is not _TORCHRUN:
            os.environ.update(_as_torchrun(starter))
        if unset := [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise ValueError(
                f"{', '.join(unset)}: not set, and {starter.name} does not say the value; set it for every rank: "
                "LOCAL_RANK counts the ranks of a machine from 0, MASTER_ADDR is rank 0's machine, MASTER_PORT is a "
                "free port there"
            )
        place = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        try:
            with noting(f"this rank was to meet the others at {place}"):
                meet_ranks(local_device(), timeout_s)
        except dist.DistNetworkError as error:
            raise OSError(
                f"MASTER_ADDR and MASTER_PORT are {place}, where ranks cannot meet: {error}; set MASTER_ADDR to a name "
                "of rank 0's machine that every rank can look up, and MASTER_PORT to a port that no program uses there"
            ) from None
    return local_device()


def refuse_alone() -> None:
    """Refuse to train alone if several processes were started together and this one has not met the others. Raises:
    RuntimeError.
    """
    starter = None if dist.is_initialized() else _started_by()
    if starter is not None and (size := _size(starter)) > 1:
        raise RuntimeError(
            f"{starter.world_size} is {size}, so {starter.name} has started {size} processes, but there is no process "
            "group: each would train alone. Call megamix.start_ranks() before the engine is built; if each process "
            "shall train alone, pass sharding=megamix.Sharding(topology=megamix.Topology())"
        )


def _started_by() -> _Starter | None:
    """Return the starter that has told this process its rank. torchrun comes first; then those that have also told the
    local rank and size; then the others.
    """
    told = os.environ.get
    found = [one for one in (_TORCHRUN, *_STARTERS) if told(one.rank) and told(one.world_size)]
    whole = [one for one in found if os.environ.keys() >= {one.local_rank, one.local_world_size}]
    return next(iter(found if _TORCHRUN in found else [*whole, *found]), None)


def _size(starter: _Starter) -> int:
    """Return the number of ranks. Raises: ValueError if the variable holds no number."""
    text = os.environ[starter.world_size]
    if not text.isdecimal():
        raise ValueError(f"{starter.world_size} is {text!r}, no number of ranks")
    return int(text)


def _as_torchrun(starter: _Starter) -> dict[str, str]:
    """Return the variables that torchrun would have set, as far as they are known."""
    told, size = os.environ, _size(starter)
    host = first_host(told.get(starter.hosts, ""))
    found = {"RANK": told[starter.rank], "WORLD_SIZE": str(size)}
    if told.keys() >= {starter.local_rank, starter.local_world_size}:
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", told[starter.local_world_size])
        by_machine = [count for count, times in counts for _ in range(int(times or 1))]
        local_size = by_machine[int(told.get("SLURM_NODEID", "0")) % len(by_machine)]
        found |= {"LOCAL_RANK": told[starter.local_rank], "LOCAL_WORLD_SIZE": local_size}
        host = "127.0.0.1" if int(local_size) == size else host
    job = ".".join(told.get(name, "") for name in starter.job)
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(20_000 + zlib.crc32(job.encode()) % 10_000)}
    return found | {name: told.get(name, value) for name, value in place.items() if value}


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm list such as node[01-03,07],gpu5."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", hosts).partition(",")[0]
