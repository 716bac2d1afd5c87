"""The place of a process among those that srun or mpirun has started, in the variables that torchrun sets.

This module imports no torch.
"""

import os
import re
import zlib
from typing import NamedTuple


class Starter(NamedTuple):
    """Holds the names of the variables in which one starter tells each rank its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str  # a number, or a number for each machine, as in 2(x3),1
    job: tuple[str, ...] = ()  # variables whose values together tell this job from others on its machines
    hosts: str = "SLURM_JOB_NODELIST"  # lists the machines, rank 0's first


TORCHRUN = Starter("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# mpirun comes before srun: it may start its ranks by srun, whose variables then describe mpirun's own helpers. The PMI
# variables of srun lack the local rank and size.
_STARTERS = (
    Starter(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",),
    ),
    Starter("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("SLURM_JOB_ID",)),
    Starter(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_STEP_NODELIST",
    ),
)  # fmt: skip


def take_place() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the variables of srun or
    mpirun, as far as these say them. If torchrun, or nobody, has started several processes, nothing changes.
    """
    starter = started_by()
    if starter is not None and starter is not TORCHRUN and size_of(starter) > 1:
        os.environ.update(_as_torchrun(starter))


def started_by() -> Starter | None:
    """Return the starter that has told this process its rank. torchrun comes first; then those that have also told the
    local rank and size; then the others.
    """
    told = os.environ.get
    found = [one for one in (TORCHRUN, *_STARTERS) if told(one.rank) and told(one.world_size)]
    whole = [one for one in found if os.environ.keys() >= {one.local_rank, one.local_world_size}]
    return next(iter(found if TORCHRUN in found else [*whole, *found]), None)


def size_of(starter: Starter) -> int:
    """Return the number of ranks. Raises: ValueError if the variable holds no number."""
    text = os.environ[starter.world_size]
    if not text.isdecimal():
        raise ValueError(f"{starter.world_size} is {text!r}, no number of ranks")
    return int(text)


def _as_torchrun(starter: Starter) -> dict[str, str]:
    """Return the variables that torchrun would have set, as far as they are known."""
    told, size = os.environ, size_of(starter)
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
