"""With `half_fp32_sum` halves travel, and the sum, in pieces of any size, does not overflow beyond FP16. The first rank
warns where that loads the network.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamix import AdamW, Precision, ShardedEngine, Sharding, StaticLossScale
from megamix.base import constants
from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis, Topology
from megamix.mixed_precision.census import Census, Links
from tests.distributed.reference import train_reference


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
    with mock.patch.multiple(constants, SUM_CHUNK=32, SUMMED_CHUNK=64):  # two pieces, each in two
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
        assert torch.equal(weight, want.states["weight"]["master"][:200])
    for found_inf, _, weight in run_ranks(_train_where_every_sum_exceeds_fp16, 2, "half"):
        assert found_inf == [True] * 3
        assert torch.equal(weight, torch.linspace(-1, 1, 200))


@pytest.mark.parametrize(
    ("ranks", "a_machine", "load"),
    [((0, 8), 8, None), (range(8), 8, None), (range(4), 2, None), (range(64), 8, "7.1"),
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
