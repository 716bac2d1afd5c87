"""Whoever edits the configuration of a run: a setting that may change between two starts of a run changes, and is
reported; any other setting is refused by its key, with a fix. Whatever changes, no whole checkpoint is renamed, and
with the first configuration the run continues.
"""

import io
import json
import shutil
from contextlib import redirect_stdout

import numpy as np
import pytest

from megamix.checkpoint.folder import checkpoints
from megamix.config import ConfigError
from megamix.data.token_file import token_file_writer
from tests.builders import VOCAB, run_on_ranks, tiny_job, write_data

# Settings of the second leg that differ from the first one's, words that it says, and its ranks.
GOES_ON = [
    ({"steps": 6}, "training.steps: 4 -> 6", 1),
    ({"lr": 0.005, "weight_decay": 0.0, "clip_grad": 0.0}, "optimizer.lr: 0.01 -> 0.005", 1),
    ({"shard": "parameters", "accumulate": "owner"}, "parallelism.shard", 2),
    ({}, "ranks: 1 -> 2", 2),
    ({"tensor": {"size": 2}}, "parallelism.tensor", 2),
    ({"micro_batch_size": 1, "global_batch_size": 16}, "training.global_batch_size", 1),
    ({"stages": [{"from_sample": 48, "train": "OTHER"}]}, "data.stages", 1),
    ({"valid": "OTHER"}, "data.valid", 1),
    ({"precision": {"dtype": "bf16", "loss_scale": {}}}, "precision.dtype", 1),
    ({"dropout": 0.1}, "model.dropout", 1),
]
# Settings of a second leg that would be another run, and words of the refusal.
REFUSED = [
    ({"steps": 3}, "step_00000004 is after update 4; write steps = 4 or more"),
    ({"optimizer": {"adamw": {"state_dtype": "bf16"}}}, "exp_avg (BF16)"),
    ({"optimizer": {"name": "nag"}}, 'optimizer.name: the checkpoint has "adamw", the configuration "nag"'),
    ({"seed": 7}, "training.seed: the checkpoint has 1234, the configuration 7"),
    ({"train": "OTHER"}, "data.train: holds other data"),
    ({"stages": [{"from_sample": 8, "train": "OTHER"}]}, "data.stages"),
    ({"hidden_size": 64, "seq_len": 16}, "model.hidden_size: the checkpoint has 32, the configuration 64"),
]


def _config(data, run, settings):
    settings = {"steps": 6, "eval_interval": 0, "save_interval": 2} | settings
    return tiny_job(data.parent, {"checkpoint": {"folder": str(run)}}, tokens=data, **settings)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "data"
    write_data(folder)
    with token_file_writer(folder / "other", VOCAB) as writer:
        for start in range(2000):
            writer.add(3 * np.arange(start, start + 33) % VOCAB)
    return folder


@pytest.fixture(scope="module")
def first_leg(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("first") / "run"
    run_on_ranks(_config(data, run, {"steps": 4}))
    return run


@pytest.fixture
def leg(data, first_leg, tmp_path, run_ranks):
    """Return a function that runs another leg on some ranks, and returns why it does not start, or what it says."""
    shutil.copytree(first_leg, tmp_path / "run")

    def leg(settings, ranks=1):
        settings = json.loads(json.dumps(settings).replace("OTHER", f"{data}/other"))
        config = _config(data, tmp_path / "run", settings)
        return _go_on(config) if ranks == 1 else run_ranks(_go_on, ranks, config)[0]

    return leg


def _go_on(config):
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            run_on_ranks(config)
    except ConfigError as error:
        return "; ".join(error.problems)
    return said.getvalue()


@pytest.mark.parametrize(("settings", "told", "ranks"), GOES_ON)
def test_a_changed_leg_goes_on_and_says_so(leg, tmp_path, settings, told, ranks):
    assert f"changed since: {told}" in leg(settings, ranks)
    assert checkpoints(tmp_path / "run/checkpoints")[0].name == "step_00000006"
    assert not [*(tmp_path / "run/checkpoints").glob("*damaged*")]


def test_another_run_is_refused_by_name_and_nothing_is_touched(leg, tmp_path):
    def left():
        run = tmp_path / "run"
        return sorted(path.name for path in (run / "checkpoints").iterdir()), (run / "metrics.jsonl").read_bytes()

    before = left()
    for settings, refused in REFUSED:
        assert refused in leg(settings)
        assert left() == before, refused
    assert "step_00000004 after update 4" in leg({})
    assert checkpoints(tmp_path / "run/checkpoints")[0].name == "step_00000006"
