"""With `half_fp32_sum` halves travel, and the sum is as exact as an FP32 sum and does not overflow beyond FP16; nothing
of one step's sum reaches the next step.
"""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamix import AdamW, Precision, ShardedEngine, Sharding, StaticLossScale, tuned
from megamix.clock import Clock
from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.topology import Axis, Topology
from megamix.mixed_precision.census import Census
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.links import Links
from megamix.mixed_precision.row_stats import RowStats, chunked_row_stats, row_stats, sum_in_chunks
from tests.conftest import FULL
from tests.distributed.reference import train_reference
from tests.distributed.test_equals_reference import Case, differences, run_engine
from tests.mixed_precision.one_bucket import one_bucket

SIZES = range(2, 9) if FULL else (2, 3, 4, 8)


def _halves(rank, bucket, numel, dtype):
    """Return halves over 21 octaves, so that most sums need more digits than a half has."""
    generator = torch.Generator().manual_seed(100 * bucket + rank)
    octaves = torch.randint(-10, 11, (numel,), generator=generator)
    return torch.ldexp(torch.randn(numel, generator=generator), octaves).to(dtype)


def _reduce(dtype, numels):
    """Return for each bucket: the largest error over its bound, that of the sum rounded to half, and whether the
    statistics are `row_stats` of the sum.
    """
    axis, cpu = Topology.current().dp, torch.device("cpu")
    size, rank = axis.size, axis.rank
    loss_scale = StaticLossScale(1.0) if dtype == torch.float16 else None
    precision = Precision(dtype, loss_scale=loss_scale, reduce_dtype="half_fp32_sum")
    owners = make_collectives(axis, cpu)
    buckets = [one_bucket(precision, numel=size * numel, owners=owners) for numel in numels]
    for number, bucket in enumerate(buckets):
        bucket.grads.copy_(_halves(rank, number, bucket.plan.padded_numel, dtype))
        bucket.param_grads["weight"].touched = True  # otherwise it would count as zeros
    stats = RowStats(chunked_row_stats, partial(sum_in_chunks, chunked_row_stats))
    reduce = GradReduce(buckets, Collectives(Axis()), stats, overlap=True, clock=Clock(cpu), observers=[])
    reduce.end_micro_batch(ends=True)
    results = []
    for number, numel in enumerate(numels):
        parts = torch.stack([_halves(other, number, size * numel, dtype).view(size, -1)[rank] for other in range(size)])
        exact = parts.double().sum(0)
        # Each of the n - 1 additions in FP32 multiplies its exact result by some 1 + d with |d| <= u = 2**-24. So each
        # part gets at most n - 1 such factors: |sum - exact| <= ((1 + u)**(n - 1) - 1) * sum of |parts|. The term
        # 2**-50 covers the FP64 sum's own error.
        bound = ((1 + 2.0**-24) ** (size - 1) - 1 + 2.0**-50) * parts.double().abs().sum(0)
        bucket = buckets[number]
        reduce.wait(bucket)
        shard = bucket.grad_sum
        rounded = shard.to(dtype)
        errors = [float(((total.double() - exact).abs() / bound).max()) for total in (shard, rounded)]
        results.append((*errors, torch.equal(bucket.row_stats(stats), row_stats(shard))))
    return results


