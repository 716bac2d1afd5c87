"""Stages that share a layer agree on one overflow flag, one norm and one checkpoint, and own each element once."""

import pytest
import torch
from torch import nn

from megamix import AdamW, Precision, ShardedEngine, Sharding
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.comm.topology import Topology
from megamix.log.culprits import gather_peaks
from megamix.mixed_precision.settings import Placement
from megamix.train.replicas import check_replicas
from tests.checkpoint.state import all_or_none_of
from tests.parallel.layouts import are_equal, assemble, contents, states

LAYERS = {"first": (5, 7), "tied": (11, 3), "last": (4, 9)}


class Stage(nn.Module):
    """Some layers; the loss is linear in each, so that their gradients are known."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            generator = torch.Generator().manual_seed(len(name))
            self.register_parameter(name, nn.Parameter(torch.randn(LAYERS[name], generator=generator)))

    def forward(self, factor):
        parts = [param.sum() * factor * (number + 1) for number, param in enumerate(self.parameters())]
        return torch.stack(parts).sum()


STAGES = (("first", "tied"), ("tied", "last"))


def _build(pp_size):
    """Build two stages that both hold one layer, or all in one process with the sum of both gradients."""
    topology = Topology.connect(pp=pp_size)
    placements = {}
    if pp_size == 2:  # both hold it, and each adds its gradient
        placements["tied"] = Placement(LAYERS["tied"], (0, 0), topology.pp)
    model = Stage(STAGES[topology.pp.rank] if pp_size == 2 else tuple(LAYERS))
    sharding = Sharding(topology=topology, placements=placements)
    return ShardedEngine(model, AdamW(lr=0.1), Precision(torch.float32), sharding, 1.0, compile_update=False)


def _step(engine, factor):
    """Return (norm, whether the step was skipped, the parameters whose gradient was not finite)."""
    engine.backward(engine(factor))
    result = engine.step()
    faults = [peak.name for peak in gather_peaks(engine, result.by_piece, result.peak_rows) if peak.fault is not None]
    return float(result.grad_norm), bool(result.found_inf), faults


def _train_and_save(folder):
    engine = _build(2)
    one = _step(engine, 0.5)
    before = contents(engine)
    # The second stage alone has an inf.
    other = _step(engine, torch.inf if engine.topology.pp.rank else 0.5)
    assert are_equal(before, contents(engine))
    check_replicas(engine)
    save(folder, take_snapshot(engine, RunRecord()), all_or_none_of(engine))
    return one, other[1:], engine.plan.param_names, states(engine)


def test_two_stages_that_share_a_layer_are_one_model(run_ranks, tmp_path):
    ranks = run_ranks(_train_and_save, 2, tmp_path)
    # Gradients: first 0.5; tied 0.5 * 2 in the first stage and 0.5 in the second; last 0.5 * 2.
    squares = 0.25 * 35 + 1.5**2 * 33 + 1.0 * 36
    for norm_and_flag, overflow, names, _ in ranks:
        assert norm_and_flag[0] == pytest.approx(squares**0.5, rel=1e-6)
        assert norm_and_flag[1:] == (False, [])
        assert overflow == (True, ["tied", "last"])
        assert names == ["first", "tied", "last"]
    # Every element is owned once, the shared layer's by both stages, and any layout loads what they saved.
    alone = _build(1)
    load(newest_checkpoint(tmp_path, all_or_none_of(alone)), alone, all_or_none_of(alone))
    for kind, owned in states(alone).items():
        have, _ = assemble([owned])
        want, shared = assemble([rank[-1][kind] for rank in ranks])
        assert not shared
        assert all(torch.equal(have[name], want[name]) for name in LAYERS)


def test_a_frozen_parameter_is_refused_where_ranks_divide_the_model():
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="parameter bias is frozen, but ranks that divide the model must train every"):
        ShardedEngine(model, AdamW(lr=0.1), sharding=Sharding(topology=Topology.place(0, tp=2)))
