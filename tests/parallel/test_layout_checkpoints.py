"""A checkpoint saved by the real ranks of one mesh is, bit for bit, what those of any other load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.checkpoint.together import Together
from megamix.comm.collectives import make_collectives
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.replicas import DamagedError, check_replicas
from tests.parallel.layouts import Case, Owned, assemble, backward, build, states, world_rank

MESHES = [Case(), Case(tp_size=2), Case(dp_size=2), Case(dp_size=2, tp_size=2), Case(tp_size=4)]


def _together(engine: ShardedEngine) -> Together:
    cpu = torch.device("cpu")
    return Together(make_collectives(engine.topology.world, 0, torch.uint8, cpu), cpu)


def _save(case: Case, folder: Path) -> dict[str, list[Owned]]:
    _, engine = build(case)
    backward(case, engine, 0)
    engine.step()
    save(folder, take_snapshot(engine, RunRecord()), _together(engine))
    return states(engine)


def _load_each(case: Case, folders: list[Path]) -> list[tuple[dict[str, list[Owned]], float]]:
    """What this rank owns of each checkpoint, and the loss of a step that goes on from it."""
    found = []
    for folder in folders:
        _, engine = build(case)
        together = _together(engine)
        checkpoint = newest_checkpoint(folder, together)
        assert checkpoint is not None
        load(checkpoint, engine, together)
        check_replicas(engine)
        owned = states(engine)
        backward(case, engine, 1)
        found.append((owned, float(engine.step().loss)))
    return found


def test_every_mesh_loads_what_every_other_saved_and_goes_on(run_ranks, tmp_path: Path) -> None:
    folders, saved = [], []
    for number, case in enumerate(MESHES):
        folders.append(tmp_path / str(number))
        saved.append(_on_ranks(run_ranks, _save, case, folders[-1]))
    losses: list[list[float]] = [[] for _ in folders]
    for case in MESHES:
        loaded = _on_ranks(run_ranks, _load_each, case, folders)
        for number, owned in enumerate(saved):
            for kind in owned[0]:
                want, _ = assemble([rank[kind] for rank in owned])
                have, shared = assemble([rank[number][0][kind] for rank in loaded])
                assert not shared
                assert all(torch.equal(have[name], want[name]) for name in want), (case, folders[number], kind)
            if case.dp_size == 1:  # of 2, a step has other samples as well
                losses[number] += [rank[number][1] for rank in loaded]
    assert all(max(of_one) - min(of_one) <= 1e-5 for of_one in losses)


def _on_ranks(run_ranks, function, case: Case, argument) -> list:
    return [function(case, argument)] if case.world_size == 1 else run_ranks(function, case.world_size, case, argument)


def _weights_through_the_engine(case: Case) -> tuple[dict[str, Tensor], list[Owned], bool]:
    """(full weights, masters, whether another engine that is given the weights has the same masters)."""
    _, source = build(case)
    backward(case, source, 0)
    source.step()
    weights = source.full_weights()
    _, target = build(case)
    target.load_weights(weights)
    check_replicas(target)
    mine, loaded = states(source)["master"], states(target)["master"]
    return weights, mine, all(torch.equal(one.values, other.values) for one, other in zip(mine, loaded, strict=True))


@pytest.mark.parametrize("case", [Case(dp_size=2, tp_size=2), Case(model="llama", tied=False, tp_size=2)], ids=str)
def test_full_weights_go_out_and_in_on_any_mesh(run_ranks, case: Case) -> None:
    ranks = run_ranks(_weights_through_the_engine, case.world_size, case)
    masters, _ = assemble([owned for _, owned, _ in ranks])
    for weights, _, same in ranks:
        assert same
        assert weights.keys() == masters.keys() | ({"head.weight"} if case.tied else set())
        assert all(torch.equal(weights[name], masters[name]) for name in masters)


def _damage(case: Case, victim: int, name: str) -> str:
    _, engine = build(case)
    backward(case, engine, 0)
    engine.step()
    engine.param_gather.wait_all()
    if world_rank() == victim:
        for bucket, flat in zip(engine.layout.buckets, engine.half_params.flat, strict=True):
            for slot in bucket.slots:
                if slot.spec.name == name:
                    flat[slot.start] += 1
    try:
        check_replicas(engine)
    except DamagedError as error:
        return str(error)
    return "clean"


def test_a_copy_that_differs_is_named_on_every_rank_of_a_mesh(run_ranks) -> None:
    case = Case(dp_size=2, tp_size=2)
    for victim, name in ((3, "norm.weight"), (2, "blocks.0.attention.out.weight")):
        told = run_ranks(_damage, 4, case, victim, name)
        assert told[0] == told[1] == told[2] == told[3]
        assert f"rank {victim}: the half parameter {name}" in told[0]
    assert run_ranks(_damage, 4, case, 4, "norm.weight") == ["clean"] * 4
