"""Turns the processes that torchrun, srun or mpirun start into ranks, by the environment variables that these set."""

import os
import time

import torch
import torch.distributed as dist

from megamix.base.console import when_finished
from megamix.comm.collectives import noting
from megamix.comm.starter import size_of, started_by, take_place
from megamix.comm.topology import local_device, meet_ranks

# Seconds at the end of a program. Gloo's threads need Python's lock to drop the tensors of a collective. One that waits
# for it while the interpreter ends aborts the process: a finished rank would count as failed. A sleep hands it over.
_REST_S = 0.1


def start_ranks(timeout_s: float = 600.0) -> torch.device:
    """Meet the ranks that torchrun, srun or mpirun has started beside this process (NCCL on GPUs, Gloo on CPUs), and
    return this rank's device. A process that was started alone stays alone. Every rank must call it; the program's end
    needs no call.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set from the variables of srun or
    mpirun. If RANK and WORLD_SIZE are set already, all stay as they are. MASTER_ADDR and MASTER_PORT stay if they are
    set already.
    Units: `timeout_s` bounds every collective.
    Raises: ValueError naming missing variables; OSError if ranks cannot meet at that address and port; NotMetError
    naming ranks that do not come.
    """
    starter = started_by()
    if starter is not None and size_of(starter) > 1 and not dist.is_initialized():
        take_place()
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
        when_finished(lambda: time.sleep(_REST_S))
    return local_device()


def refuse_alone() -> None:
    """Refuse to train alone if several processes were started together and this one has not met the others. Raises:
    RuntimeError.
    """
    starter = None if dist.is_initialized() else started_by()
    if starter is not None and (size := size_of(starter)) > 1:
        raise RuntimeError(
            f"{starter.world_size} is {size}, so {starter.name} has started {size} processes, but there is no process "
            "group: each would train alone. Call megamix.start_ranks() before the engine is built; if each process "
            "shall train alone, pass sharding=megamix.Sharding(topology=megamix.Topology())"
        )
