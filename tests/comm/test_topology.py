"""Every rank has one place in the mesh, and an axis connects the right ranks. An impossible size is refused with a
possible one.
"""

import io
import itertools
import os
import re
import sys
from unittest import mock
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from megamix.comm.host import host_collectives
from megamix.comm.topology import Topology, leave_ranks
from megamix.config import check_world_size, config_from_dict
from tests.config.test_errors import changed, problems_of
from tests.conftest import FULL

EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 64}
MESHES = [(1, 1, 1), (1, 4, 1), (2, 2, 2), (3, 1, 2), (4, 3, 1), (1, 2, 8), (4, 8, 8), *[(16, 64, 16)] * FULL]


@pytest.mark.parametrize("sizes", MESHES)
def test_every_rank_has_one_place_with_tensor_parallel_ranks_as_neighbours(sizes):
    pp_size, dp_size, tp_size = sizes
    places = itertools.product(range(pp_size), range(dp_size), range(tp_size))
    for rank, (pp_rank, dp_rank, tp_rank) in enumerate(places):
        here = Topology.place(rank, pp=pp_size, dp=dp_size, tp=tp_size)
        assert (here.pp.rank, here.dp.rank, here.tp.rank) == (pp_rank, dp_rank, tp_rank)
        assert (here.pp.size, here.dp.size, here.tp.size) == sizes
        assert here.stage.size == dp_size * tp_size
        for axis in (here.world, here.pp, here.dp, here.tp, here.stage):
            assert axis.ranks[axis.rank] == rank
    with pytest.raises(ValueError, match=f"from 0 to {rank}"):
        Topology.place(rank + 1, pp=pp_size, dp=dp_size, tp=tp_size)


def _sums(sizes):
    """Return the sums of the ranks' numbers over each axis."""
    here, sums = Topology.connect(**sizes), []
    axes = (here.pp, here.dp, here.tp, here.stage, here.world)
    for axis in (here.along("ep"), here.owners_of("ep")) if "ep_size" in sizes else axes:
        total = torch.tensor(float(dist.get_rank()))
        if axis.group is not None:
            dist.all_reduce(total, group=axis.group)
        assert float(total) == sum(axis.ranks)
        sums.append(float(total))
    return sums


@pytest.mark.parametrize(
    ("sizes", "sums"),
    [
        # dp2 x tp2: 0 1 | 2 3 are tensor-parallel neighbours. pp2 x dp2: a stage is 0 1 or 2 3.
        ({"tp": 2}, [[0, 2, 1, 6, 6], [1, 4, 1, 6, 6], [2, 2, 5, 6, 6], [3, 4, 5, 6, 6]]),
        ({"pp": 2}, [[2, 1, 0, 1, 6], [4, 1, 1, 1, 6], [2, 5, 2, 5, 6], [4, 5, 3, 5, 6]]),
        # The ranks of an ep group, and the owners of its blocks.
        ({"ep_size": 2}, [[1, 2], [1, 4], [5, 2], [5, 4]]),
        ({"ep_size": 2, "cp": 2}, [[1, 2], [1, 4], [5, 2], [5, 4]]),
        ({"ep_size": 4}, [[6, 0], [6, 1], [6, 2], [6, 3]]),
        ({"ep_size": 2, "pp": 2}, [[1, 0], [1, 1], [5, 2], [5, 3]]),
        ({"ep_size": 2, "replicas": 2}, [[1, 0], [1, 1], [5, 2], [5, 3]]),
    ],
)
def test_each_axis_connects_its_own_ranks(run_ranks, sizes, sums):
    assert run_ranks(_sums, 4, sizes) == sums


def _connect_badly():
    with pytest.raises(ValueError, match="tp 3 = 3 must divide the number of ranks, which is 4"):
        Topology.connect(tp=3)


def test_a_mesh_that_does_not_divide_the_world_is_refused(run_ranks):
    run_ranks(_connect_badly, 4)


@pytest.mark.parametrize(
    ("world_size", "sizes", "told"),
    [
        (4, {"tensor": {"size": 2}}, None),
        (3, {"tensor": {"size": 2}}, "tensor.size: got 2, tensor.size 2 must divide .* is 3; start a multiple of 2"),
        (4, {"replicas": 4, "tensor": {"size": 2}}, "replicas: got 4, .* tensor.size 2 must .* start a multiple of 8"),
        (8, {"tensor": {"size": 2}, "dp_size": 2}, "dp_size: got 2, .* to 4 ranks, .*; write dp_size = 4 or start 4"),
        (8, {"expert": {"size": 4}, "context": {"size": 2}}, None),
        (12, {"expert": {"size": 8}, "context": {"size": 2}}, "expert.size: got 8, must divide .* 12, .* size = 4"),
    ],
)
def test_a_bad_mesh_names_one_that_works(world_size, sizes, told):
    model = {"experts": EXPERTS} if "expert" in sizes else {}
    training = {"micro_batch_size": 1, "global_batch_size": 48}
    found = check_world_size(config_from_dict(changed(model=model, training=training, parallelism=sizes)), world_size)
    assert [bool(re.match(f"parallelism.{told}", problem)) for problem in found] == [True] * (told is not None)


