"""Replicas: an axis x over dp. Every rank reads other data; the ranks of dp divide the FP32 masters, those of x hold
the same share of it. Gradients are reduce-scattered along dp, and their sums summed along x: hybrid sharding, by a
user.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamix.comm.collectives import Collectives, GlooCollectives, Pending, Use, make_collectives, sum_in_rank_order
from megamix.comm.topology import Axis, Topology


def connect_replicas(num_replicas: int) -> Topology:
    """Neighbouring ranks divide the masters, so the largest transfers stay within a machine."""
    sizes = {"x": num_replicas, "dp": dist.get_world_size() // num_replicas}
    here = Topology(sizes, dist.get_rank(), reads=("x", "dp"), owns=("dp",))
    return here.connected()


class ReplicaCollectives(GlooCollectives):
    """Along dp as on Gloo, and what arrives is summed along x, replica 0 first."""

    def __init__(self, axis: Axis, device: torch.device, across: Collectives):
        super().__init__(axis, device)
        self._across = across

    def reduce_scatter(self, grads: Tensor, grad_shard: Tensor, use: Use | None = None) -> Pending:
        within = super().reduce_scatter(grads, grad_shard, use)

        def add() -> None:
            within.wait()
            sum_in_rank_order(self._across.table(grad_shard), grad_shard)

        return Pending(then=add)


def replicate(topology: Topology) -> Any:
    """Return what makes the collectives of owners: `Sharding(topology=topology, collectives=replicate(topology))`."""

    def make(axis: Axis, device: torch.device) -> Collectives:
        return ReplicaCollectives(axis, device, make_collectives(topology.along("x"), device))

    return make
