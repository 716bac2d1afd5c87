"""A bucket counts exactly the bytes behind its tensors, on two ranks and on one: for each format of gradients and sums,
each `shard`, sums at the owner, groups with different states, and an average; FP32 stays FP32 whatever torch's default
dtype is.
"""

import itertools
from typing import get_args

import pytest
import torch

from megamix import AdamW, Muon, Precision, Sharding, StaticLossScale, WeightAverage
from megamix.mixed_precision.bucket import BucketBytes
from megamix.mixed_precision.flat_layout import ParamSpec, build_layout
from megamix.mixed_precision.settings import Shard
from megamix.mixed_precision.storage import allocate
from megamix.mixed_precision.update_slice import UpdateGroup
from tests.builders import BF16, FP32, make_engine, make_model
from tests.storages import storage_bytes

FORMATS = {
    "fp16": Precision(torch.float16, loss_scale=StaticLossScale(1.0)),
    "bf16, FP32 sums": Precision(torch.bfloat16, reduce_dtype="half_fp32_sum"),
    "bf16, FP32 gradients": Precision(torch.bfloat16, torch.float32),
    "fp32": FP32,
}
SHARDS = get_args(Shard)
OPTIMIZERS = {"adamw": AdamW(lr=0.01), "muon": Muon(lr=0.01), "bf16 states": AdamW(lr=0.01, state_dtype=torch.bfloat16)}


def _buffers(bucket):
    return {
        "params": [bucket.params],
        "grads": [bucket.grads],
        "rank_sum": [bucket.rank_sum],
        "total": [] if bucket.total is None else [bucket.total],
        "master": [bucket.master],
        "states": [state for states in bucket.states for state in states.values()],
        "average": [] if bucket.average is None else [bucket.average],
    }


def _compare(accumulates, optimizers, precisions):
    """Compare what each bucket says with the bytes behind its tensors, between steps and within one."""
    for precision, shard, accumulate, optimizer in itertools.product(precisions, SHARDS, accumulates, optimizers):
        model = make_model(tied=False)
        sharding = Sharding([*model.blocks], bucket_size=2000, shard=shard, accumulate=accumulate)
        engine = make_engine(model, OPTIMIZERS[optimizer], FORMATS[precision], sharding, grad_accum_steps=2)
        if optimizer == "bf16 states":
            WeightAverage(engine, 0.9)
        assert len(engine.buckets) > 2
        for bucket in engine.buckets:
            buffers, told, passing = _buffers(bucket), bucket.bytes, bucket.bytes.temporary()
            assert told.held() == storage_bytes(itertools.chain.from_iterable(buffers.values()))
            seen = []
            for name, tensors in buffers.items():
                for tensor in tensors:
                    allocate(tensor)
                assert getattr(told, name) == storage_bytes([*seen, *tensors]) - storage_bytes(seen), name
                seen += tensors
            all_bytes = told.held() + passing.params + passing.grads + passing.rank_sum + passing.total
            assert all_bytes == storage_bytes(seen)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_what_a_bucket_says_is_behind_its_tensors(run_ranks, dp_size):
    run_ranks(_compare, dp_size, ("local", "owner"), ["adamw"], [*FORMATS])
    run_ranks(_compare, dp_size, ["local"], ["muon", "bf16 states"], ["fp16"])


def test_masters_and_sums_are_fp32_whatever_torchs_default_is():
    model = make_model(tied=False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        engine = make_engine(model, None, BF16, Sharding(accumulate="owner"), grad_accum_steps=2)
    finally:
        torch.set_default_dtype(torch.float32)
    (bucket,) = engine.buckets
    sums = (bucket.master, bucket.total, engine.progress.scale_used, engine.progress.loss_sum)
    assert [one.dtype for one in sums] == [torch.float32] * 4


def test_states_that_not_all_groups_have_take_only_their_own_bytes():
    specs = [ParamSpec.whole(name="w", shape=(64, 6), group=0), ParamSpec.whole(name="b", shape=(128,), group=1)]
    (plan,) = build_layout(specs, [2]).buckets
    assert plan.padded_numel == 512  # the first shard has 256 elements of w, the second the other 128 and b
    one, two = (("m", torch.bfloat16),), (("m", torch.float32), ("v", torch.float32))
    groups = [UpdateGroup(1.0, (0.0,), one), UpdateGroup(1.0, (0.0,), two)]

    def states(shard, groups):
        return BucketBytes.count(plan, Precision(), Sharding(), groups, owner_adds=False, shard=shard).states

    assert [states(shard, groups) for shard in (0, 1)] == [2 * 256, 2 * 128 + 8 * 128]
    assert states(None, groups) == 2 * 128 + 8 * 128
    assert states(None, [UpdateGroup(1.0, (0.0,), ())] * 2) == 0
