"""A checkpoint of any number of ranks, bucket size or `shard` loads into any other, bit for bit; blocks of tensor and
pipeline ranks, too, wherever a chunk of a file ends; states of matrices come to the rank that computes with the matrix.
A loss scale continues by its rule and the current settings. A checkpoint that does not fit is refused with every kind
of difference, and changes nothing.
"""

import itertools
import logging
from copy import deepcopy
from typing import get_args
from unittest import mock

import pytest
import torch

from megamix import (
    NAG,
    AdamW,
    DynamicLossScale,
    HeadroomLossScale,
    MegatronLossScale,
    Muon,
    ParamGroup,
    Precision,
    StaticLossScale,
    TorchLossScale,
)
from megamix.base import constants
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.phase import Phase
from megamix.checkpoint.snapshot import owned_parts, take_snapshot
from megamix.checkpoint.verify import read_checkpoint
from megamix.mixed_precision.settings import Shard
from megamix.mixed_precision.update_slice import MASTER
from megamix.train.engine import build_training
from tests.builders import loss_of, make_batch, make_engine, make_model, train_steps
from tests.checkpoint.state import fill, fp16_engine, load_newest, resume_each, save_now, save_steps, wanted
from tests.conftest import FULL
from tests.tools.verify.catalogue.engine import MUON
from tests.tools.verify.jobs import make_config

SIZES, BUCKETS = (1, 2, 3, 4), (1, 1111, None)
# Every pair of sizes, either way; the bucket sizes differ between the two sides.
EVERY = [*itertools.product(SIZES, BUCKETS, ["states"])]
SAVED = EVERY if FULL else [(1, 1111, "states"), (2, 1, "states"), (3, None, "states"), (4, 1111, "states")]
LOADED = EVERY if FULL else [(1, 1, "states"), (2, 1111, "states"), (3, 1111, "states"), (4, None, "states")]
# Every pair of what ranks hold a share of, and of sizes, either way.
SHARED = [*zip((1, 2, 4), (1111,) * 3, get_args(Shard), strict=True)]
SHARED_OTHERWISE = [*zip((2, 4, 1), (1111,) * 3, get_args(Shard), strict=True)]
# Matrices lie whole in shards, with large buckets, and are cut, with small ones: each has other homes.
HOMES = [(1, None, "states"), (2, None, "gradients"), (3, 1, "parameters")]
NORMUON = Muon(lr=0.02, row_beta2=0.9, fused={"*.up.weight": (13, 20, 7)})
GROUPED = AdamW(lr=0.01, groups=(ParamGroup(pattern="blocks.1.*", lr_factor=0.5),))


@pytest.mark.parametrize(
    ("saved", "loaded", "optimizer", "own"),
    [
        (SAVED, LOADED, None, None),
        (SHARED, SHARED_OTHERWISE, None, None),
        (HOMES, HOMES, NORMUON, NORMUON),
        (HOMES[:1], HOMES[:1], None, GROUPED),
    ],
    ids=["ranks", "shards", "matrices", "groups"],
)
def test_every_layout_loads_what_every_other_saved(run_ranks, tmp_path, saved, loaded, optimizer, own):
    folders = [tmp_path / f"{number}" for number in range(len(saved))]
    for folder, (size, bucket_size, shard) in zip(folders, saved, strict=True):
        assert run_ranks(save_steps, size, folder, [3], bucket_size, 2, shard, optimizer) == [["step_00000003"]] * size
    for size, bucket_size, shard in loaded:
        assert run_ranks(resume_each, size, folders, bucket_size, shard, own) == [[(3, [])] * len(folders)] * size
    if optimizer is NORMUON:
        manifest = read_checkpoint(folders[0] / "step_00000003").manifest
        kept = {(name, state): shape for name, state, shape, _ in manifest.tensors()}
        assert kept["blocks.0.down.weight", "direction_sq"] == (40,)
        assert kept["blocks.0.up.weight", "direction_sq"] == (3 * 24,)  # of each of three matrices 24 columns


MESHES = {"tp2": 2, "pp2": 2, "dp2tp2": 4} | ({"dp1": 1} if FULL else {})  # and their ranks


