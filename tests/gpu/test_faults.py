"""Simulated GPUs and NCCL name each of twelve planted faults that Gloo on a CPU may pass over; a run without one raises
no alarm under any delays, and trains what Gloo's ranks train, bit for bit.
"""

import datetime
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megamix import AdamW, DynamicLossScale, Precision, ShardedEngine, Sharding
from megamix.comm.collectives import NcclCollectives, Pending
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.param_gather import ParamGather
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


def scratch_shared_too_early():
    right = NcclCollectives.reduce_scatter

    def wrong(self, *args):
        self._exchanges = deque((scratch, Pending()) for scratch, _ in self._exchanges)
        return right(self, *args)

    return mock.patch.object(NcclCollectives, "reduce_scatter", wrong)


def freed_while_in_use():
    right = Bucket.launch_sum

    def wrong(self, *args):
        pending = right(self, *args)
        self.grads.untyped_storage().resize_(0)
        return pending

    return mock.patch.object(Bucket, "launch_sum", wrong)


def two_groups(*, crossed):
    """Two groups share a stream; if `crossed`, one rank issues their collectives the other way round."""
    from tests.gpu import nccl

    nccl.one_stream = True
    groups = [dist.new_group([0, 1], datetime.timedelta(seconds=3)) for _ in range(2)]
    parts = [torch.ones(n, device="cuda") for n in (2, 3)]
    order = (1, 0) if crossed and dist.get_rank() == 0 else (0, 1)
    works = [dist.all_reduce(parts[number], group=groups[number], async_op=True) for number in order]
    for work in works:
        work.wait()
    assert all(bool((part == 2).all()) for part in parts)


@contextmanager
def group_of_some_ranks():
    """Of a world that is bound to its devices a group is split, for which every rank must come."""
    world = dist.group.WORLD
    world.bound_device_id, world._timeout_s = torch.device("cuda", dist.get_rank()), 3.0
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    yield


WAITS = "where the host must not wait for the device"
IN_FLIGHT = ", which has not been waited for"
FAULTS = {
    "forward does not wait": (forward_does_not_wait, rf"reads memory of all_gather.*{IN_FLIGHT}"),
    "update does not wait": (
        lambda: mock.patch.object(GradReduce, "wait", lambda self, bucket: None),
        rf"reads memory of reduce_scatter.*{IN_FLIGHT}",
    ),
    "bucket launched too early": (bucket_launched_too_early, rf"writes to memory of reduce_scatter.*{IN_FLIGHT}"),
    "scratch shared too early": (scratch_shared_too_early, rf"all_to_all.* writes to memory of all_to.*{IN_FLIGHT}"),
    "host read in the step": (
        lambda: _in_step(lambda scale: bool(scale > 0)), f"host read {WAITS}: _local_scalar_dense"
    ),
    "pageable copy in the step": (
        lambda: _in_step(lambda scale: scale + torch.tensor(0.0, device=scale.device)),
        f"copy from pageable memory {WAITS}",
    ),
    "freed while in use": (freed_while_in_use, "memory was freed while reduce_scatter"),
    "number on the host": (
        lambda: _in_step(lambda scale: scale.view(1) + torch.zeros(1)), "Expected all tensors to be on the same device"
    ),
    "strided tensor": (
        lambda: _in_step(lambda scale: dist.all_reduce(torch.zeros(2, 2, device=scale.device).T)),
        "all_reduce.*: Tensors must be contiguous",
    ),
    "thread on another GPU": (
        lambda: _in_step(lambda _: ThreadPoolExecutor().submit(torch.cuda.Event().record).result()),
        r"rank 1 has touched the GPUs \[0, 1\]",
    ),
    "crossed groups": (
        lambda: two_groups(crossed=True),
        r"all_reduce.* has not run.*last:.*\(3,\).*\(2,\).*last:.*\(2,\).*\(3,\)",
    ),
    "group of some ranks": (group_of_some_ranks, "ncclCommSplit.* has not run"),
}  # fmt: skip


def _train_with(fault):
    with FAULTS[fault][0]():
        _train("half_fp32_sum" if "scratch" in fault else "half")


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


def test_groups_in_one_order_share_a_stream(gpu_ranks):
    gpu_ranks(partial(two_groups, crossed=False), 2)
