"""A checkpoint of any number of ranks, bucket size, `shard` or division into blocks loads into any other, bit for bit.
A resumed run equals an uninterrupted one; a loss scale continues by its rule and the current settings. A checkpoint
that does not fit is refused with every kind of difference, and changes nothing.
"""

import itertools
import logging
import random
from copy import deepcopy
from typing import get_args

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
    tuned,
)
from megamix.checkpoint.boxes import Box
from megamix.checkpoint.folder import Files
from megamix.checkpoint.load import fill as fill_parts
from megamix.checkpoint.load import load, newest_checkpoint
from megamix.checkpoint.manifest import LayoutRecord, Manifest, ParamRecord, RunRecord
from megamix.checkpoint.save import begin, commit, save, write_rank
from megamix.checkpoint.snapshot import Snapshot, parts_of_range, take_snapshot
from megamix.checkpoint.tensor_file import chunks
from megamix.checkpoint.verify import read_checkpoint
from megamix.clock import Clock
from megamix.mixed_precision.settings import Shard
from megamix.mixed_precision.update_slice import MASTER
from tests.builders import loss_of, make_batch, make_engine, make_model, train_steps
from tests.checkpoint.state import (
    all_or_none_of,
    differences,
    fill,
    fp16_engine,
    full_value,
    resume,
    resume_each,
    save_steps,
)
from tests.conftest import FULL

SIZES = (1, 2, 3, 4)
BUCKETS = (1, 1111, None)
# Every pair of sizes, either way; the bucket sizes differ between the two sides.
SAVED = [*itertools.product(SIZES, BUCKETS)] if FULL else [(1, 1111), (2, 1), (3, None), (4, 1111)]
LOADED = [*itertools.product(SIZES, BUCKETS)] if FULL else [(1, 1), (2, 1111), (3, 1111), (4, None)]


@pytest.mark.uncounted
def test_every_number_of_ranks_loads_what_every_other_saved(run_ranks, tmp_path):
    folders = [tmp_path / f"{size}-{bucket_size}" for size, bucket_size in SAVED]
    for folder, (size, bucket_size) in zip(folders, SAVED, strict=True):
        assert run_ranks(save_steps, size, folder, [3], bucket_size) == [["step_00000003"]] * size
    for size, bucket_size in LOADED:
        assert run_ranks(resume_each, size, folders, bucket_size) == [[(3, [])] * len(folders)] * size


@pytest.mark.uncounted
def test_every_setting_of_shard_loads_what_every_other_saved(run_ranks, tmp_path):
    every = [*itertools.product((1, 2, 4), get_args(Shard))]
    folders = [tmp_path / f"{size}-{shard}" for size, shard in every]
    for folder, (size, shard) in zip(folders, every, strict=True):
        assert run_ranks(save_steps, size, folder, [3], 1111, 2, shard) == [["step_00000003"]] * size
    for size, shard in every:
        assert run_ranks(resume_each, size, folders, 1111, shard) == [[(3, [])] * len(folders)] * size


NORMUON = Muon(lr=0.02, row_beta2=0.9, fused={"*.up.weight": (13, 20, 7)})


@pytest.mark.uncounted
def test_states_of_matrices_come_to_the_ranks_that_compute_with_them(run_ranks, tmp_path):
    """Let matrices lie whole in shards, with large buckets, and be cut, with small ones: each has other homes."""
    every = [(1, None, "states"), (2, 1111, "gradients"), (4, None, "states"), (3, 1, "parameters")]
    folders = [tmp_path / f"{size}" for size, *_ in every]
    for folder, (size, bucket_size, shard) in zip(folders, every, strict=True):
        run_ranks(save_steps, size, folder, [3], bucket_size, 2, shard, NORMUON)
    for size, bucket_size, shard in every:
        assert run_ranks(resume_each, size, folders, bucket_size, shard, NORMUON) == [[(3, [])] * len(folders)] * size
    manifest = read_checkpoint(folders[0] / "step_00000003").manifest
    kept = {(name, state): shape for name, state, shape, _ in manifest.tensors()}
    assert kept["blocks.0.down.weight", "direction_sq"] == (40,)
    assert kept["blocks.0.up.weight", "direction_sq"] == (3 * 24,)  # each of three matrices has 24 columns, fewer rows


def test_moments_that_a_checkpoint_lacks_are_named(tmp_path):
    save_steps(tmp_path, [3], optimizer=Muon(lr=0.02))
    engine = fp16_engine(optimizer=Muon(lr=0.02, row_beta2=0.9))
    checkpoint = newest_checkpoint(tmp_path, all_or_none_of(engine))
    assert checkpoint is not None
    with pytest.raises(
        ValueError, match=r"it holds master, momentum_buffer, the optimizer needs .* direction_sq \(F32"
    ):
        load(checkpoint, engine, all_or_none_of(engine))


