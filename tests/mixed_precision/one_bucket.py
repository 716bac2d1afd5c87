"""One bucket without an engine."""

import torch

from megamix import Sharding
from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis
from megamix.mixed_precision.bucket import make_buckets
from megamix.mixed_precision.flat_layout import ParamSpec, build_layout

ALONE = Collectives(Axis())


def one_bucket(precision, groups):
    """Return a bucket of one parameter, 64 zeros, with gradients and sums but without a module."""
    device = torch.get_default_device()
    layout = build_layout([ParamSpec.whole("weight", (64,), 0)], [ALONE.axis.size])
    (bucket,) = make_buckets(layout, [ALONE], groups, precision, Sharding(), device)
    bucket.params = torch.zeros(layout.padded_numel, dtype=precision.dtype, device=device)
    bucket.named_params = {}
    bucket.param_shard = ALONE.own_part(bucket.params)
    bucket.make_grads()
    return bucket
