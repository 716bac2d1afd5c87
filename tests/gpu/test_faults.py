"""Simulated GPUs and NCCL name each of twelve planted faults that Gloo on a CPU may pass over; a run without one raises
no alarm under any delays, and trains what Gloo's ranks train, bit for bit.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamix import AdamW, DynamicLossScale, Precision, ShardedEngine, Sharding
from megamix.comm.collectives import NcclCollectives, Pending
from megamix.mixed_precision.grad_reduce import GradReduce
from megamix.mixed_precision.param_gather import ParamGather
from megamix.mixed_precision.settings import ReduceDtype
from megamix.ranks import RankFailure
from megamix.verify.observe import rank_device
from tests.conftest import FULL
from tests.distributed.models import loss_of, make_batch, make_model


def _train(reduce_dtype: ReduceDtype = "half", steps: int = 4) -> list[Tensor]:
    """Train as a user's loop does, in which nobody waits between two steps; return losses and weights."""
    device = rank_device()
    model = make_model(tied=False).to(device)
    engine = ShardedEngine(
        model,
        AdamW(lr=0.01),
        Precision(torch.float16, loss_scale=DynamicLossScale(2.0**8), reduce_dtype=reduce_dtype),
        Sharding(units=[*model.blocks], bucket_size=1500),
        clip_grad=0.5,
        compile_update=False,
    )
    losses = []
    for step in range(steps):
        engine.backward(loss_of(model, make_batch(step, dist.get_rank(), 0).to(device)))
        losses.append(engine.step().loss)
    return [torch.stack(losses).cpu(), *(weight.cpu() for weight in engine.full_weights().values())]


def _in_step(harm: Callable[[Tensor], object]) -> object:
    """Do something to the scale within each step."""
    right = DynamicLossScale.update_

    def wrong(self: DynamicLossScale, *seen: Tensor) -> None:
        harm(self.loss_scale)
        right(self, *seen)

    return mock.patch.object(DynamicLossScale, "update_", wrong)


def _behind_launch(harm: Callable[[GradReduce, int], object]) -> object:
    """Do something to each bucket whose reduction has just been launched."""
    right = GradReduce.launch

    def wrong(self: GradReduce, full: int | None = None) -> None:
        before = len(self._pending)
        right(self, full)
        for bucket in range(before, len(self._pending)):
            harm(self, bucket)

    return mock.patch.object(GradReduce, "launch", wrong)


def forward_does_not_wait() -> object:
    kept: list[object] = []  # dropped it would wait

    def wrong(self: ParamGather, buckets: Sequence[int]) -> None:
        kept.append(self.pending.copy())
        self.pending.clear()

    return mock.patch.object(ParamGather, "wait", wrong)


def update_does_not_wait() -> object:
    return mock.patch.object(GradReduce, "wait", lambda self, bucket: self.grad_shards[bucket])


def bucket_launched_too_early() -> object:
    right = GradReduce.launch
    return mock.patch.object(GradReduce, "launch", lambda self, full=None: right(self))


@contextmanager
def scratch_shared_too_early() -> Iterator[None]:
    right = NcclCollectives.reduce_scatter

    def wrong(self: NcclCollectives, *args: object) -> Pending:
        self._exchanges = deque((scratch, Pending()) for scratch, _ in self._exchanges)
        return right(self, *args)

    with mock.patch.object(NcclCollectives, "reduce_scatter", wrong):
        yield


def host_read_in_the_step() -> object:
    return _in_step(lambda scale: bool(scale > 0))


def pageable_copy_in_the_step() -> object:
    return _in_step(lambda scale: scale + torch.tensor(0.0, device=scale.device))


def freed_while_in_use() -> object:
    return _behind_launch(lambda self, bucket: torch.ops.simulated.free(self._half_grads[bucket]))


def number_on_the_host() -> object:
    return _in_step(lambda scale: scale.view(1) + torch.zeros(1))


def strided_tensor() -> object:
    return _in_step(lambda scale: dist.all_reduce(torch.zeros(2, 2, device=scale.device).T))


