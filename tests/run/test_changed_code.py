"""Whoever changes a plugin under a run: a checkpoint that the present code cannot load, such as that of a plugin with
other states, is refused with words by `--check` and by a start; nothing is renamed, and with the old code back the run
continues.
"""

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest

from megamix.checkpoint.folder import checkpoints
from megamix.cli import main
from megamix.config import ConfigError, config_to_toml
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.checkpoint.seal import edit

PLUGIN = "tuned_plugin"
SOURCE = """
import torch
from pydantic import Field
from megamix.mixed_precision.optimizers import Optimizer
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


def _with_code(folder, source):
    """Write the plugin's source for the next import."""
    from megamix.plugins import OPTIMIZERS

    (folder / f"{PLUGIN}.py").write_text(source)
    for table in (OPTIMIZERS.sections, OPTIMIZERS.registered, sys.modules):
        table.pop("tuned", None)
    sys.modules.pop(PLUGIN, None)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # dates in it count in seconds
    importlib.invalidate_caches()


def _config(folder, steps, rho, **sections):
    return tiny_job(
        folder,
        plugins=[PLUGIN],
        num_layers=1,
        optimizer={"name": "tuned", "lr": 1e-3, "tuned": {"rho": rho}},
        dtype="fp32",
        steps=steps,
        eval_interval=0,
        decay_style="constant",
        checkpoint={"save_interval": 2} | sections.get("checkpoint", {}),
    )


@pytest.fixture
def run(tmp_path, doors):
    """Save a run after updates 2 and 4, by a plugin that lies beside it."""
    sys.path.insert(0, str(tmp_path))
    write_data(tmp_path / "data")
    _with_code(tmp_path, SOURCE)
    run_on_ranks(_config(tmp_path, 4, 2.0))
    return tmp_path


def _told(run, config, capsys):
    """Return the refusal, for which `--check` and a start use the same words."""
    (run / "job.toml").write_text(config_to_toml(config))
    capsys.readouterr()
    assert main(["train", str(run / "job.toml"), "--check"]) == 2
    checked = capsys.readouterr().err.partition(": ")[2].rstrip()
    with pytest.raises(ConfigError) as refused:
        run_on_ranks(config)
    started = str(ConfigError(refused.value.problems, str(run / "job.toml")))
    assert checked == started
    return started


CHANGES = {
    "a state added": (
        STATES, 'return {"momentum": torch.float32, "energy": torch.float32}', 2.0,
        "holds master, momentum, but the present optimizer has master, momentum, energy",
    ),
    "a state removed": (STATES, "return {}", 2.0, "holds master, momentum, but the present optimizer has master;"),
    "another dtype": (
        STATES, 'return {"momentum": torch.bfloat16}', 2.0,
        "holds master, momentum, but the present optimizer has master, momentum (BF16)",
    ),
    "a value refused by build": (
        BUILD, 'raise ValueError(f"rho must be at most 1, got {keys[\'rho\']}")', 2.0, "rho must be at most 1, got 2.0",
    ),
    "states that cannot be made": (STATES, "import not_there", 2.0, "ModuleNotFoundError: No module named 'not_there'"),
    "a build of other arguments": (BUILD, "return Tuned(**keys, other=1)", 2.0, "TypeError: "),
    "a bound below what was saved": (
        "le=4.0", "le=1.0", 0.5, "optimizer.tuned.rho was saved as 2.0: Input should be less than or equal to 1",
    ),
}  # fmt: skip


def test_what_the_code_of_now_does_not_take_is_refused_and_stays(run, capsys):
    saved = {path.name for path in checkpoints(run / "run/checkpoints")}
    for name, (old, new, rho, told) in CHANGES.items():
        assert old in SOURCE
        _with_code(run, SOURCE.replace(old, new))
        words = _told(run, _config(run, 6, rho), capsys)
        assert told in words, name
        assert PLUGIN in words, name
        assert "tuned" in words, name
        assert {path.name for path in (run / "run/checkpoints").iterdir()} == saved, name
    _with_code(run, SOURCE)
    run_on_ranks(_config(run, 6, 2.0))
    assert "step_00000004 after update 4" in capsys.readouterr().out


def test_a_saved_value_that_build_refuses_now_stops_no_run_that_has_another(run, capsys):
    _with_code(run, SOURCE.replace(BUILD, "assert keys['rho'] <= 1, keys\n    " + BUILD))
    run_on_ranks(_config(run, 6, 0.5))
    assert "changed since: optimizer.tuned.rho: 2.0 -> 0.5" in capsys.readouterr().out