GROUPED = AdamW(lr=0.01, groups=(ParamGroup(pattern="blocks.1.*", lr_factor=0.5),))


def test_other_optimizer_groups_load_it_too(tmp_path):
    save_steps(tmp_path, [3])
    engine = fp16_engine(optimizer=GROUPED)
    checkpoint = newest_checkpoint(tmp_path, all_or_none_of(engine))
    assert checkpoint is not None
    load(checkpoint, engine, all_or_none_of(engine))
    assert differences(engine, 3) == []


def _loaded_and_uninterrupted(folder, shard):
    """Return the losses of a resumed run and of one that went on, and the differences at their ends."""
    source = fp16_engine(shard=shard)
    train_steps(source, range(3))
    save(folder, take_snapshot(source, RunRecord()), all_or_none_of(source))
    resumed = fp16_engine(shard=shard)
    train_steps(resumed, range(5, 7))  # something else, to be overwritten
    checkpoint = newest_checkpoint(folder, all_or_none_of(resumed))
    assert checkpoint is not None
    load(checkpoint, resumed, all_or_none_of(resumed))
    went_on, again = train_steps(source, range(3, 6)), train_steps(resumed, range(3, 6))
    one, other = source.state_dict(), resumed.state_dict()
    unequal = [
        f"{key} {number}"
        for key in ("master", "states")
        for number, (a, b) in enumerate(zip(one[key], other[key], strict=True))
        if not torch.equal(a, b)
    ]
    return went_on, again, unequal


@pytest.mark.parametrize("shard", get_args(Shard))
def test_a_resumed_run_is_the_run_that_went_on(run_ranks, tmp_path, shard):
    for went_on, again, unequal in run_ranks(_loaded_and_uninterrupted, 2, tmp_path, shard):
        assert went_on == again
        assert unequal == []


# Simulated tensor and pipeline ranks: each holds a block of some parameters, and of that block a flat range.

SHAPES = {"up": (8, 6), "down": (6, 8), "bias": (7,), "gain": (), "cube": (4, 6, 5), "empty": (0, 3)}
SPLIT_DIM = {"up": 0, "down": 1, "cube": 1}  # as column- and row-parallel layers do; the others belong to one rank
STATES = ("master", "exp_avg")


def _ranks_of(dp_size, tp_size, pp_size):
    """Return the parts of every rank of a dp x tp x pp layout, filled with NaN."""
    ranks = []
    rng = random.Random(100 * dp_size + 10 * tp_size + pp_size)
    for pp_rank, tp_rank in itertools.product(range(pp_size), range(tp_size)):
        held = [[] for _ in range(dp_size)]
        for number, (name, shape) in enumerate(SHAPES.items()):
            if number % pp_size != pp_rank or (name not in SPLIT_DIM and tp_rank):
                continue
            block = _block(shape, SPLIT_DIM.get(name), tp_rank, tp_size)
            cuts = [0, *sorted(rng.randint(0, block.numel) for _ in range(dp_size - 1)), block.numel]
            for parts, (start, end) in zip(held, itertools.pairwise(cuts), strict=True):
                for state in STATES:
                    parts += parts_of_range(name, state, block, start, torch.full((end - start,), torch.nan))
        ranks += held
    return ranks


def _block(shape, dim, rank, size):
    if dim is None:
        return Box.whole(shape)
    first, last = shape[dim] * rank // size, shape[dim] * (rank + 1) // size
    return Box(
        tuple(first if axis == dim else 0 for axis in range(len(shape))),
        tuple(last - first if axis == dim else length for axis, length in enumerate(shape)),
    )


def _want(part):
    whole = full_value(part.param, part.state, SHAPES[part.param], 3)
    return whole[part.box.slices_in(Box.whole(whole.shape))].reshape(-1)


def _save_simulated(folder, ranks):
    manifest = Manifest(
        applied_updates=3, skipped_steps=0, loss_scale={"loss_scale": 1.0}, run=RunRecord(),
        layout=LayoutRecord(axes={"dp": 1}, buckets=()), states=(dict.fromkeys(STATES, "F32"),),
        params=tuple(ParamRecord(name=name, shape=shape, aliases=()) for name, shape in SHAPES.items()),
    )  # fmt: skip
    files = Files()
    begun = folder / begin(folder, 3, Snapshot(manifest, []).largest_size, files)
    for parts in ranks:
        for part in parts:
            part.tensor.copy_(_want(part))
    written = [write_rank(begun, rank, chunks(parts), files) for rank, parts in enumerate(ranks)]
    return folder / commit(begun, manifest, written, files)


