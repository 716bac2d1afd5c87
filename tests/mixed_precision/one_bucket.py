"""One bucket without an engine."""

import torch

from megamix import Sharding
from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis
from megamix.mixed_precision.bucket import make_buckets
from megamix.mixed_precision.flat_layout import ParamSpec, build_layout
from megamix.mixed_precision.update_slice import UpdateGroup

ALONE = Collectives(Axis())

PLAIN = (UpdateGroup(1.0, (0.0,), ()),)


def one_bucket(precision, groups=PLAIN, numel=64, owners=ALONE):
    """Return a bucket of one parameter, `numel` zeros, with gradients and sums but without a module."""
    device = torch.get_default_device()
    layout = build_layout([ParamSpec.whole("weight", (numel,), 0)], [owners.axis.size])
    (bucket,) = make_buckets(layout, [owners], groups, precision, Sharding(), device)
    bucket.params = torch.zeros(layout.padded_numel, dtype=precision.dtype, device=device)
    bucket.named_params = {}
    bucket.param_shard = owners.own_part(bucket.params)
    bucket.make_grads()
    return bucket
