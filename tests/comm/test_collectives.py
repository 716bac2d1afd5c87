"""Sums over ranks are taken in FP32 in rank order and rounded once, become inf beyond FP16's largest number, and are
the identity on a single rank.
"""

from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamix import tuned
from megamix.comm import collectives
from megamix.comm.collectives import Collectives, GlooCollectives, NcclCollectives, make_collectives, sum_in_rank_order
from megamix.comm.topology import Axis, Topology, local_device, meet_ranks


def _inputs(rank, numel, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _reduce_scatter(dtype, numels):
    """Start several reductions at once; their sums are those of one process, in rank order, bit for bit."""
    size, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cpu")
    ours = make_collectives(Topology.current().world, device)
    assert isinstance(ours, GlooCollectives)
    pending, shards = [], []
    for numel in numels:
        flat = _inputs(rank, numel * size, dtype)
        shards.append(flat.view(size, -1)[rank])
        pending.append(ours.reduce_scatter(flat, shards[-1]))
    for work in reversed(pending):
        work.wait()
        work.wait()
    right = True
    for numel, shard in zip(numels, shards, strict=True):
        parts = torch.stack([_inputs(other, numel * size, dtype).view(size, -1)[rank] for other in range(size)])
        total = torch.zeros(numel)
        for part in parts:
            total += part.float()
        right &= torch.equal(shard, total.to(dtype))
    return right


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduce_scatter_sums_in_fp32_in_rank_order(run_ranks, size, dtype):
    assert all(run_ranks(_reduce_scatter, size, dtype, [64, 6400, 128]))


def _sum_of_two_finite_halves():
    flat = torch.full((128,), 40_000.0, dtype=torch.float16)  # finite: FP16's largest number is 65,504
    shard = flat.view(2, -1)[dist.get_rank()]
    ours = make_collectives(Topology.current().world, flat.device)
    ours.reduce_scatter(flat, shard).wait()
    return shard


def test_a_sum_beyond_fp16_is_inf(run_ranks):
    assert all(torch.isinf(shard).all() for shard in run_ranks(_sum_of_two_finite_halves, 2))


def _scratch_bytes():
    """Return the bytes of the scratch buffer: before a sum, after sums of 64, 128 and 64 elements, and
    after a release.
    """
    ours = make_collectives(Topology.current().world, torch.device("cpu"))
    (storage,) = ours.scratch
    seen = [storage.nbytes()]
    for numel in (64, 128, 64):
        flat = torch.ones(numel, dtype=torch.float16)
        ours.reduce_scatter(flat, ours.own_part(flat)).wait()
        seen.append(storage.nbytes())
    ours.release()
    return [*seen, storage.nbytes()]


def test_scratch_is_as_large_as_the_largest_sum_since_its_release(run_ranks):
    assert run_ranks(_scratch_bytes, 2) == [[0, 128, 256, 256, 0]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sum_is_the_same_whatever_the_piece_that_stays_in_cache(monkeypatch, dtype):
    parts = torch.stack([_inputs(rank, 1000, torch.bfloat16) for rank in range(5)])
    whole, pieces = torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=dtype)
    sum_in_rank_order(parts, whole)
    monkeypatch.setattr(tuned, "SUM_CHUNK", 64)
    sum_in_rank_order(parts, pieces)
    assert torch.equal(whole, pieces)


def _exchange():
    """Start two exchanges at once, too large for a socket to hold; each sender then overwrites the sent tensor."""
    size, rank, numel = dist.get_world_size(), dist.get_rank(), 1 << 20

    def sent(index, sender):
        return _inputs(10 * index + sender, size * numel, torch.float16)

    ours = make_collectives(Topology.current().world, torch.device("cpu"))
    flats = [sent(index, rank) for index in range(2)]
    received = []

    def use(parts, flat):
        received.append(parts.clone())
        flat.fill_(float("nan"))

    pending = [ours.reduce_scatter(flat, flat, lambda parts, flat=flat: use(parts, flat)) for flat in flats]
    for work in (*pending, *pending):
        work.wait()
    want = [torch.stack([sent(index, other).view(size, -1)[rank] for other in range(size)]) for index in range(2)]
    return len(received) == 2 and all(map(torch.equal, received, want))


@pytest.mark.parametrize("size", [2, 3])
def test_an_exchange_brings_every_ranks_part_once(run_ranks, size):
    assert all(run_ranks(_exchange, size))


class _Sent:
    """A work handle that notes that it was waited for."""

    waited: ClassVar[list[Tensor]] = []

    def __init__(self, parts):
        self._parts = parts

    def wait(self):
        self.waited.append(self._parts)


def test_nccl_exchanges_into_two_buffers_so_that_one_waits_for_the_last_but_one_alone(monkeypatch):
    monkeypatch.setattr(_Sent, "waited", [])
    monkeypatch.setattr(dist, "all_to_all_single", lambda parts, grads, **_: _Sent(parts))
    ours = NcclCollectives(Axis((0, 1)), torch.device("cpu"))
    flats, summed = [torch.zeros(numel, dtype=torch.float16) for numel in (128, 64, 128, 128)], []
    pending = []
    for number, flat in enumerate(flats):
        pending.append(ours.reduce_scatter(flat, flat, lambda parts, number=number: summed.append(number)))
        assert summed == [*range(number - 1)]
        assert len(_Sent.waited) == max(0, number - 1)
    for one in reversed(pending):
        one.wait()
    assert summed == [0, 1, 3, 2]
    places = [parts.data_ptr() for parts in _Sent.waited]
    assert places[0] == places[3] != places[1] == places[2]


def test_an_exchange_that_fails_once_does_not_take_its_buffer_along(monkeypatch):
    failing = Mock(wait=Mock(side_effect=[RuntimeError("interrupted"), None]))
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: failing)
    ours, flat = GlooCollectives(Axis((0, 1)), torch.device("cpu")), torch.zeros(128)
    ours.reduce_scatter(flat, ours.own_part(flat))
    with pytest.raises(RuntimeError, match="interrupted"):
        ours.reduce_scatter(flat, ours.own_part(flat))
    ours.reduce_scatter(flat, ours.own_part(flat)).wait()


