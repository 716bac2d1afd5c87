"""Whoever updates megamix or a plugin under a run: a checkpoint that the present code cannot load or contradicts, such
as that of a plugin with other states, is refused with words by `--check` and by a start; nothing is renamed, and with
the old code back the run continues. What runs of every loss-scale rule save is taken.
"""

import importlib
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.manifest import read_manifest
from megamix.checkpoint.verify import read_checkpoint
from megamix.cli.verbs import main
from megamix.config import ConfigError
from megamix.plugins import OPTIMIZERS
from megamix.train.run_record import check_run
from tests.builders import run_on_ranks, tiny_job
from tests.checkpoint.seal import edit
from tests.conftest import FULL
from tests.train.recorded import run_recorded

PLUGIN = "tuned_plugin"
SOURCE = """
import torch
from pydantic import Field
from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.plugins import Section, register_optimizer
from dataclasses import dataclass

class Keys(Section):
    rho: float = Field(0.5, le=4.0)

@dataclass(frozen=True, kw_only=True)
class Tuned(Optimizer):
    rho: float = 0.5

    def states(self, name, shape):
        return {"momentum": torch.float32}

    def equation(self, grad, master, states, at):
        state = {name: self.rho * value + grad for name, value in states.items()}
        return master - at.lr * state["momentum"], state

def build(**keys):
    return Tuned(**keys)

register_optimizer("tuned", Keys, build)
"""
STATES = 'return {"momentum": torch.float32}'
BUILD = "return Tuned(**keys)"


def _forget():
    for table in (OPTIMIZERS.sections, OPTIMIZERS.registered):
        table.pop("tuned", None)
    sys.modules.pop(PLUGIN, None)


def _with_code(folder, source):
    """Write the plugin's source for the next import."""
    (folder / f"{PLUGIN}.py").write_text(source)
    _forget()
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # dates in it count in seconds
    importlib.invalidate_caches()


def _config(place, data, steps, rho, **checkpoint):
    return tiny_job(
        place,
        tokens=data,
        plugins=[PLUGIN],
        num_layers=1,
        optimizer={"name": "tuned", "lr": 1e-3, "tuned": {"rho": rho}},
        dtype="fp32",
        steps=steps,
        eval_interval=0,
        decay_style="constant",
        checkpoint={"save_interval": 2, **checkpoint},
    )


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """Save a run after updates 2 and 4, by a plugin that lies beside it."""
    folder = tmp_path_factory.mktemp("saved")
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        _with_code(folder, SOURCE)
        run_on_ranks(_config(folder, data, 4, 2.0))
    _forget()
    return folder