def thread_on_another_gpu() -> object:
    def harm(scale: Tensor) -> None:
        thread = threading.Thread(target=torch.cuda.Event().record)
        thread.start()
        thread.join()

    return _in_step(harm)


@contextmanager
def crossed_groups() -> Iterator[None]:
    """Two groups of the same ranks share a stream; one rank issues their collectives the other way round."""
    groups = _groups_on_one_stream()
    both = [torch.ones(n, device="cuda") for n in (2, 3)]
    order = (0, 1) if dist.get_rank() else (1, 0)
    works = {number: dist.all_reduce(both[number], group=groups[number], async_op=True) for number in order}
    for number in (0, 1):
        works[number].wait()
    yield


def _groups_on_one_stream() -> list[dist.ProcessGroup]:
    from tests.gpu import nccl

    nccl.one_stream = True
    return [dist.new_group([0, 1], datetime.timedelta(seconds=3)) for _ in range(2)]


@contextmanager
def group_of_some_ranks() -> Iterator[None]:
    """Of a world that is bound to its devices a group is split, for which every rank must come."""
    world = dist.group.WORLD
    world.bound_device_id, world._timeout_s = torch.device("cuda", dist.get_rank()), 3.0
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    yield


IN_FLIGHT = ", which has not been waited for"
FAULTS: dict[Callable[[], object], tuple[ReduceDtype, str]] = {
    forward_does_not_wait: ("half", rf"reads memory of all_gather.*{IN_FLIGHT}"),
    update_does_not_wait: ("half", rf"reads memory of reduce_scatter.*{IN_FLIGHT}"),
    bucket_launched_too_early: ("half", rf"writes to memory of reduce_scatter.*{IN_FLIGHT}"),
    scratch_shared_too_early: ("half_fp32_sum", rf"all_to_all.* writes to memory of all_to_all.*{IN_FLIGHT}"),
    host_read_in_the_step: ("half", "host read where the host must not wait for the device: _local_scalar_dense"),
    pageable_copy_in_the_step: ("half", "copy from pageable memory where the host must not wait for the device"),
    freed_while_in_use: ("half", "memory was freed while reduce_scatter"),
    number_on_the_host: ("half", "Expected all tensors to be on the same device"),
    strided_tensor: ("half", "all_reduce.*: Tensors must be contiguous"),
    thread_on_another_gpu: ("half", r"rank 1 has touched the GPUs \[0, 1\]"),
    crossed_groups: ("half", r"all_reduce \[\(2,\)\].* has not run.*last:.*\(3,\).*\(2,\).*last:.*\(2,\).*\(3,\)"),
    group_of_some_ranks: ("half", "ncclCommSplit.* has not run"),
}


def _train_with(number: int) -> None:
    fault, (reduce_dtype, _) = [*FAULTS.items()][number]
    with fault():
        _train(reduce_dtype)


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault.__name__ for fault in FAULTS])
def test_a_planted_fault_is_named(gpu_ranks, number: int) -> None:
    with pytest.raises(RankFailure, match=[*FAULTS.values()][number][1]):
        gpu_ranks(_train_with, 2, number, deadline_s=30.0)


@pytest.mark.parametrize("reduce_dtype", ["half", "half_fp32_sum"])
def test_no_delays_raise_an_alarm_or_change_a_bit(run_ranks, gpu_ranks, reduce_dtype: ReduceDtype) -> None:
    want = run_ranks(_train, 2, reduce_dtype)
    for run in range(20 if FULL else 2):
        for got, expected in zip(gpu_ranks(_train, 2, reduce_dtype, seed=run % 5), want, strict=True):
            assert all(map(torch.equal, got, expected)), f"seed of delays {run % 5}"


def _two_groups_at_once() -> bool:
    first, second = _groups_on_one_stream()
    both = [torch.ones(4, device="cuda") for _ in range(2)]
    works = [
        dist.all_reduce(part, group=group, async_op=True) for part, group in zip(both, (first, second), strict=True)
    ]
    for work in works:
        work.wait()
    return all(bool((part == 2).all()) for part in both)


def test_groups_in_one_order_share_a_stream(gpu_ranks) -> None:
    assert gpu_ranks(_two_groups_at_once, 2) == [True, True]
