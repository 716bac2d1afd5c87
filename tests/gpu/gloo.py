"""Gloo between ranks that share a simulated GPU, by its contract: a tensor of the device travels through host memory,
and `wait` brings the result back. Gloo sends and receives nothing of a device between two ranks.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.nccl import SimulatedNccl

ops = torch.ops.simulated
COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_reduce", "broadcast")


class Staged(dist.Work):
    """A collective of copies on the host. What it writes on the device, unless it reads it there, is NaN until it was
    waited for.
    """

    def __init__(self, work, there, arrived, reads):
        super().__init__()
        self._work, self._there, self._arrived = work, there, arrived
        sent = {one.untyped_storage()._cdata for one in reads if isinstance(one, Tensor)}
        if sent and there.untyped_storage()._cdata not in sent:
            ops.host(there).view(-1).view(torch.uint8).fill_(0xFF)

    def wait(self, timeout=None):
        self._work.wait()
        ops.host(self._there).copy_(self._arrived)
        return True


def _staged(collective):
    @functools.wraps(collective)
    def run(there, *args, group=None, async_op=False, **settings):
        if not there.is_cuda or isinstance(group or dist.group.WORLD, SimulatedNccl):
            return collective(there, *args, group=group, async_op=async_op, **settings)
        ops.touch(there, True, collective.__name__)
        host, *others = [ops.host(one).clone() if isinstance(one, Tensor) else one for one in (there, *args)]
        work = Staged(collective(host, *others, group=group, async_op=True, **settings), there, host, [*args])
        return work if async_op else work.wait() and None

    return run


def _refusing(message):
    def run(group, tensors, *args):
        if any(tensor.is_cuda for tensor in tensors):
            raise RuntimeError("ProcessGroupGloo sends and receives tensors of the host alone")
        return message(group, tensors, *args)

    return run


def answer():
    """Stand in front of Gloo in torch.distributed."""
    for name in COLLECTIVES:
        if hasattr(dist, name):  # torch 2.13 has renamed one
            setattr(dist, name, _staged(getattr(dist, name)))
    for name in ("send", "recv"):
        setattr(dist.ProcessGroup, name, _refusing(getattr(dist.ProcessGroup, name)))