def test_what_tensor_parallelism_cuts_must_divide_and_all_of_it_is_told():
    model = {"hidden_size": 96, "num_heads": 6, "num_kv_heads": 3, "vocab_size": 513, "seq_len": 33}
    model["ffn_hidden_size"] = 192
    found = problems_of(changed(model=model, parallelism={"tensor": {"size": 4}}))
    told = ["num_heads 6", "vocab_size 513", "num_kv_heads 3", "seq_len 33"]
    for problem, word in zip(found, told, strict=True):
        assert f", must divide model.{word};" in problem
        assert problem.endswith("write size = 3")
    assert len(problems_of(changed(model=model, parallelism={"tensor": {"size": 4, "sequence_parallel": False}}))) == 3
    config_from_dict(changed(model=model, parallelism={"tensor": {"size": 3}}))


@pytest.mark.parametrize("ep_size", [1, 2, 8, 64, 1024])
def test_expert_parallel_ranks_are_neighbours_among_the_owners(ep_size):
    sizes = {"pp": 8, "replicas": 2, "dp": 64, "cp": 16}  # 16,384 ranks
    for rank in (0, 1, 31, 2047, 2048, 7319, 16383):
        here, without = Topology.place(rank, **sizes, ep_size=ep_size), Topology.place(rank, **sizes)
        group, owners = here.along("ep"), here.owners_of("ep")
        first = here.owners.rank // ep_size * ep_size
        assert group.ranks == here.owners.ranks[first : first + ep_size]
        assert owners.ranks == here.owners.ranks[group.rank :: ep_size]
        assert group.ranks[group.rank] == rank == owners.ranks[owners.rank]
        for name in ("owners", "replicas", "stage", "data", "parts", "readers", "counts_sums", "saves_shard"):
            assert getattr(here, name) == getattr(without, name)
        assert here.owners_of(None) == without.owners_of(None)
    assert str(here).endswith(f", ep {ep_size}") == (ep_size > 1)


def test_an_ep_size_that_does_not_divide_the_owners_is_refused_with_their_sizes():
    with pytest.raises(ValueError, match=r"ep_size 4 must divide dp 3 \* cp 2 = 6, .*; take 2"):
        Topology.place(0, pp=4, dp=3, cp=2, ep_size=4)
    with pytest.raises(ValueError, match="there is no axis 'ep'"):
        Topology.place(0, dp=2, ep_size=2).along("ep", "dp")


def test_an_ep_size_that_does_not_fit_the_model_is_refused():
    section = {"expert": {"size": 3}, "tensor": {"size": 2}}
    assert problems_of(changed(model={"experts": EXPERTS}, parallelism=section)) == (
        "parallelism.expert.size: got 3, must divide model.experts.num_experts 8; write size = 2",
        "parallelism.tensor.size: got 2, but ranks along tp do not divide experts; "
        "write parallelism.tensor = false, and [parallelism.expert] for memory",
    )
    (told,) = problems_of(changed(parallelism={"expert": {"size": 2}}))
    assert told.startswith("parallelism.expert.size: got 2, but the model has no experts; write parallelism.expert = f")


def _without_an_interface():
    said = "GLOO_SOCKET_IFNAME is none0; set it to the network interface of the nodes"
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "none0"}), pytest.raises(RuntimeError, match=said):
        host_collectives(Topology.current().world, 5.0)


def test_an_interface_that_is_not_there_is_named_with_its_variable(run_ranks):
    run_ranks(_without_an_interface, 2)


def test_groups_are_left_where_all_ranks_leave(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", left := Mock())
    monkeypatch.setattr(sys, "excepthook", hook := Mock())
    leave_ranks(alike=True)
    assert left.call_count == 1
    assert sys.excepthook is hook


@pytest.mark.parametrize("hook", [lambda *error: print("told"), Mock(side_effect=ZeroDivisionError)])
def test_else_a_process_ends_at_once_has_written_all_and_told_its_error(monkeypatch, capfd, hook):
    out = io.TextIOWrapper(io.BytesIO())  # written only when it is full, as to a file or pipe
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", left := Mock())
    monkeypatch.setattr(os, "_exit", ended := Mock())
    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr(sys, "stdout", out)
    leave_ranks(alike=False)
    sys.excepthook(ValueError, ValueError("of this rank"), None)
    assert (left.call_count, ended.call_args) == (0, call(1))
    assert (out.buffer.getvalue() + capfd.readouterr().err.encode()) in (b"told\n", b"ValueError: of this rank\n")
