"""Ranks on simulated GPUs: processes of a forkserver of their own, which has the simulation in front of torch."""

import os
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver
from unittest import mock

import torch
import torch.distributed as dist

from megamix.mixed_precision.engine import ShardedEngine
from megamix.tools import ranks
from megamix.tools.verify.layouts import layout_lines
from megamix.tools.verify.layouts.judge_steps import judge
from tests import devices

CPU = torch.device("cpu")
_server = forkserver.ForkServer()


@contextmanager
def processes_with_gpus():
    """Until the end of the block a process that `megamix.tools.ranks.forkserver` starts is of a machine with GPUs. This
    one, which has none, computes its reference on the CPU.
    """
    _server.set_forkserver_preload(["tests.gpu.simulated", *ranks.PRELOADED])
    with (
        mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process),
        mock.patch.object(layout_lines, "judge", lambda one, by_rank, _, *more: judge(one, by_rank, CPU, *more)),
    ):
        yield


def on_gpu(seed, case, *args):
    """Run a case on this rank: no step of it may make the host wait, and no thread may touch another rank's GPU.

    `seed`: of the delays of all collectives.
    """
    from tests.gpu import nccl, simulated

    rank = dist.get_rank()
    simulated.waits.clear()
    nccl.delays.seed(f"{seed} {rank}")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, LOCAL_RANK=str(rank)))
        for name in ("backward", "step"):
            step = simulated.host_may_not_wait()(getattr(ShardedEngine, name))
            stack.enter_context(mock.patch.object(ShardedEngine, name, step))
        answer = case(*args)
    assert simulated.ops.contexts() == [rank], f"rank {rank} has touched the GPUs {simulated.ops.contexts()}"
    return answer


def on_default_gpu(case, *args):
    """Run a case that was written for the CPU: what it makes without a word about the device is on the GPU."""
    with devices.default_device("simulated"):
        return case(*args)
