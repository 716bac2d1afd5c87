"""Sums over ranks are taken in FP32 in rank order and rounded once, become inf beyond FP16's largest number, and are
the identity on a single rank.
"""

from functools import partial
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megamix.base import constants
from megamix.comm import collectives
from megamix.comm.collectives import Collectives, GlooCollectives, NcclCollectives, make_collectives
from megamix.comm.topology import Axis, Topology, local_device, meet_ranks

CPU = torch.device("cpu")


def _world():
    return make_collectives(Topology.current().world, CPU)


def _inputs(rank, numel, dtype):
    """Return numbers whose sums are often beyond FP16's largest number, 65,504."""
    return (torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 2e4).clamp(-6e4, 6e4).to(dtype)


def _reduce_scatter(dtype):
    """Start several reductions at once; their sums are those of one process, in rank order, bit for bit."""
    size, rank, numels = dist.get_world_size(), dist.get_rank(), (64, 6400, 128)
    ours = _world()
    assert isinstance(ours, GlooCollectives)
    pending, shards = [], []
    with mock.patch.object(constants, "SUM_CHUNK", 64):  # of the pieces that stay in cache
        for numel in numels:
            flat = _inputs(rank, numel * size, dtype)
            shards.append(flat.view(size, -1)[rank])
            pending.append(ours.reduce_scatter(flat, shards[-1]))
        for work in reversed(pending):
            work.wait()
            work.wait()
    for numel, shard in zip(numels, shards, strict=True):
        total = torch.zeros(numel)
        for other in range(size):
            total += _inputs(other, numel * size, dtype).view(size, -1)[rank].float()
        assert torch.equal(shard, total.to(dtype))
    assert shards[1].isinf().any() == (dtype == torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduce_scatter_sums_in_fp32_in_rank_order_and_to_inf_beyond_fp16(run_ranks, size, dtype):
    run_ranks(_reduce_scatter, size, dtype)


def _scratch_bytes():
    """Return the bytes of the scratch buffer: before a sum, after sums of 64, 128 and 64 elements, and
    after a release.
    """
    ours = _world()
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


def _exchange():
    """Start two exchanges at once, too large for a socket to hold; each sender then overwrites the sent tensor."""
    size, rank, numel = dist.get_world_size(), dist.get_rank(), 1 << 20

    def sent(index, sender):
        return _inputs(10 * index + sender, size * numel, torch.float16)

    received = []

    def use(flat, parts):
        received.append(parts.clone())
        flat.fill_(float("nan"))

    ours, flats = _world(), [sent(index, rank) for index in range(2)]
    pending = [ours.reduce_scatter(flat, flat, partial(use, flat)) for flat in flats]
    for work in (*pending, *pending):
        work.wait()
    for index, parts in enumerate(received):
        assert torch.equal(parts, torch.stack([sent(index, other).view(size, -1)[rank] for other in range(size)]))
    assert len(received) == 2


@pytest.mark.parametrize("size", [2, 3])
def test_an_exchange_brings_every_ranks_part_once(run_ranks, size):
    run_ranks(_exchange, size)


def test_nccl_exchanges_into_two_buffers_so_that_one_waits_for_the_last_but_one_alone(monkeypatch):
    waited, summed, pending = [], [], []

    def exchange(parts, grads, **_):
        return Mock(wait=lambda: waited.append(parts))

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    ours = NcclCollectives(Axis((0, 1)), CPU)
    for number, numel in enumerate((128, 64, 128, 128)):
        flat = torch.zeros(numel, dtype=torch.float16)
        pending.append(ours.reduce_scatter(flat, flat, lambda parts, number=number: summed.append(number)))
        assert summed == [*range(number - 1)]
        assert len(waited) == max(0, number - 1)
    for one in reversed(pending):
        one.wait()
    assert summed == [0, 1, 3, 2]
    places = [parts.data_ptr() for parts in waited]
    assert places[0] == places[3] != places[1] == places[2]


def test_an_exchange_that_fails_once_does_not_take_its_buffer_along(monkeypatch):
    failing = Mock(wait=Mock(side_effect=[RuntimeError("interrupted"), None]))
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: failing)
    ours, flat = GlooCollectives(Axis((0, 1)), CPU), torch.zeros(128)
    ours.reduce_scatter(flat, ours.own_part(flat))
    with pytest.raises(RuntimeError, match="interrupted"):
        ours.reduce_scatter(flat, ours.own_part(flat))
    ours.reduce_scatter(flat, ours.own_part(flat)).wait()


def _all_gather():
    size, rank, ours = dist.get_world_size(), dist.get_rank(), _world()
    flats = [torch.full((size, 64), float("nan"), dtype=torch.float16) for _ in range(3)]
    pending = []
    for index, flat in enumerate(flats):
        flat[rank] = 10 * index + rank
        pending.append(ours.all_gather(flat.view(-1), flat[rank]))
    for work in reversed(pending):
        work.wait()
    want = torch.arange(size, dtype=torch.float16).unsqueeze(1)
    assert all(torch.equal(flat, (want + 10 * index).expand(size, 64)) for index, flat in enumerate(flats))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_all_gathers_under_way_fill_each_its_own_buffer(run_ranks, size):
    run_ranks(_all_gather, size)


def _small_ones():
    rank, ours = dist.get_rank(), _world()
    flags = torch.tensor([rank == 0, True])
    ours.broadcast(flags)
    assert flags.tolist() == [True, True]  # the first rank's values
    table = ours.table(torch.tensor([rank, rank / 2], dtype=torch.float64))
    assert table.tolist() == [[0.0, 0.0], [1.0, 0.5]]
    assert ours.agree(True)
    assert not ours.agree(rank == 0)
    alone = [dist.new_group([other]) for other in range(2)][rank]
    assert Topology.current(alone).dp.size == 1
    assert type(make_collectives(Topology.current(alone).world, CPU)) is Collectives


def test_table_agreement_and_broadcast_and_a_rank_that_is_alone_in_its_group(run_ranks):
    run_ranks(_small_ones, 2)


def test_a_rank_alone_is_the_identity():
    alone = make_collectives(Axis(), CPU)
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
    apart = make_collectives(Axis((0, 1)), CPU)
    flat = torch.arange(4.0)
    assert apart.own_part(flat).tolist() == [0, 1]
    for call in (apart.table, apart.broadcast):
        with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] share an axis.* build the topology by Topology.conn"):
            call(flat)


def test_without_torchrun_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    meet_ranks(local_device(), timeout_s=7.0)
    assert Topology.current() == Topology()


def test_ranks_join_by_torchruns_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", begun := Mock())
    monkeypatch.setattr(dist, "rendezvous", lambda method, timeout: iter([(dist.HashStore(), 0, 1)]))
    meet_ranks(CPU, timeout_s=7.0)
    assert begun.call_args.args == ("gloo",)
    assert begun.call_args.kwargs["timeout"].total_seconds() == 7.0


def test_works_are_dropped_at_the_end_of_a_program_without_a_word(monkeypatch):
    works = collectives.Pending()
    for name in [name for name in vars(collectives) if not name.startswith("__")]:
        monkeypatch.setattr(collectives, name, None)  # as the interpreter clears a module
    works.__del__()