def _all_gather():
    size, rank = dist.get_world_size(), dist.get_rank()
    ours = make_collectives(Topology.current().world, torch.device("cpu"))
    flats = [torch.full((size, 64), float("nan"), dtype=torch.float16) for _ in range(3)]
    pending = []
    for index, flat in enumerate(flats):
        flat[rank] = 10 * index + rank
        pending.append(ours.all_gather(flat.view(-1), flat[rank]))
    for work in reversed(pending):
        work.wait()
    want = torch.arange(size, dtype=torch.float16).unsqueeze(1)
    return all(torch.equal(flat, (want + 10 * index).expand(size, 64)) for index, flat in enumerate(flats))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_all_gathers_under_way_fill_each_its_own_buffer(run_ranks, size):
    assert all(run_ranks(_all_gather, size))


def _small_ones():
    rank = dist.get_rank()
    ours = make_collectives(Topology.current().world, torch.device("cpu"))
    flags = torch.tensor([rank == 0, True])
    ours.broadcast(flags)
    table = ours.table(torch.tensor([rank, rank / 2], dtype=torch.float64))
    return table, ours.agree(True), ours.agree(rank == 0), flags


def test_table_agreement_and_broadcast(run_ranks):
    for table, all_agree, one_disagrees, flags in run_ranks(_small_ones, 2):
        assert table.tolist() == [[0.0, 0.0], [1.0, 0.5]]
        assert all_agree
        assert not one_disagrees
        assert flags.tolist() == [True, True]  # the first rank's values


def test_a_rank_alone_is_the_identity():
    alone = make_collectives(Axis(), torch.device("cpu"))
    assert type(alone) is Collectives
    flat = torch.arange(4.0)
    alone.reduce_scatter(flat, flat).wait()
    received = []
    alone.reduce_scatter(flat, flat, received.append).wait()
    alone.all_gather(flat, flat).wait()
    alone.broadcast(flat)
    assert flat.tolist() == [0, 1, 2, 3]
    assert [parts.tolist() for parts in received] == [[[0, 1, 2, 3]]]
    assert alone.table(flat).tolist() == [[0, 1, 2, 3]]
    assert (alone.agree(True), alone.agree(False)) == (True, False)


def test_ranks_that_nothing_connects_are_refused_when_called_and_not_before():
    apart = make_collectives(Axis((0, 1)), torch.device("cpu"))
    flat = torch.arange(4.0)
    assert apart.own_part(flat).tolist() == [0, 1]
    calls = [
        lambda: apart.reduce_scatter(flat, flat[:2]), lambda: apart.all_gather(flat, flat[:2]),
        lambda: apart.table(flat), lambda: apart.gather(flat), lambda: apart.sum_parts(flat.view(2, 2)),
        lambda: apart.exchange(flat, flat, [2, 2], [2, 2]), lambda: apart.broadcast(flat), lambda: apart.agree(True),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] share an axis.* build the topology by Topology.conn"):
            call()


def _group_of_one():
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    return Topology.current(group).dp.size == 1 and _reduce_scatter_in(group)


def _reduce_scatter_in(group):
    flat = torch.arange(64.0)
    ours = make_collectives(Topology.current(group).world, flat.device)
    ours.reduce_scatter(flat, flat).wait()
    ours.all_gather(flat, flat).wait()
    return type(ours) is Collectives and torch.equal(flat, torch.arange(64.0))


def test_a_rank_alone_in_a_gloo_group_sends_nothing(run_ranks):
    assert run_ranks(_group_of_one, 2) == [True, True]


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    meet_ranks(local_device(), timeout_s=7.0)
    assert Topology.current() == Topology()


def test_ranks_join_by_torchruns_environment(monkeypatch):
    calls = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **kwargs: calls.append((backend, kwargs["timeout"]))
    )
    monkeypatch.setattr(dist, "rendezvous", lambda method, timeout: iter([(dist.HashStore(), 0, 1)]))
    meet_ranks(torch.device("cpu"), timeout_s=7.0)
    ((backend, timeout),) = calls
    assert (backend, timeout.total_seconds()) == ("gloo", 7.0)


def test_works_are_dropped_at_the_end_of_a_program_without_a_word(monkeypatch):
    works = collectives.Pending()
    for name in [name for name in vars(collectives) if not name.startswith("__")]:
        monkeypatch.setattr(collectives, name, None)  # as the interpreter clears a module
    works.__del__()