def _reduce_in_small_pieces(dtype, numels):
    with mock.patch.object(tuned, "SUM_CHUNK", 128), mock.patch.object(tuned, "SUMMED_CHUNK", 256):
        return _reduce(dtype, numels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_the_sum_is_as_exact_as_fp32_and_its_statistics_are_those_of_the_shard(run_ranks, size, dtype):
    for results in run_ranks(_reduce_in_small_pieces, size, dtype, [64, 6400, 256, 320]):
        for error, error_of_half, same_statistics in results:
            assert error <= 1
            assert error_of_half > 100  # a sum rounded on the way would have been noticed
            assert same_statistics


class _Slope(nn.Module):
    """A module whose gradient is its input. 200 elements leave a gap of 56 to the end of a row."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 200))

    def forward(self, slope):
        return (self.weight.float() * slope).sum()


def _steep(model, step, rank, micro_batch):
    generator = torch.Generator().manual_seed(10 * step + rank)
    slope = 32.0 * torch.randint(40_000 // 32, 65_504 // 32 + 1, (200,), generator=generator)  # finite halves
    return model(slope)


def _train_where_every_sum_exceeds_fp16(reduce_dtype):
    model = _Slope()
    precision = Precision(torch.float16, loss_scale=StaticLossScale(1.0), reduce_dtype=reduce_dtype)
    engine = ShardedEngine(model, AdamW(lr=0.1), precision, clip_grad=0.5, compile_update=False)
    found_inf, norms = [], []
    for step in range(3):
        engine.backward(_steep(model, step, dist.get_rank(), 0))
        result = engine.step()
        found_inf.append(bool(result.found_inf))
        norms.append(float(result.grad_norm))
    return found_inf, norms, engine.full_weights()["weight"]


def test_a_sum_that_fp16_cannot_hold_is_no_overflow_and_equals_the_reference(run_ranks):
    settings = SimpleNamespace(
        steps=3, dp_size=2, micro_batches=lambda step, rank: 1, dtype=torch.float16, grad_dtype=torch.float16,
        reduce_dtype="half_fp32_sum", accumulate="local", loss_scale=1.0, clip_grad=0.5,
    )  # fmt: skip
    want = train_reference(_Slope(), _steep, AdamW(lr=0.1), settings)
    for found_inf, norms, weight in run_ranks(_train_where_every_sum_exceeds_fp16, 2, "half_fp32_sum"):
        assert found_inf == [False] * 3
        assert norms == want.grad_norms
        assert torch.equal(weight, want.masters["weight"][:200])
    for found_inf, _, weight in run_ranks(_train_where_every_sum_exceeds_fp16, 2, "half"):
        assert found_inf == [True] * 3
        assert torch.equal(weight, torch.linspace(-1, 1, 200))


def _skip_blocks(dtype):
    """Train with parameters without a gradient and padding, in buckets of one and of many parameters, with and without
    overlap.
    """
    wrong = []
    for bucket_size, overlap in ((1, True), (1111, True), (10**9, False)):
        case = Case(dtype, dtype, "half_fp32_sum", dp_size=2, bucket_size=bucket_size, overlap=overlap,
                    grad_accum_steps=2, clip_grad=0.05, flavours="differ")  # fmt: skip
        wrong += differences(case, *run_engine(case))
    return wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sum_of_one_step_leaves_nothing_in_the_next(run_ranks, dtype):
    assert run_ranks(_skip_blocks, 2, dtype) == [[], []]


def _different_sums():
    try:
        ShardedEngine(
            nn.Linear(3, 3), AdamW(lr=0.1), Precision(reduce_dtype=("half", "half_fp32_sum")[dist.get_rank()])
        )
    except ValueError as error:
        return str(error)
    return "accepted"


def test_ranks_that_would_sum_differently_are_told_so(run_ranks):
    for message in run_ranks(_different_sums, 2):
        assert "hold different models or settings" in message


@pytest.mark.parametrize(
    ("ranks", "a_machine", "load"),
    [((0, 8), 8, None), (range(8), 8, None), (range(16), 1, None), (range(4), 2, None), (range(64), 8, "7.1"),
     (range(0, 64, 2), 8, "3.6"), (range(1, 64, 2), 8, None)],
)  # fmt: skip
def test_the_first_rank_warns_where_an_exchange_loads_the_network(monkeypatch, caplog, ranks, a_machine, load):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(a_machine))
    axis = Axis(tuple(ranks), 0)
    for device, reduce_dtype in (("cuda", "half_fp32_sum"), ("cpu", "half_fp32_sum"), ("cuda", "half")):
        precision = Precision(torch.bfloat16, reduce_dtype=reduce_dtype)
        sharding = Sharding(collectives=lambda axis, _: Collectives(axis))
        Links.connect(Topology(), Census([], [], [axis]), precision, sharding, torch.device(device))
    assert len(caplog.messages) == (load is not None)
    assert all(f"on 8 machines: each sends about {load} times the bytes" in line for line in caplog.messages)