def test_code_that_changed_under_a_run_is_told_in_a_line_and_an_older_checkpoint_that_kept_none_loads(run, capsys):
    _with_code(run, SOURCE.replace("at.lr *", "10 * at.lr *"))
    (run / "job.toml").write_text(config_to_toml(_config(run, 4, 2.0)))
    assert main(["train", str(run / "job.toml"), "--check"]) == 0
    checked = capsys.readouterr().out
    run_on_ranks(_config(run, 4, 2.0))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "changed since" in line)
    assert re.fullmatch(rf"changed since: source code of {PLUGIN} \(SHA-256\): \w{{16}} -> \w{{16}}", line)
    assert line in checked
    for path in checkpoints(run / "run/checkpoints"):
        edit(path, lambda fields: fields["run"].pop("code"))
    run_on_ranks(_config(run, 4, 2.0))
    printed = capsys.readouterr().out
    assert "goes on from" in printed
    assert "changed since" not in printed


def test_a_new_run_begins_from_the_weights_of_changed_states(run, caplog):
    _with_code(run, SOURCE.replace(STATES, CHANGES["a state added"][1]))
    newest = checkpoints(run / "run/checkpoints")[0]
    run_on_ranks(_config(run, 6, 2.0, checkpoint={"folder": str(run / "next"), "resume": str(newest)}))
    assert "energy of 11 parameters begin at zero" in caplog.text
    assert checkpoints(run / "next/checkpoints")[0].name == "step_00000006"


def _refused(config):
    with pytest.raises(ConfigError) as refused:
        run_on_ranks(config)
    return str(refused.value)


def test_two_ranks_are_refused_alike(run_ranks, tmp_path):
    write_data(tmp_path / "data")
    config = tiny_job(tmp_path, steps=2, eval_interval=0)
    run_on_ranks(config)
    (saved,) = checkpoints(tmp_path / "run/checkpoints")
    edit(saved, lambda fields: fields["params"][0].update(aliases=["x"]))
    first, second = run_ranks(_refused, 2, config)
    assert first == second
    assert "is no parameter of the model" in first
    assert checkpoints(tmp_path / "run/checkpoints") == [saved]


def test_what_was_set_aside_and_is_whole_can_be_brought_back(run, capsys):
    folder = run / "run/checkpoints"
    newest, older = checkpoints(folder)
    for path, end in ((newest, "damaged-0123abcd"), (older, "damaged-4567abcd")):
        path.rename(path.with_name(f"{path.name}.{end}"))
    hurt = older.with_name(f"{older.name}.damaged-4567abcd")
    (hurt / "rank_00000.safetensors").write_bytes(b"")
    again = newest.with_name(f"{newest.name}.damaged-0123abcd")
    with pytest.raises(ConfigError, match="megamix checkpoint ls .* says which of them are whole"):
        run_on_ranks(_config(run, 6, 2.0))
    assert main(["checkpoint", "ls", str(run / "run")]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].endswith("damaged, set aside")
    assert rows[2].endswith("whole, set aside: megamix checkpoint restore brings it back")
    assert main(["checkpoint", "restore", str(run / "run")]) == 1  # one of them is damaged
    printed = capsys.readouterr()
    assert printed.out == f"{again.name}: is {newest.name} again\n"
    assert f"{hurt.name}/rank_00000.safetensors: 0 bytes" in printed.err
    assert checkpoints(folder) == [newest]
    run_on_ranks(_config(run, 6, 2.0))
    assert "step_00000004 after update 4" in capsys.readouterr().out


def test_restore_takes_one_by_its_path_and_never_the_place_of_another(run, capsys):
    newest, _ = checkpoints(run / "run/checkpoints")
    aside = Path(shutil.copytree(newest, newest.with_name(f"{newest.name}.damaged-0123abcd")))
    assert main(["checkpoint", "restore", str(aside)]) == 2
    assert f"{newest} is there already" in capsys.readouterr().err
    shutil.rmtree(newest)
    content = bytearray((aside / "rank_00000.safetensors").read_bytes())
    content[-1] ^= 1
    (aside / "rank_00000.safetensors").write_bytes(content)  # a damage that only the bytes show
    assert main(["checkpoint", "restore", str(aside)]) == 1
    assert "its checksum" in capsys.readouterr().err
    content[-1] ^= 1
    (aside / "rank_00000.safetensors").write_bytes(content)
    assert main(["checkpoint", "restore", str(aside)]) == 0
    assert capsys.readouterr().out == f"{aside.name}: is {newest.name} again\n"
    assert newest.is_dir()
    assert main(["checkpoint", "restore", str(newest)]) == 2
    assert "holds nothing that was set aside" in capsys.readouterr().err