def _meshed(layout):
    """Return an engine of a model in which several matrices lie in one parameter."""
    config = make_config(layout, family="per_head", model={"num_layers": 2}, muon={"row_beta2": 0.9}, **MUON)
    return build_training(config, torch.device("cpu")).engine


def _saved(layout, folder):
    engine = _meshed(layout)
    for part in owned_parts(engine):
        part.tensor.copy_(wanted(engine, part, 3))
    engine.publish_masters()
    save_now(folder, engine)


def _loaded(layout, folders):
    """Return the number of this rank's states of matrices, and the parts that are not what was saved."""
    engine, wrong = _meshed(layout), []
    for folder in folders:
        for part in owned_parts(engine):
            part.tensor.zero_()
        with mock.patch.object(constants, "READ_AHEAD", 500):  # bytes: rows and boxes begin and end anywhere in a chunk
            load_newest(folder, engine)
        parts = [part for part in owned_parts(engine) if not torch.equal(part.tensor, wanted(engine, part, 3))]
        wrong += [f"{part.state} of {part.param} at {part.box} from {folder.name}" for part in parts]
    return len(engine.held_states()), wrong


def test_every_mesh_loads_what_every_other_saved(run_ranks, tmp_path):
    folders = [tmp_path / layout for layout in MESHES]
    for (layout, size), folder in zip(MESHES.items(), folders, strict=True):
        run_ranks(_saved, size, layout, folder)
    counts = set()
    for layout, size in MESHES.items():
        told = run_ranks(_loaded, size, layout, folders)
        assert [wrong for _, wrong in told] == [[]] * size
        counts.add(sum(count for count, _ in told))
    assert len(counts) == 1  # every matrix has one home, whatever the mesh


def _other_model():
    model = make_model()
    del model.blocks[2]
    model.norm = torch.nn.LayerNorm(24, bias=False)
    model.blocks[0].up = torch.nn.Linear(24, 41)
    model.extra = torch.nn.Linear(2, 2, bias=False)
    return model


OTHER_MODEL = [
    *("missing extra.weight", "unknown norm.bias", "unknown blocks.2.gain"),
    r"blocks.0.up.weight has shape \(40, 24\), the model's has \(41, 24\)",
]
OTHER_STATES = ["it holds master, exp_avg, exp_avg_sq.*needs.*momentum_buffer", "give that engine's full_weights"]
FEWER_STATES = [r"it holds master, momentum_buffer, the optimizer needs .* direction_sq \(F32"]


@pytest.mark.parametrize(
    ("saved", "engine", "told"),
    [
        (None, lambda: fp16_engine(model=_other_model()), OTHER_MODEL),
        (None, lambda: fp16_engine(optimizer=NAG(lr=0.1)), OTHER_STATES),
        (Muon(lr=0.02), lambda: fp16_engine(optimizer=Muon(lr=0.02, row_beta2=0.9)), FEWER_STATES),
    ],
    ids=["model", "optimizer", "moments"],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, saved, engine, told):
    save_steps(tmp_path, [3], optimizer=saved)
    target = engine()
    before = target.state_dict()
    for line in told:
        with pytest.raises(ValueError, match=line):
            load_newest(tmp_path, target)
    after = target.state_dict()
    assert all(torch.equal(one, other) for one, other in zip(before["master"], after["master"], strict=True))
    assert (after["applied_updates"], after["skipped_steps"]) == (0, 0)


