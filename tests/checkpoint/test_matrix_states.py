"""Blocks of tensor and pipeline ranks load into each other bit for bit, wherever a chunk of a file ends; states of
matrices come to the rank that computes with the matrix.
"""

from unittest import mock

import torch

from megamix import tuned
from megamix.builders.objects import build_training
from megamix.checkpoint.snapshot import owned_parts
from tests.checkpoint.state import load_newest, save_now, wanted
from tests.conftest import FULL
from tests.tools.verify.catalogue.engine import MUON
from tests.tools.verify.jobs import make_config

LAYOUTS = {"tp2": 2, "pp2": 2, "dp2tp2": 4} | ({"dp1": 1} if FULL else {})  # and their ranks


def _engine(layout):
    """Return an engine of a model in which several matrices lie in one parameter."""
    config = make_config(layout, family="per_head", model={"num_layers": 4}, muon={"row_beta2": 0.9}, **MUON)
    return build_training(config, torch.device("cpu")).engine


def _saved(layout, folder):
    engine = _engine(layout)
    for part in owned_parts(engine):
        part.tensor.copy_(wanted(engine, part, 3))
    engine.publish_masters()
    save_now(folder, engine)


def _loaded(layout, folders):
    """Return the number of this rank's states of matrices, and the parts that are not what was saved."""
    engine, wrong = _engine(layout), []
    for folder in folders:
        for part in owned_parts(engine):
            part.tensor.zero_()
        with mock.patch.object(tuned, "READ_AHEAD", 500):  # bytes: rows and boxes begin and end anywhere in a chunk
            load_newest(folder, engine)
        parts = [part for part in owned_parts(engine) if not torch.equal(part.tensor, wanted(engine, part, 3))]
        wrong += [f"{part.state} of {part.param} at {part.box} from {folder.name}" for part in parts]
    return len(engine.held_states()), wrong


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