LAYOUTS = [(1, 1, 1), (3, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 3), (2, 2, 2), (3, 2, 1), (5, 3, 2)]


@pytest.mark.uncounted
@pytest.mark.parametrize("saved", LAYOUTS)
def test_blocks_of_tensor_and_pipeline_ranks_load_into_each_other(tmp_path, saved, monkeypatch):
    monkeypatch.setattr(tuned, "READ_AHEAD", 20)  # bytes: rows and boxes begin and end anywhere in a chunk
    checkpoint = read_checkpoint(_save_simulated(tmp_path / "checkpoints", _ranks_of(*saved)))
    for layout in LAYOUTS:
        ranks = _ranks_of(*layout)
        for rank, parts in enumerate(ranks):
            assert fill_parts(checkpoint, parts, Clock(torch.device("cpu")), rank, len(ranks)) == []
            assert all(torch.equal(part.tensor, _want(part)) for part in parts), layout


# A misfit is refused, all of it is told, and nothing is changed.


def _other_model():
    model = make_model()
    del model.blocks[2]
    model.norm = torch.nn.LayerNorm(24, bias=False)
    model.blocks[0].up = torch.nn.Linear(24, 41)
    model.extra = torch.nn.Linear(2, 2, bias=False)
    return model


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (
            lambda: fp16_engine(model=_other_model()),
            [
                "missing extra.weight",
                "unknown norm.bias",
                "unknown blocks.2.gain",
                r"blocks.0.up.weight has shape \(40, 24\), the model's has \(41, 24\)",
            ],
        ),
        (
            lambda: fp16_engine(optimizer=NAG(lr=0.1)),
            ["it holds master, exp_avg, exp_avg_sq.*needs.*momentum_buffer", "give that engine's full_weights"],
        ),
    ],
    ids=["model", "optimizer"],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, engine, told):
    save_steps(tmp_path, [3])
    target = engine()
    before = target.state_dict()
    checkpoint = newest_checkpoint(tmp_path, all_or_none_of(target))
    assert checkpoint is not None
    for line in told:
        with pytest.raises(ValueError, match=line):
            load(checkpoint, target, all_or_none_of(target))
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
    save(tmp_path, take_snapshot(source, RunRecord()), all_or_none_of(source))
    checkpoint = newest_checkpoint(tmp_path, all_or_none_of(target))
    assert checkpoint is not None
    train_steps(target, range(3, 5))  # states of its own, which must go
    load(checkpoint, target, all_or_none_of(target), anew=True)
    anew = 0
    was = {owned.spec.name: owned for owned in source.owned_ranges()}  # a single rank: each parameter is one range
    for after in target.owned_ranges():
        before = was[after.spec.name]
        assert torch.equal(before.tensors[MASTER], after.tensors[MASTER])
        for state, values in after.tensors.items():
            was_kept = state in before.tensors and before.tensors[state].dtype == values.dtype
            assert torch.equal(values, before.tensors[state] if was_kept else torch.zeros_like(values))
        dtypes = ({(state, values.dtype) for state, values in one.tensors.items()} for one in (after, before))
        anew += bool(set.difference(*dtypes))
    assert int(target.applied_updates) == int(source.applied_updates)
    told = [line for line in caplog.messages if line.startswith("another optimizer's checkpoint:")]
    assert sum(int(line.split(" of ")[1].split()[0]) for line in told) == anew
    assert bool(anew) == (type(saved) is not type(loaded) or saved.state_dtype != loaded.state_dtype)