@pytest.mark.parametrize("saved", [AdamW(lr=0.01), NAG(lr=0.1), Muon(lr=0.02)], ids=["adamw", "nag", "muon"])
@pytest.mark.parametrize(
    "loaded",
    [AdamW(lr=0.01), Muon(lr=0.02), AdamW(lr=0.01, state_dtype=torch.bfloat16)],
    ids=["adamw", "muon", "adamw in bf16"],
)
def test_another_optimizer_keeps_masters_counters_and_common_states(tmp_path, caplog, saved, loaded):
    source, target = fp16_engine(optimizer=saved), fp16_engine(optimizer=loaded)
    train_steps(source, range(3))
    save_now(tmp_path, source)
    train_steps(target, range(3, 5))  # states of its own, which must go
    load_newest(tmp_path, target, phase=Phase())
    anew = set()
    was = {owned.spec.name: owned.tensors for owned in source.owned_ranges()}  # a single rank: each parameter is one
    for after in target.owned_ranges():
        before = was[after.spec.name]
        assert torch.equal(before[MASTER], after.tensors[MASTER])
        for state, values in after.tensors.items():
            kept = state in before and before[state].dtype == values.dtype
            assert torch.equal(values, before[state] if kept else torch.zeros_like(values))
            anew |= set() if kept else {after.spec.name}
    assert int(target.applied_updates) == int(source.applied_updates)
    told = [line for line in caplog.messages if line.startswith("another optimizer's checkpoint:")]
    assert sum(int(line.split(" of ")[1].split()[0]) for line in told) == len(anew)
    assert bool(anew) == (type(saved) is not type(loaded) or saved.state_dtype != loaded.state_dtype)


def _lines_of_a_load(folder):
    engine, told = fp16_engine(optimizer=Muon(lr=0.02)), []
    logger, handler = logging.getLogger("megamix"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    load_newest(folder, engine, phase=Phase())
    logger.removeHandler(handler)
    return told


def test_what_begins_at_zero_is_said_once_and_not_by_every_rank(tmp_path, run_ranks):
    save_steps(tmp_path, [3])
    first, second = run_ranks(_lines_of_a_load, 2, tmp_path)
    assert [line.partition(":")[0] for line in first] == ["another optimizer's checkpoint"]
    assert second == []


RESUMED_SCALES = [
    (StaticLossScale(2.0**10), StaticLossScale(2.0**12), [2.0**12], "goes on at 4096, as the settings ask"),
    (StaticLossScale(2.0**10), None, [1.0], "goes on at 1, as the settings ask; the checkpoint has 1024"),
    (TorchLossScale(), MegatronLossScale(2.0**20), [2.0**20, 0, 2], "another rule (TorchLossScale): the scale starts"),
    (DynamicLossScale(2.0**9), DynamicLossScale(16.0, max_scale=32.0), [32.0, 0, 1], "goes on at 32, as the"),
    (DynamicLossScale(2.0**4), DynamicLossScale(16.0, min_scale=8.0), [8.0, 0, 1], "the checkpoint has 2"),
    (DynamicLossScale(2.0**9), DynamicLossScale(2.0**20), [2.0**6, 0, 1], ""),
    # The overflows at 8, 4 and 2 call for 4, 2 and 1; the newest comes first.
    (HeadroomLossScale(8.0, window=3), HeadroomLossScale(window=2), [1.0, 16376.0, 8188.0], ""),
    (HeadroomLossScale(8.0, window=3), HeadroomLossScale(window=4), [1.0, 16376.0, 8188.0, 4094.0, 0.0], ""),
]


@pytest.mark.parametrize(("saved", "own", "want", "told"), RESUMED_SCALES)
def test_a_loss_scale_goes_on_by_the_settings_of_now(tmp_path, caplog, saved, own, want, told):
    source, target = (
        make_engine(
            torch.nn.Linear(2, 2), precision=Precision(torch.float16 if scale else torch.bfloat16, loss_scale=scale)
        )
        for scale in map(deepcopy, (saved, own))
    )
    for _ in range(3):  # overflows
        source.loss_scale.update_(torch.tensor(True), torch.tensor(0.0), source.loss_scale.loss_scale.clone())
    save_now(tmp_path, source)
    load_newest(tmp_path, target)
    assert [value for state in target.loss_scale.state_dict().values() for value in state.view(-1).tolist()] == want
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


def test_no_save_or_load_in_the_middle_of_a_step(tmp_path):
    save_steps(tmp_path, [3])
    engine = fp16_engine()
    fill(engine, 2)
    engine.backward(loss_of(engine, make_batch(0, 0, 0)))
    with pytest.raises(RuntimeError, match="right after step"):
        take_snapshot(engine, RunRecord())
    with pytest.raises(OSError, match="right after step"):
        load_newest(tmp_path, engine)
    engine.step()
    assert int(engine.applied_updates) == 3, "the step went on as if nothing was asked"