@pytest.fixture
def run(saved, tmp_path, doors):
    """Return a copy of the run, to be damaged or continued."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    sys.path.insert(0, str(tmp_path))
    _with_code(tmp_path, SOURCE)
    importlib.import_module(PLUGIN)
    return tmp_path


def _told(run, config, capsys):
    """Return the refusal, for which `--check` and a start use the same words."""
    (run / "job.toml").write_text(config.text)
    capsys.readouterr()
    assert main(["train", str(run / "job.toml"), "--check"]) == 2
    checked = capsys.readouterr().err.partition(": ")[2].rstrip()
    with pytest.raises(ConfigError) as refused:
        run_on_ranks(config)
    assert checked == str(ConfigError(refused.value.problems, str(run / "job.toml")))
    return checked


CHANGES = [
    (
        STATES, 'return {"momentum": torch.float32, "energy": torch.float32}', 2.0,
        "holds master, momentum, but the present optimizer has master, momentum, energy",
    ),
    (BUILD, 'raise ValueError(f"rho must be at most 1, got {keys[\'rho\']}")', 2.0, "rho must be at most 1, got 2.0"),
    (STATES, "import not_there", 2.0, "ModuleNotFoundError: No module named 'not_there'"),
    ("le=4.0", "le=1.0", 0.5, "optimizer.tuned.rho was saved as 2.0: Input should be less than or equal to 1"),
]  # fmt: skip


def test_what_the_plugin_of_now_does_not_take_is_refused_and_stays(run, data, capsys):
    whole = checkpoints(run / "run/checkpoints")
    for old, new, rho, told in CHANGES:
        _with_code(run, SOURCE.replace(old, new))
        words = _told(run, _config(run, data, 6, rho), capsys)
        assert told in words
        assert PLUGIN in words
        assert sorted((run / "run/checkpoints").iterdir(), reverse=True) == whole, told
    _with_code(run, SOURCE)
    run_on_ranks(_config(run, data, 6, 2.0))
    assert "step_00000004 after update 4" in capsys.readouterr().out


def test_a_saved_value_that_build_refuses_now_stops_no_run_that_has_another(run, data, capsys):
    _with_code(run, SOURCE.replace(BUILD, "assert keys['rho'] <= 1, keys\n    " + BUILD))
    run_on_ranks(_config(run, data, 6, 0.5))
    assert "changed since: optimizer.tuned.rho: 2.0 -> 0.5" in capsys.readouterr().out


def test_code_that_changed_under_a_run_is_told_in_a_line(run, data, capsys):
    _with_code(run, SOURCE.replace("at.lr *", "10 * at.lr *"))
    config = _config(run, data, 4, 2.0)
    (run / "job.toml").write_text(config.text)
    assert main(["train", str(run / "job.toml"), "--check"]) == 0
    checked = capsys.readouterr().out
    run_on_ranks(config)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "source code" in line)
    assert re.fullmatch(rf"changed since: source code of {PLUGIN} \(SHA-256\): \w{{16}} -> \w{{16}}", line)
    assert line in checked


def _set_aside(path, end):
    return path.rename(path.with_name(f"{path.name}.damaged-{end}"))


def test_what_was_set_aside_and_is_whole_can_be_brought_back(run, data, capsys):
    newest, older = checkpoints(run / "run/checkpoints")
    again, hurt = _set_aside(newest, "0123abcd"), _set_aside(older, "4567abcd")
    (hurt / "rank_00000.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="megamix checkpoint ls .* says which of them are whole"):
        run_on_ranks(_config(run, data, 6, 2.0))
    assert main(["checkpoint", "ls", str(run / "run")]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].endswith("damaged, set aside")
    assert rows[2].endswith("whole, set aside: megamix checkpoint restore brings it back")
    assert main(["checkpoint", "restore", str(run / "run")]) == 1  # one of them is damaged
    printed = capsys.readouterr()
    assert printed.out == f"{again.name}: is {newest.name} again\n"
    assert f"{hurt.name}/rank_00000.safetensors: 0 bytes" in printed.err
    assert checkpoints(run / "run/checkpoints") == [newest]
    run_on_ranks(_config(run, data, 6, 2.0))
    assert "step_00000004 after update 4" in capsys.readouterr().out


def test_restore_takes_one_by_its_path_and_never_the_place_of_another(run, capsys):
    newest, _ = checkpoints(run / "run/checkpoints")

    def restored(path, status):
        assert main(["checkpoint", "restore", str(path)]) == status
        return "".join(capsys.readouterr())

    aside = Path(shutil.copytree(newest, newest.with_name(f"{newest.name}.damaged-0123abcd")))
    assert f"{newest} is there already" in restored(aside, 2)
    shutil.rmtree(newest)
    file = aside / "rank_00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # a damage that only the bytes show
    assert "its checksum" in restored(aside, 1)
    file.write_bytes(content)
    assert restored(aside, 0) == f"{aside.name}: is {newest.name} again\n"
    assert "holds nothing that was set aside" in restored(newest, 2)


# Runs without a plugin, whose manifests say what other code than the present one might have written.

SCALES = ("dynamic", "headroom", "torch", "megatron", "deepspeed")


def _own(data, folder, loss_scale="dynamic"):
    longer = {} if loss_scale == "headroom" else {"growth_interval": 1000}  # longer than any run here
    rule = {"rule": loss_scale, "init_scale": 2.0**4} | longer
    checkpoint = {"save_interval": 3, "async_save": False}
    return tiny_job(
        folder, tokens=data, valid=None, num_layers=1, dropout=0.1, loss_scale=rule, checkpoint=checkpoint,
        eval_interval=0, log_interval=50,
    )  # fmt: skip


def _interrupted(config):
    """Run until it is asked to leave. Attempt 3 overflows, and from 5 on all do, so that batches wait at the end."""
    run_recorded(config, frozenset((3, 5, 6, 7, 8)), leave_at=6)


@pytest.fixture(scope="module")
def ready(data, tmp_path_factory):
    """Leave a run that was asked to stop: two checkpoints, the newer with batches that wait."""
    folder = tmp_path_factory.mktemp("ready")
    _interrupted(_own(data, folder))
    (newest, _) = checkpoints(folder / "run/checkpoints")
    progress = read_manifest(newest / "manifest.json").run.progress
    assert progress["waiting"]
    assert progress["interval_losses"]
    return folder


@pytest.fixture
def asked_to_stop(ready, tmp_path):
    shutil.copytree(ready, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _in_config(old, new):
    def change(fields):
        assert old in fields["run"]["config"]
        fields["run"]["config"] = fields["run"]["config"].replace(old, new)

    return change


ANOTHER_MODEL = _in_config("hidden_size = 32", "hidden_size = 48"), "is no parameter of the model"
# Changes that may be right for other code than the present one.
REFUSED = {
    "another rule": (lambda fields: fields.update(loss_scale_rule="TorchLossScale"), "loss_scale_rule"),
    "another model": ANOTHER_MODEL,
    "a missing key": (_in_config("num_layers = 1\n", ""), "model.num_layers"),
    "an alias": (lambda fields: fields["params"][0].update(aliases=["x"]), "is no parameter of the model"),
}


def _refused(config):
    with pytest.raises(ConfigError) as refused:
        run_on_ranks(config)
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_code_of_now_does_not_take_is_refused_alike_on_all_ranks_and_stays(
    data, asked_to_stop, run_ranks, name
):
    change, told = REFUSED[name]
    newest, older = checkpoints(asked_to_stop / "run/checkpoints")
    edit(newest, change)
    first, second = run_ranks(_refused, 2, _own(data, asked_to_stop))
    assert first == second
    assert told in first
    assert str(newest) in first
    assert checkpoints(asked_to_stop / "run/checkpoints") == [newest, older]


def test_keys_of_a_later_version_are_told_and_no_damage(data, asked_to_stop, capsys):
    newest, _ = checkpoints(asked_to_stop / "run/checkpoints")
    edit(newest, _in_config("[training]\n", "[training]\nlater = 1\n"))
    run_on_ranks(_own(data, asked_to_stop))
    told = capsys.readouterr().out
    assert f"goes on from {newest}" in told
    assert "changed since: training.later: 1 -> not set" in told


@pytest.mark.parametrize("arguments", [["generate"], ["evaluate"], ["export", "--to", "hf", "out"]], ids=lambda a: a[0])
def test_nor_is_its_model_taken(asked_to_stop, monkeypatch, capsys, arguments):
    monkeypatch.chdir(asked_to_stop)
    newest, _ = checkpoints(asked_to_stop / "run/checkpoints")
    edit(newest, ANOTHER_MODEL[0])
    assert main([arguments[0], "run", *arguments[1:]]) == 2
    told = capsys.readouterr().err
    assert ANOTHER_MODEL[1] in told
    assert "Traceback" not in told
    assert not Path("out").exists()


def test_what_runs_of_every_rule_save_is_accepted(data, tmp_path):
    for loss_scale in SCALES if FULL else SCALES[1:2]:
        _interrupted(_own(data, tmp_path / loss_scale, loss_scale))
        saved = checkpoints(tmp_path / loss_scale / "run/checkpoints")
        assert len(saved) == 2
        for path in saved:
            read_checkpoint(path, check_run)
