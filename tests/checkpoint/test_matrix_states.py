"""States of matrices load on any mesh bit for bit: each comes to the rank that computes with its matrix."""

import pytest
import torch

from megamix.builders.objects import build_training
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import owned_parts, take_snapshot
from tests.checkpoint.state import all_or_none_of, full_value, shapes_of
from tests.conftest import FULL
from tests.tools.verify.catalogue.engine import MUON
from tests.tools.verify.jobs import make_config

LAYOUTS = {"dp1": 1, "tp2": 2, "pp2": 2, "dp2tp2": 4} if FULL else {"tp2": 2, "pp2": 2}  # and their ranks


def _engine(layout):
    """Return an engine of a model in which several matrices lie in one parameter."""
    config = make_config(layout, family="per_head", model={"num_layers": 4}, muon={"row_beta2": 0.9}, **MUON)
    return build_training(config, torch.device("cpu")).engine


def _want(engine, part):
    whole = full_value(part.param, part.state, shapes_of(engine)[part.param, part.state], 3)
    return whole[part.box.slices_in(part.box.whole(whole.shape))].reshape(-1)


def _saved(layout, folder):
    engine = _engine(layout)
    for part in owned_parts(engine):
        part.tensor.copy_(_want(engine, part))
    engine.publish_masters()
    save(folder, take_snapshot(engine, RunRecord()), all_or_none_of(engine))


def _loaded(layout, folders):
    """Return the number of this rank's states of matrices, and the parts that are not what was saved."""
    engine, wrong = _engine(layout), []
    for folder in folders:
        checkpoint = newest_checkpoint(folder, all_or_none_of(engine))
        assert checkpoint is not None
        for part in owned_parts(engine):
            part.tensor.zero_()
        load(checkpoint, engine, all_or_none_of(engine))
        parts = [part for part in owned_parts(engine) if not torch.equal(part.tensor, _want(engine, part))]
        wrong += [f"{part.state} of {part.param} at {part.box} from {folder.name}" for part in parts]
    return len(engine.held_states()), wrong


@pytest.mark.uncounted
def test_every_mesh_loads_what_every_other_saved(run_ranks, tmp_path):
    folders = [tmp_path / layout for layout in LAYOUTS]
    for (layout, size), folder in zip(LAYOUTS.items(), folders, strict=True):
        run_ranks(_saved, size, layout, folder)
    counts = set()
    for layout, size in LAYOUTS.items():
        told = run_ranks(_loaded, size, layout, folders)
        assert [wrong for _, wrong in told] == [[]] * size
        counts.add(sum(count for count, _ in told))
    assert len(counts) == 1  # every matrix has one home, whatever the mesh