def _lines_of_a_load(folder):
    engine, told = fp16_engine(optimizer=Muon(lr=0.02)), []
    logger, handler = logging.getLogger("megamix"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    checkpoint = newest_checkpoint(folder, all_or_none_of(engine))
    assert checkpoint is not None
    logger.addHandler(handler)
    load(checkpoint, engine, all_or_none_of(engine), anew=True)
    logger.removeHandler(handler)
    return told


def test_what_begins_at_zero_is_said_once_and_not_by_every_rank(tmp_path, run_ranks):
    source = fp16_engine(optimizer=AdamW(lr=0.01))
    save(tmp_path, take_snapshot(source, RunRecord()), all_or_none_of(source))
    first, second = run_ranks(_lines_of_a_load, 2, tmp_path)
    assert [line.partition(":")[0] for line in first] == ["another optimizer's checkpoint"]
    assert second == []


def test_a_headroom_scale_remembers_its_peaks(tmp_path):
    def build():
        precision = Precision(torch.float16, loss_scale=HeadroomLossScale(window=5))
        return make_engine(precision=precision)

    source, target = build(), build()
    train_steps(source, range(3))
    save(tmp_path, take_snapshot(source, RunRecord()), all_or_none_of(source))
    checkpoint = newest_checkpoint(tmp_path, all_or_none_of(target))
    assert checkpoint is not None
    load(checkpoint, target, all_or_none_of(target))
    assert torch.equal(target.loss_scale.peaks, source.loss_scale.peaks)
    assert source.loss_scale.peaks.count_nonzero() == 3
    assert not target.loss_scale.wants_probe


def test_another_rule_of_the_loss_scale_begins_anew(tmp_path, caplog):
    save_steps(tmp_path, [3])
    precision = Precision(torch.float16, loss_scale=HeadroomLossScale(window=9, init_scale=2.0**7))
    target = make_engine(precision=precision)
    checkpoint = newest_checkpoint(tmp_path, all_or_none_of(target))
    assert checkpoint is not None
    load(checkpoint, target, all_or_none_of(target))
    assert int(target.applied_updates) == 3
    assert (float(target.loss_scale.loss_scale), target.loss_scale.peaks.count_nonzero()) == (2.0**7, 0)
    assert "another rule (DynamicLossScale): the scale starts at 128" in caplog.text


def _scaled(scale):
    precision = Precision(torch.bfloat16 if scale is None else torch.float16, loss_scale=scale)
    return make_engine(torch.nn.Linear(2, 2), precision=precision)


def _resumed_scale(folder, saved, own):
    """Return the loss scale's states after three overflows with `saved`, and a load."""
    source, target = _scaled(saved), _scaled(own)
    for _ in range(3):
        saved.update_(torch.tensor(True), torch.tensor(0.0), saved.loss_scale.clone())
    save(folder, take_snapshot(source, RunRecord()), all_or_none_of(source))
    checkpoint = newest_checkpoint(folder, all_or_none_of(target))
    assert checkpoint is not None
    load(checkpoint, target, all_or_none_of(target))
    return [value for state in target.loss_scale.state_dict().values() for value in state.view(-1).tolist()]


RESUMED_SCALES = [
    (StaticLossScale(2.0**10), StaticLossScale(2.0**12), [2.0**12], "goes on at 4096, as the settings ask"),
    (StaticLossScale(2.0**10), None, [1.0], "goes on at 1, as the settings ask; the checkpoint has 1024"),
    (
        TorchLossScale(),
        MegatronLossScale(2.0**20),
        [2.0**20, 0, 2],
        "another rule (TorchLossScale): the scale starts at",
    ),
    (DynamicLossScale(2.0**9), DynamicLossScale(16.0, max_scale=32.0), [32.0, 0, 1], "goes on at 32, as the"),
    (DynamicLossScale(2.0**4), DynamicLossScale(16.0, min_scale=8.0), [8.0, 0, 1], "the checkpoint has 2"),
    (DynamicLossScale(2.0**9), DynamicLossScale(2.0**20), [2.0**6, 0, 1], ""),
    # The overflows at 8, 4 and 2 call for 4, 2 and 1; the newest comes first.
    (HeadroomLossScale(8.0, window=3), HeadroomLossScale(window=2), [1.0, 16376.0, 8188.0], ""),
    (HeadroomLossScale(8.0, window=3), HeadroomLossScale(window=4), [1.0, 16376.0, 8188.0, 4094.0, 0.0], ""),
]


@pytest.mark.parametrize(("saved", "own", "want", "told"), RESUMED_SCALES)
def test_a_loss_scale_goes_on_by_the_settings_of_now(tmp_path, caplog, saved, own, want, told):
    assert _resumed_scale(tmp_path, deepcopy(saved), deepcopy(own)) == want
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


def test_no_save_or_load_in_the_middle_of_a_step(tmp_path):
    save_steps(tmp_path, [3])
    engine = fp16_engine()
    checkpoint = newest_checkpoint(tmp_path, all_or_none_of(engine))
    assert checkpoint is not None
    fill(engine, 2)
    engine.backward(loss_of(engine, make_batch(0, 0, 0)))
    with pytest.raises(RuntimeError, match="right after step"):
        take_snapshot(engine, RunRecord())
    with pytest.raises(OSError, match="right after step"):
        load(checkpoint, engine, all_or_none_of(engine))
    engine.step()
    assert int(engine.applied_updates) == 3, "the step went on as if nothing was asked"


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    assert resume(tmp_path / "nothing") == (None, [])
