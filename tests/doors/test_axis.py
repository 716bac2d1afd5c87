"""With an axis that a program adds, replicas over dp train as one process that adds in the same order, bit for bit, and
resume.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamix import ShardedEngine, Sharding
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.comm.collectives import make_collectives
from megamix.comm.topology import Topology
from tests.checkpoint.state import all_or_none_of
from tests.distributed.models import loss_of, make_batch, make_model
from tests.doors.replica_axis import connect_replicas, replicate
from tests.engines import make_engine

STEPS = 4


def _engine(topology: Topology | None = None) -> ShardedEngine:
    divided = {} if topology is None else {"topology": topology, "collectives": replicate(topology)}
    sharding = Sharding(bucket_size=1111, **divided)
    # Clipped, so that a share that is counted twice is seen.
    return make_engine(sharding=sharding, clip_grad=0.5)


def _reference() -> tuple[list[dict[str, Tensor]], list[float]]:
    """One process: the gradients of four ranks, added along dp and then along x."""
    engine, seen, norms = _engine(), [], []
    params = dict(engine.module.named_parameters())
    for step in range(STEPS):
        weights = {name: param.detach().clone() for name, param in params.items()}
        grads: list[dict[str, Tensor]] = []
        for rank in range(4):
            plain = make_model()
            plain.load_state_dict(weights, strict=False)
            loss_of(plain, make_batch(step, rank, 0)).backward()
            grads.append({name: param.grad for name, param in plain.named_parameters()})
        sums = {name: (grads[0][name] + grads[1][name]) + (grads[2][name] + grads[3][name]) for name in params}
        # A loss that has this gradient.
        engine.backward(sum((param * sums[name]).sum() for name, param in params.items()), weight=4)
        norms.append(float(engine.step().grad_norm))
        seen.append({name: param.detach().clone() for name, param in params.items()})
    return seen, norms


def _train(engine: ShardedEngine, steps: range) -> list[tuple[dict[str, Tensor], float]]:
    seen = []
    for step in steps:
        engine.backward(loss_of(engine.module, make_batch(step, engine.topology.data.rank, 0)))
        norm = float(engine.step().grad_norm)
        seen.append(({name: param.detach().clone() for name, param in engine.module.named_parameters()}, norm))
    return seen


def _replicas(folder: Path) -> tuple[list[int], list[tuple[dict[str, Tensor], float]], bool, bool]:
    """(sizes and places, weights and norms of each step, a resumed run ends alike, the replicas are bitwise equal)."""
    topology = connect_replicas(2)
    engine = _engine(topology)
    seen = _train(engine, range(2))
    all_or_none = all_or_none_of(engine)
    save(folder, take_snapshot(engine, RunRecord()), all_or_none)
    seen += _train(engine, range(2, STEPS))
    again = _engine(topology)
    _train(again, range(7, 8))  # other weights
    checkpoint = newest_checkpoint(folder, all_or_none)
    assert checkpoint is not None
    load(checkpoint, again, all_or_none)
    resumed = _train(again, range(2, STEPS))
    alike = all(torch.equal(seen[-1][0][name], weight) for name, weight in resumed[-1][0].items())
    masters = torch.cat([tensor for owned in engine.owned_ranges() for tensor in owned.tensors.values()])
    x = topology.along("x")
    copies = make_collectives(x, engine.device).table(masters)
    places = [topology.world.size, topology.data.size, topology.owners.size, x.rank, topology.data.rank]
    return places, seen, alike, torch.equal(copies[0], copies[1])


def test_replicas_over_dp_train_as_one_process_and_resume(run_ranks, tmp_path: Path) -> None:
    weights, norms = _reference()
    for rank, (places, seen, resumed_alike, copies_equal) in enumerate(run_ranks(_replicas, 4, tmp_path)):
        assert places == [4, 4, 2, rank // 2, rank]
        assert copies_equal
        assert resumed_alike
        for step, (found, norm) in enumerate(seen):
            assert norm == norms[step]
            assert all(torch.equal(found[name], weight) for name, weight in weights[step].items()), step


class _Own(nn.Linear):
    """On each rank other weights, frozen and not, and another buffer."""

    def __init__(self) -> None:
        torch.manual_seed(dist.get_rank())
        super().__init__(3, 2)
        self.bias.requires_grad_(False)
        self.register_buffer("tally", torch.rand(2))


def _start_on_two_replicas() -> list[Tensor]:
    sharding = Sharding(topology=connect_replicas(2))
    engine = make_engine(_Own(), sharding=sharding)
    return [tensor.clone() for tensor in engine.full_weights().values()]


def test_replicas_that_were_built_from_other_seeds_start_as_the_first(run_ranks) -> None:
    first, second = run_ranks(_start_on_two_replicas, 2)
    assert len(first) == 3
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="the mesh has no axis 'cp'; it has x, dp"):
        Topology({"x": 2, "dp": 2}, 3).along("cp")
