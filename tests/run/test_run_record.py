"""Whoever updates megamix or a plugin under a run: a checkpoint that the present code contradicts, because a plugin or
a model of it has changed, is refused by name and stays; what runs of every loss-scale rule save is taken.
"""

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from megamix.builders.data import data_fingerprints
from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.manifest import read_manifest
from megamix.checkpoint.verify import read_checkpoint
from megamix.cli import main
from megamix.comm.collectives import Collectives
from megamix.comm.topology import Axis
from megamix.config import ConfigError
from megamix.run.resume import find_start
from megamix.run.run_record import check_run
from megamix.supervise.status import PreemptedError
from tests.builders import run_on_ranks, tiny_job
from tests.checkpoint.seal import edit
from tests.conftest import FULL
from tests.train.recorded import Record, attempts_recorded, overflows_injected

SCALES = ("dynamic", "headroom", "torch", "megatron", "deepspeed")

Change = Callable[[dict[str, Any]], object]


def _config(data, folder, loss_scale="dynamic", steps=12, resume="auto"):
    longer = {} if loss_scale == "headroom" else {"growth_interval": 1000}  # longer than any run here
    return tiny_job(
        folder,
        tokens=data,
        valid=None,
        num_layers=1, dropout=0.1,
        loss_scale={"rule": loss_scale, "init_scale": 2.0**4} | longer,
        steps=steps, eval_interval=0,
        resume=resume, save_interval=3, async_save=False,
        log_interval=50,
    )  # fmt: skip


def _interrupted(config, leave_at):
    """Run until it is asked to leave. Attempt 3 overflows, and from 5 on all do, so that batches wait at the end."""
    record = Record()

    def leave(plan):
        if plan.launched == leave_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        suppress(PreemptedError),
        attempts_recorded(record, leave),
        overflows_injected(record, frozenset((3, 5, 6, 7, 8)), frozenset()),
    ):
        run_on_ranks(config)


@pytest.fixture(scope="module")
def ready(data, tmp_path_factory):
    """Leave a run that was asked to stop: two checkpoints, the newer with batches that wait."""
    folder = Path(tmp_path_factory.mktemp("ready"))
    _interrupted(_config(data, folder), 6)
    (newest, _) = checkpoints(folder / "run/checkpoints")
    progress = read_manifest(newest / "manifest.json").run.progress
    assert progress["waiting"]
    assert progress["interval_losses"]
    return folder


@pytest.fixture
def run(ready, tmp_path):
    """Return a copy of the run, to be damaged."""
    return Path(shutil.copytree(ready, tmp_path / "copy"))


def _in_config(old, new):
    def change(fields):
        assert old in fields["run"]["config"]
        fields["run"]["config"] = fields["run"]["config"].replace(old, new)

    return change


# Changes that may be right for other code than the present one.
REFUSED = {
    "a state of another rule": (lambda fields: fields["loss_scale"].update(peaks=[1.0]), "loss_scale: it holds"),
    "another rule": (lambda fields: fields.update(loss_scale_rule="TorchLossScale"), "loss_scale_rule"),
    "another model": (_in_config("hidden_size = 32", "hidden_size = 48"), "is no parameter of the model"),
    "a wrong kind": (_in_config("num_layers = 1\n", "num_layers = '1'\n"), r"model\.num_layers"),
    "a missing key": (_in_config("num_layers = 1\n", ""), r"model\.num_layers"),
    "states": (_in_config('name = "adamw"', 'name = "nag"'), 'optimizer.name: the checkpoint has "nag"'),
    "an alias": (lambda fields: fields["params"][0].update(aliases=["x"]), "params"),
}  # fmt: skip


def _start(config):
    return find_start(config, data_fingerprints(config), AllOrNone(Collectives(Axis()), torch.device("cpu")))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_code_of_now_does_not_take_is_refused_and_stays(data, run, name):
    change, told = REFUSED[name]
    newest, older = checkpoints(run / "run/checkpoints")
    edit(newest, change)
    with pytest.raises(ConfigError, match=told) as refused:
        _start(_config(data, run))
    assert name == "states" or str(newest) in str(refused.value)
    assert checkpoints(run / "run/checkpoints") == [newest, older]


def test_keys_of_a_later_version_are_told_and_no_damage(data, run, tmp_path):
    newest, _ = checkpoints(run / "run/checkpoints")
    edit(newest, _in_config("[training]\n", "[training]\nlater = 1\n"))
    start = _start(_config(data, run))
    assert start.checkpoint is not None
    assert start.checkpoint.path == newest
    assert "changed since: training.later: 1 -> not set" in start.lines


@pytest.mark.parametrize("arguments", [["generate"], ["evaluate"], ["export", "--to", "hf", "out"]], ids=lambda a: a[0])
def test_nor_is_its_model_taken(run, tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    newest, _ = checkpoints(run / "run/checkpoints")
    edit(newest, REFUSED["another model"][0])
    assert main([arguments[0], str(run / "run"), *arguments[1:]]) == 2
    told = capsys.readouterr().err
    assert "is no parameter of the model" in told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_what_runs_of_every_rule_save_is_accepted(data, tmp_path):
    for loss_scale in SCALES if FULL else SCALES[1:2]:
        _interrupted(_config(data, tmp_path / loss_scale, loss_scale), 6)
        saved = checkpoints(tmp_path / loss_scale / "run/checkpoints")
        assert len(saved) == 2
        for path in saved:
            read_checkpoint(path, check_run)
