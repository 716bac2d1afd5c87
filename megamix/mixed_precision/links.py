"""The links of a rank: collectives with the other owners of its parameters, and with the ranks that hold the rest of
the model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.topology import Axis, Topology, num_on_machine
from megamix.mixed_precision.census import Census
from megamix.mixed_precision.flat_layout import BucketPlan
from megamix.mixed_precision.guards.refusals import require_equal
from megamix.mixed_precision.settings import Precision, Sharding

log = logging.getLogger("megamix")

_LOADED = 2.0  # least load that is logged, as a multiple of the bytes of a ring's sum


@dataclass(frozen=True, slots=True)
class Links:
    """The collectives of an engine."""

    device: torch.device
    world: Collectives  # all ranks of the model
    along: Mapping[str, Collectives]  # ranks that divide this rank's parameters, by `ParamSpec.along`
    pp: Collectives  # ranks that hold other layers
    replicas: Collectives  # ranks that own the same share
    owners: list[Collectives]  # one per axis of `ParamSpec.axis`, the data-parallel ranks first

    @staticmethod
    def connect(
        topology: Topology, census: Census, precision: Precision, sharding: Sharding, device: torch.device
    ) -> Links:
        for axis in census.axes:
            _warn_of_load(axis, precision, device)
        dividing = {spec.along for spec in census.specs if spec.shape != spec.full_shape}
        return Links(
            device,
            world=make_collectives(topology.world, device),
            along={name: make_collectives(topology.along(name), device) for name in sorted(dividing)},
            pp=make_collectives(topology.pp, device),
            replicas=make_collectives(topology.replicas, device),
            owners=[sharding.collectives(axis, device) for axis in census.axes],
        )

    def require_equal_order(self, plans: Sequence[BucketPlan]) -> None:
        """Refuse different buckets, or another order of them, on ranks that own them together. Raises: ValueError on
        every rank.
        """
        for number, owners in enumerate(self.owners):
            require_equal(owners, self.device, [plan for plan in plans if plan.axis == number])


def _warn_of_load(axis: Axis, precision: Precision, device: torch.device) -> None:
    """Log if the owners load the network between machines far more than the library's own sum would."""
    exchanges = precision.sum_dtype(axis.size) != precision.own_grad_dtype
    # In an exchange each rank of a machine sends a part to every rank of other machines. A ring sends one sum from a
    # machine to the next.
    here, size = num_on_machine(axis), axis.size
    load = here * (size - here) / max(1, size - 1)
    if exchanges and device.type == "cuda" and load >= _LOADED and axis.ranks[axis.rank] == 0:
        log.warning(
            'reduce_dtype "half_fp32_sum" on %d machines: each sends about %.1f times the bytes that "half" would. '
            'If steps wait for reduce_scatter, write reduce_dtype = "half"',
            size // here, load,
        )  # fmt: skip
