"""Simulated GPUs and NCCL name each of six planted faults that Gloo on a CPU may pass over; a run without one raises
no alarm under any delays, and trains what Gloo's ranks train, bit for bit. A copy to pinned memory has not arrived
before it is awaited, and pinned memory is not free before that; what lanes of a GPU count and what it sums in one
pass, and tables of the host, are those of a CPU.
"""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megamix import AdamW, DynamicLossScale, Precision, ShardedEngine, Sharding
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.examination import count_exponents
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.param_gather import ParamGather
from megamix.mixed_precision.row_stats import row_stats, sum_at_once, sum_in_chunks
from megamix.mixed_precision.step import put_table
from megamix.tools.ranks import RankFailure
from megamix.tools.verify.core.observed_step import rank_device
from tests.builders import loss_of, make_batch, make_model
from tests.conftest import FULL


def _train(reduce_dtype="half", steps=4):
    """Train as a user's loop does, in which nobody waits between two steps; return losses and weights."""
    device = rank_device()
    model = make_model(tied=False).to(device)
    precision = Precision(torch.float16, loss_scale=DynamicLossScale(2.0**8), reduce_dtype=reduce_dtype)
    sharding = Sharding(units=[*model.blocks], bucket_size=1500)
    engine = ShardedEngine(model, AdamW(lr=0.01), precision, sharding, clip_grad=0.5, compile_update=False)
    losses = []
    for step in range(steps):
        engine.backward(loss_of(model, make_batch(step, dist.get_rank(), 0).to(device)))
        losses.append(engine.step().loss)
    return [torch.stack(losses).cpu(), *(weight.cpu() for weight in engine.full_weights().values())]


def _in_step(harm):
    """Do something to the scale within each step."""
    right = DynamicLossScale.update_

    def wrong(self, *seen):
        harm(self.loss_scale)
        right(self, *seen)

    return mock.patch.object(DynamicLossScale, "update_", wrong)


def forward_does_not_wait():
    kept = []  # dropped it would wait

    def wrong(self, buckets):
        for bucket in self._buckets:
            kept.append(bucket.gather_pending)
            bucket.gather_pending = None

    return mock.patch.object(ParamGather, "wait", wrong)


def bucket_launched_too_early():
    right = GradReduce._in_turn
    return mock.patch.object(GradReduce, "_in_turn", lambda self, **_: right(self, all_are_full=True))


def freed_while_in_use():
    right = Bucket.launch_sum

    def wrong(self, *args):
        pending = right(self, *args)
        self.grads.untyped_storage().resize_(0)
        return pending

    return mock.patch.object(Bucket, "launch_sum", wrong)


WAITS = "where the host must not wait for the device"
IN_FLIGHT = ", which has not been waited for"
FAULTS = {
    "forward does not wait": (forward_does_not_wait, rf"reads memory of all_gather.*{IN_FLIGHT}"),
    "bucket launched too early": (bucket_launched_too_early, rf"writes to memory of reduce_scatter.*{IN_FLIGHT}"),
    "host read in the step": (
        lambda: _in_step(lambda scale: bool(scale > 0)), f"host read {WAITS}: _local_scalar_dense"
    ),
    "freed while in use": (freed_while_in_use, "memory was freed while reduce_scatter"),
    "number on the host": (
        lambda: _in_step(lambda scale: scale.view(1) + torch.zeros(1)), "Expected all tensors to be on the same device"
    ),
    "thread on another GPU": (
        lambda: _in_step(lambda _: ThreadPoolExecutor().submit(torch.cuda.Event().record).result()),
        r"rank 1 has touched the GPUs \[0, 1\]",
    ),
}  # fmt: skip


def _train_with(fault):
    with FAULTS[fault][0]():
        _train()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(gpu_ranks, fault):
    with pytest.raises(RankFailure, match=FAULTS[fault][1]):
        gpu_ranks(_train_with, 2, fault, deadline_s=30.0)


@pytest.mark.parametrize("reduce_dtype", ["half", "half_fp32_sum"])
def test_no_delays_raise_an_alarm_or_change_a_bit(run_ranks, gpu_ranks, reduce_dtype):
    want = run_ranks(_train, 2, reduce_dtype)
    for run in range(20 if FULL else 2):
        for got, expected in zip(gpu_ranks(_train, 2, reduce_dtype, seed=run % 5), want, strict=True):
            assert all(map(torch.equal, got, expected)), f"seed of delays {run % 5}"


def pinned_copies():
    """One is there once it was waited for, and its memory in use until then."""
    there, arrived = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    arrived.copy_(there, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    assert arrived.isnan().all()
    event.synchronize()
    assert event.query()
    assert torch.equal(arrived, torch.ones(3))
    there.copy_(arrived, non_blocking=True)
    arrived.fill_(2)
    with pytest.raises(RuntimeError, match="pinned memory was written to"):
        torch.cuda.synchronize()


def exponents():
    """Counted in lanes they are those of a CPU."""
    values, found = torch.randn(5000), []
    for device in ("cuda", "cpu"):
        counts = torch.zeros(256, dtype=torch.int64, device=device)
        count_exponents(values.to(device), counts)
        found.append(counts.cpu().tolist())
    assert found[0] == found[1]
    assert sum(found[0]) == 5000


def tables_of_the_host():
    """They reach the GPU from pinned memory, whatever torch's default device is."""
    with torch.device("cuda"):
        table = put_table([1.0, 2.0], torch.device("cuda"))
    assert table.is_cuda
    assert table.tolist() == [1.0, 2.0]


def sums_at_once():
    """In the one pass that a GPU's compiler gets, ranks' parts have the sum and statistics of a CPU's chunks."""
    parts, at_once, in_chunks = torch.randn(8, 19, 64).half(), torch.empty(19, 64), torch.empty(19 * 64)
    found = sum_at_once(parts, at_once)
    assert torch.equal(found, sum_in_chunks(row_stats, parts.view(8, -1), in_chunks))
    assert torch.equal(at_once.view(-1), in_chunks)


@pytest.mark.parametrize("case", [pinned_copies, exponents, tables_of_the_host, sums_at_once])
def test_a_simulated_gpu_is_like_one(gpu_ranks, case):
    gpu_ranks(case, 1)
