"""Checkpoints of version 1, saved before states and buffers were by name, load bit for bit into any layout, and their
runs go on; what is wrong with their new and old fields is named.
"""

from __future__ import annotations

import json
import math
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.load import load, read_together
from megamix.checkpoint.manifest import DamagedCheckpoint, read_manifest
from megamix.checkpoint.verify import read_checkpoint, verify_checkpoint
from megamix.comm.topology import Topology
from megamix.config import Config, config_from_dict
from megamix.parallel.build import build_model, drawn
from megamix.train.build import build_engine
from megamix.train.saved_run import check_run
from tests.checkpoint.seal import edit
from tests.checkpoint.state import alone, together_of
from tests.parallel.layouts import assemble, states
from tests.train.jobs import run_on_ranks

RUNS = {"adamw": ("exp_avg", "exp_avg_sq"), "nag": ("momentum_buffer",), "dp2tp2pp2": ("exp_avg", "exp_avg_sq")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Runs of four updates of a model of 300 weights, after the second one; made by the code of then."""
    folder: Path = tmp_path_factory.mktemp("saved")
    with tarfile.open(Path(__file__).with_name("version1.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _config(run: str, folder: Path, checkpoint: Path, **parallelism: Any) -> Config:
    """That of the saved run, which goes on from it in another folder."""
    sizes = {"hidden_size": 4, "num_layers": 2, "num_heads": 2, "ffn_hidden_size": 4}
    tree = {
        "model": {"vocab_size": 8, "seq_len": 4, **sizes},
        "data": {"train": [{"markov": 4}]},
        "optimizer": {"name": "nag" if run == "nag" else "adamw", "lr": 0.01, "compile": False},
        "lr_schedule": {"warmup_steps": 2},
        "precision": {"dtype": "fp16", "loss_scale": {"init_scale": 2.0**10}},
        "training": {"steps": 4, "micro_batch_size": 1, "global_batch_size": 4, "eval_interval": 0},
        "parallelism": parallelism,
        "checkpoint": {"folder": str(folder / run), "resume": str(checkpoint), "save_interval": 2},
        "metrics": {"tensorboard": False, "log_interval": 1},
    }  # fmt: skip
    return config_from_dict(tree)


def _stored(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every state, put together from the files alone."""
    shapes = {param["name"]: param["shape"] for param in json.loads((path / "manifest.json").read_text())["params"]}
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for file in path.glob("*.safetensors"):
        for key, part in load_file(file).items():
            name, state, numbers = key.rsplit("|", 2)
            full = whole.setdefault(state, {}).setdefault(name, torch.full(shapes[name], math.nan))
            offset = [int(number) for number in numbers.split(",")]
            full[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))] = part
    return whole


def _loaded(config: Config) -> dict[str, Any]:
    topology = Topology.connect(tp_size=config.parallelism.tp_size)
    model, placements = build_model(config.model, topology, torch.device("cpu"), sequence_parallel=True)
    accumulation = 4 // topology.dp.size
    engine = build_engine(config, model, [*model.blocks], accumulation, topology, placements, drawn(model, 0))
    together = together_of(engine)
    load(read_together(Path(config.checkpoint.resume), together, check_run), engine, together)
    assert (int(engine.applied_updates), float(engine.loss_scale.loss_scale)) == (2, 2.0**10)
    return states(engine)


@pytest.mark.uncounted
@pytest.mark.parametrize("run", RUNS)
def test_every_bit_of_it_is_loaded_on_one_rank_and_on_tp2(run_ranks, saved: Path, tmp_path: Path, run: str) -> None:
    path = saved / run / "step_00000002"
    manifest = verify_checkpoint(path, check_run).manifest
    assert manifest.states == ({"master": "F32"} | dict.fromkeys(RUNS[run], "F32"),)
    want = _stored(path)
    assert want.keys() == {"master", *RUNS[run]}
    one = [_loaded(_config(run, tmp_path, path))]
    for ranks in (one, run_ranks(_loaded, 2, _config(run, tmp_path, path, tp_size=2))):
        for state, tensors in want.items():
            have, shared = assemble([rank[state] for rank in ranks])
            assert not shared
            assert have.keys() == tensors.keys()
            assert all(torch.equal(have[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("run", RUNS)
def test_its_run_goes_on_and_saves_the_same_states(saved: Path, tmp_path: Path, run: str) -> None:
    path = saved / run / "step_00000002"
    run_on_ranks(_config(run, tmp_path, path))
    (newest, *_) = checkpoints(tmp_path / run / "checkpoints")
    old, new = read_manifest(path / "manifest.json"), read_checkpoint(newest, check_run).manifest
    assert new.applied_updates == 4
    assert (new.states, new.params) == (old.states, old.params)
    rows = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(row["train/loss"]) for row in rows if "train/loss" in row)
    assert [row["train/tokens"] for row in rows if "train/loss" in row] == [3 * 16, 4 * 16]  # it had no count of them


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"states": [{"master": "F32"}]}, r"states\.0"),
        ({"states": ["master", 1]}, r"states\.1"),
        ({"states": ["master", "exp_avg"]}, "exp_avg_sq.* is no state that the manifest names"),
        ({"states": ["master", "exp_avg", "exp_avg_sq", "exp_avg"]}, "states: a name is there twice"),
        ({"states": ["exp_avg", "exp_avg_sq"]}, "states: a set has no master"),
        ({"version": 2}, r"states\.0"),
    ],
)
def test_a_wrong_field_of_it_is_named(saved: Path, tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    for file in (saved / "adamw/step_00000002").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    edit(path, lambda own: own.update(fields))
    with pytest.raises(DamagedCheckpoint, match=told):
        read_together(path, alone(), check_run)
