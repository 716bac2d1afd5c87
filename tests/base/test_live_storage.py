"""Live storage is counted once, at its present size, and its peak is kept."""

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megamix.base.live_storage import LiveStorage

KB = 250  # FP32 elements


def test_the_peak_is_the_highest_sum_of_what_lived_at_once():
    with LiveStorage() as tracker:
        first = torch.zeros(4 * KB)
        view = first.view(2, -1)  # no storage of its own
        second = first + 1
        assert tracker.live_bytes == 8000
        del first
        assert tracker.live_bytes == 8000  # the view still holds it
        del view
        assert tracker.live_bytes == 4000
        third = second[:KB].clone()
        assert (tracker.live_bytes, tracker.peak_bytes) == (5000, 8000)
        del second, third
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, 8000)


def test_what_was_made_before_counts_when_touched():
    old = torch.zeros(KB)
    with LiveStorage() as tracker:
        new = torch.zeros(KB)
        assert tracker.live_bytes == 1000
        new.copy_(old)
        assert tracker.peak_bytes == 2000


def test_a_storage_resized_to_nothing_is_not_counted_at_a_peak():
    with LiveStorage() as tracker:
        emptied = torch.zeros(8 * KB)
        emptied.untyped_storage().resize_(0)  # as FSDP frees a gathered weight: no operation tells of it
        kept = [torch.zeros(KB) for _ in range(10)]
        assert tracker.peak_bytes == 10_000
        emptied.untyped_storage().resize_(32_000)
        emptied.zero_()
        assert tracker.peak_bytes == 42_000
        assert len(kept) == 10


def test_a_fake_tensor_has_no_memory():
    with LiveStorage() as tracker, FakeTensorMode():
        torch.zeros(KB).add(1)
    assert tracker.peak_bytes == 0


def _sharded_bytes():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.ones(8 * KB)
    with LiveStorage() as tracker:
        sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None).clone()
        before = tracker.live_bytes
        doubled = sharded * 2
        added = tracker.live_bytes - before
        assert doubled.to_local().sum() == 2 * sharded.to_local().numel()
    return added, sharded.to_local().numel() * 4


def test_of_a_sharded_tensor_the_local_part_counts(run_ranks):
    assert run_ranks(_sharded_bytes, 2) == [(4000, 4000), (4000, 4000)]
