"""Gathers that land as late as possible."""

from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from megamix.comm import collectives


class _LateGather:
    """A gather that lands at the last moment: the other ranks' parts hold NaN until it is awaited."""

    def __init__(self, gather, flat, shard):
        self.side = flat.clone()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.pending = gather(self.side, self.side.view(size, -1)[rank])
        self.flat, self.done = flat, False
        own = shard.clone()
        flat.fill_(float("nan"))
        shard.copy_(own)

    def wait(self):
        self.pending.wait()
        if not self.done:
            self.flat.copy_(self.side)
        self.done = True


@contextmanager
def late_gathers():
    """Replace every gather between Gloo ranks inside the block by a `_LateGather`, and yield the list of them."""
    gather, begun = collectives.GlooCollectives.all_gather, []

    def late(self, flat, shard, number=0):
        begun.append(_LateGather(lambda *args: gather(self, *args, number), flat, shard))
        return begun[-1]

    with mock.patch.object(collectives.GlooCollectives, "all_gather", late):
        yield begun
