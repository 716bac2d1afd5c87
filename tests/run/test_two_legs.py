"""Whoever edits the configuration of a run: a setting that may change between two starts of a run changes, and is
reported; any other setting is refused by its key, with a fix. Whatever changes, no whole checkpoint is renamed, and
with the first configuration the run continues.
"""

import io
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass, field

import numpy as np
import pytest

from megamix.checkpoint.folder import checkpoints
from megamix.config import ConfigError
from megamix.data.token_file import TokenFileWriter
from tests.builders import VOCAB, run_on_ranks, tiny_job, write_data


@dataclass(frozen=True)
class Leg:
    """Settings of another leg that differ from the first one's.

    `told`: words in the run's log. `refused`: words of the refusal; "": the leg goes on.
    """

    sections: dict = field(default_factory=dict)
    told: str = ""
    refused: str = ""
    ranks: int = 1


LEGS = {
    "more steps": Leg({"training": {"steps": 6}}, told="training.steps: 4 -> 6"),
    "fewer steps than were made": Leg({"training": {"steps": 3}}, refused="training.steps: got 3"),
    "another rate": Leg({"optimizer": {"lr": 0.005}}, told="optimizer.lr: 0.01 -> 0.005"),
    "swapped betas": Leg({"optimizer": {"adamw": {"betas": [0.95, 0.9]}}}, told="optimizer.adamw.betas"),
    "another decay": Leg({"optimizer": {"weight_decay": 0.0}}, told="optimizer.weight_decay"),
    "no clipping": Leg({"optimizer": {"clip_grad": 0.0}}, told="optimizer.clip_grad"),
    "states in BF16": Leg({"optimizer": {"adamw": {"state_dtype": "bf16"}}}, refused="exp_avg (BF16)"),
    "another optimizer": Leg({"optimizer": {"name": "nag"}}, refused="optimizer.name"),
    "Muon": Leg({"optimizer": {"name": "muon"}}, refused="optimizer.name"),
    "shard gradients": Leg({"parallelism": {"shard": "gradients"}}, told="parallelism.shard"),
    "shard parameters": Leg({"parallelism": {"shard": "parameters"}}, told="parallelism.shard", ranks=2),
    "owners add up": Leg({"parallelism": {"accumulate": "owner"}}, told="parallelism.accumulate"),
    "data-parallel ranks": Leg(ranks=2),
    "tensor-parallel ranks": Leg({"parallelism": {"tp_size": 2}}, told="parallelism.tp_size", ranks=2),
    "a pipeline": Leg({"parallelism": {"pp_size": 2}}, told="parallelism.pp_size", ranks=2),
    "smaller micro-batches": Leg({"training": {"micro_batch_size": 1}}, told="training.micro_batch_size"),
    "larger batches": Leg({"training": {"global_batch_size": 16}}, told="training.global_batch_size"),
    "shorter sequences": Leg({"model": {"seq_len": 16}}, refused="model.seq_len"),
    "another schedule": Leg({"lr_schedule": {"decay_style": "linear"}}, told="lr_schedule.decay_style"),
    "another seed": Leg({"training": {"seed": 7}}, refused="training.seed"),
    "other data": Leg({"data": {"train": "OTHER"}}, refused="data.train: holds other data"),
    "another stage to come": Leg({"data": {"stages": [{"from_sample": 48, "train": "OTHER"}]}}, told="data.stages"),
    "another stage in what was read": Leg(
        {"data": {"stages": [{"from_sample": 8, "train": "OTHER"}]}}, refused="data.train"
    ),
    "other data to validate on": Leg({"data": {"valid": "OTHER"}}, told="data.valid"),
    "BF16": Leg({"precision": {"dtype": "bf16", "loss_scale": {}}}, told="precision.dtype"),
    "dropout": Leg({"model": {"dropout": 0.1}}, told="model.dropout"),
    "another width": Leg({"model": {"hidden_size": 64}}, refused="model.hidden_size"),
}


def _config(data, run, changed):
    own = {
        "training": {"steps": 6, "eval_interval": 0},
        "checkpoint": {"folder": str(run), "save_interval": 2},
        "metrics": {"tensorboard": False},
    }
    return tiny_job(data.parent, own, changed, tokens=data)


def _in(folder, tree):
    """Return the sections with the path of the other data."""
    if isinstance(tree, dict):
        return {key: _in(folder, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_in(folder, value) for value in tree]
    return f"{folder}/other" if tree == "OTHER" else tree


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "data"
    write_data(folder)
    with TokenFileWriter(folder / "other", VOCAB) as writer:
        for start in range(2000):
            writer.add(3 * np.arange(start, start + 33) % VOCAB)
    return folder


@pytest.fixture(scope="module")
def first_leg(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("first") / "run"
    run_on_ranks(_config(data, run, {"training": {"steps": 4}}))
    return run


def _go_on(config):
    """Return why the leg does not start, or nothing, and its log."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            run_on_ranks(config)
    except ConfigError as error:
        return "; ".join(error.problems), said.getvalue()
    return "", said.getvalue()


def _names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.uncounted
@pytest.mark.parametrize("name", LEGS)
def test_a_changed_leg_goes_on_or_is_refused(run_ranks, data, first_leg, tmp_path, name):
    leg, run = LEGS[name], tmp_path / "run"
    shutil.copytree(first_leg, run)
    saved = _names(run)
    (problem, said), *_ = run_ranks(_go_on, leg.ranks, _config(data, run, _in(data, leg.sections)))
    if leg.refused:
        assert leg.refused in problem
        assert _names(run) == saved
        assert _go_on(_config(data, run, {}))[0] == ""
    else:
        assert problem == ""
        assert leg.told in said
    assert checkpoints(run / "checkpoints")[0].name == "step_00000006"
    assert [name for name in _names(run) if "damaged" in name] == []
