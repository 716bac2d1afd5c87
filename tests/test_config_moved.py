"""Every key that has moved: a user is told its place, what version 1 has saved is read by it, loads and trains on."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megamix.checkpoint.commands import diff
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.verify import read_checkpoint
from megamix.cli import main
from megamix.config import ConfigError, config_from_dict, config_to_toml, effective_tables, load_config
from megamix.config.renamed import MOVED
from megamix.config.toml_text import parse_value, value_text
from megamix.data.token_file import TokenFileWriter
from megamix.hub.convert import import_model
from megamix.hub.source import open_source
from megamix.train.same_run import changes
from megamix.train.saved_run import check_run
from tests.checkpoint.seal import SHARD, edit
from tests.hub.folders import LLAMA, write_hugging_face
from tests.test_config_errors import Tree, changed, problems_of, put
from tests.train.jobs import run_on_ranks

SAVED = Path(__file__).parent / "saved/version_1"
CHECKPOINT = SAVED / "step_00000003"  # of a run by AdamW, in FP16
# Of each key: a value, and what reads it now.
CASES: dict[str, tuple[object, Tree]] = {
    "checkpoint.verify_interval": (7, {}),
    "optimizer.betas": ([0.8, 0.9], {}),
    "optimizer.eps": (1e-6, {}),
    "optimizer.momentum": (0.5, {"optimizer": {"name": "nag"}}),
    "optimizer.momentum_form": ("velocity", {"optimizer": {"name": "nag"}}),
    "optimizer.decoupled_weight_decay": (True, {"optimizer": {"name": "nag"}}),
    "precision.loss_scale": ("torch", {}),
    "precision.init_scale": (1024, {"precision": {"loss_scale": {"rule": "dynamic"}}}),
    "precision.growth_factor": (4, {"precision": {"loss_scale": {"rule": "dynamic"}}}),
    "precision.backoff_factor": (0.25, {"precision": {"loss_scale": {"rule": "torch"}}}),
    "precision.growth_interval": (50, {"precision": {"loss_scale": {"rule": "megatron"}}}),
    "precision.hysteresis": (3, {"precision": {"loss_scale": {"rule": "megatron"}}}),
    "precision.consecutive_hysteresis": (True, {"precision": {"loss_scale": {"rule": "deepspeed"}}}),
    "precision.margin": (8, {"precision": {"loss_scale": {"rule": "headroom"}}}),
    "precision.min_scale": (2, {"precision": {"loss_scale": {"rule": "dynamic"}}}),
    "precision.max_scale": (2**30, {"precision": {"loss_scale": {"rule": "dynamic"}}}),
}


def test_there_is_a_case_of_every_key_that_has_moved() -> None:
    assert set(CASES) == set(MOVED)


@pytest.mark.parametrize("key", MOVED)
def test_a_user_s_old_key_is_refused_with_its_place_where_it_is_read(tmp_path: Path, key: str) -> None:
    value, beside = CASES[key]
    (problem,) = problems_of(put(changed(**beside), key, value))
    _follow(problem, key, value, beside)
    path = tmp_path / "job.toml"
    path.write_text(config_to_toml(config_from_dict(changed(**beside))).replace(": not set", ""))  # a user's own
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"{key}={value_text(value)}"])
    assert caught.value.problems == (problem,)


@pytest.mark.parametrize("scale", [1024, 2.0**-4])
def test_a_number_was_a_fixed_scale(scale: float) -> None:
    (problem,) = problems_of(changed(precision={"loss_scale": scale}))
    _follow(problem, "precision.loss_scale", scale, {})
    assert problem.endswith(f'write rule = "static" and init_scale = {scale} under [precision.loss_scale]')


def _follow(problem: str, key: str, value: object, beside: Tree) -> None:
    """Write what the line says."""
    found = re.fullmatch(r"([\w.]+): got (.+), but this is .+ today; write (.+) under \[([\w.]+)\]", problem)
    assert found
    assert found.groups()[:2] == (key, value_text(value))
    tree = changed(**beside)
    for item in found[3].split(" and "):
        name, _, text = item.partition(" = ")
        assert f"{found[4]}.{name}" in problem.partition(" today")[0]
        tree = put(tree, f"{found[4]}.{name}", parse_value(text))
    config_from_dict(tree)


def test_an_old_key_is_judged_as_if_it_stood_in_its_place() -> None:
    problems = problems_of(changed(optimizer={"betas": 3, "momentum": 0.5}, precision={"loss_scale": "torhc"}))
    assert sorted(problem.split(", ")[0] for problem in problems) == [
        "optimizer.adamw.betas: got 3", "optimizer.betas: got 3", "optimizer.momentum: got 0.5",
        "optimizer.nag: got { momentum = 0.5 }", 'precision.loss_scale.rule: got "torhc"',
        'precision.loss_scale: got "torhc"',
    ]  # fmt: skip


SEARCHED = {"init_scale": 2.0**10, "growth_interval": 5}
# Of each configuration that version 1 has saved: what it says now.
SAYS: dict[str, Tree] = {
    "adamw": {"optimizer": {"adamw": {"betas": [0.8, 0.9], "eps": 1e-6}}},
    "nag": {
        "optimizer": {
            "name": "nag",
            "nag": {"momentum": 0.8, "momentum_form": "velocity", "decoupled_weight_decay": True},
        }
    },
    "dynamic": {
        "precision": {
            "loss_scale": {"rule": "dynamic", **SEARCHED, "growth_factor": 4.0, "backoff_factor": 0.25}
            | {"hysteresis": 2, "min_scale": 2.0, "max_scale": 2.0**20}
        }
    },
    "headroom": {"precision": {"loss_scale": {"rule": "headroom", "margin": 8.0}}},
    "torch": {"precision": {"loss_scale": {"rule": "torch", **SEARCHED, "growth_factor": 4.0}}},
    "megatron": {"precision": {"loss_scale": {"rule": "megatron", **SEARCHED, "hysteresis": 3}}},
    "deepspeed": {"precision": {"loss_scale": {"rule": "deepspeed", **SEARCHED, "consecutive_hysteresis": True}}},
    "static": {"precision": {"loss_scale": {"rule": "static", "init_scale": 64.0}}},
    "off": {"precision": {"dtype": "bf16"}},
    "dp2tp2pp2": {"model": {"num_layers": 2}, "parallelism": {"dp_size": 2, "tp_size": 2, "pp_size": 2}},
}
MODEL = {"vocab_size": 16, "seq_len": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "ffn_hidden_size": 8}


def now(folder: Path, **said: Any) -> Tree:
    """The tree of all of them, and of the run of the checkpoint."""
    tree: Tree = {
        "model": MODEL,
        "data": {"train": [{"markov": 4}]},
        "optimizer": {"lr": 0.01, "compile": False},
        "lr_schedule": {"warmup_steps": 2},
        "precision": {"dtype": "fp16"},
        "training": {"steps": 20, "micro_batch_size": 2, "global_batch_size": 8},
        "checkpoint": {"folder": str(folder)},
        "metrics": {"log_interval": 4, "tensorboard": False},
    }
    return {name: keys | said.get(name, {}) for name, keys in (tree | {"parallelism": {}}).items()}


@pytest.mark.parametrize("name", [path.stem for path in sorted(SAVED.glob("*.toml"))])
def test_what_version_1_has_saved_says_the_same(name: str) -> None:
    told: list[str] = []
    want = config_from_dict(now(Path("run"), **SAYS[name]))
    assert (load_config(SAVED / f"{name}.toml", say=told.append), told) == (want, [])
    assert effective_tables((SAVED / f"{name}.toml").read_text()) == effective_tables(config_to_toml(want))


def test_another_choice_on_top_of_what_was_saved_has_its_own_defaults(tmp_path: Path) -> None:
    old = load_config(SAVED / "torch.toml", ["precision.loss_scale.rule=megatron"]).precision.loss_scale
    assert dict(old) | SEARCHED == dict(old)  # as they were set
    (tmp_path / "new.toml").write_text(config_to_toml(config_from_dict(now(tmp_path))))
    told: list[str] = []
    new = load_config(tmp_path / "new.toml", ["precision.loss_scale.rule=megatron"], told.append).precision.loss_scale
    assert (dict(new)["init_scale"], dict(new)["growth_interval"], told) == (2.0**32, 1000, [])


def test_a_checkpoint_of_version_1_loads_bit_for_bit_and_its_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    old = Path(shutil.copytree(CHECKPOINT, run / "checkpoints" / CHECKPOINT.name))
    config = config_from_dict(
        now(run, optimizer=SAYS["adamw"]["optimizer"], precision={"loss_scale": SEARCHED}),
        {"training": {"steps": 6}, "checkpoint": {"save_interval": 3}},
    )
    saved = read_checkpoint(old, check_run)
    record = saved.manifest.run.model_copy(update={"config": config_to_toml(config)})
    assert changes(saved.path, saved.manifest, record, 24, own=True) == [f'checkpoint.folder: "run" -> "{run}"']
    stored = {key.split("|")[0]: part for key, part in load_file(old / SHARD).items() if "|master|" in key}
    loaded = open_source(run).load(torch.float32, torch.device("cpu")).state_dict()
    assert all(torch.equal(loaded[name], part) for name, part in stored.items())
    run_on_ranks(config)
    newest = checkpoints(run / "checkpoints")[0]
    assert newest.name == "step_00000006"
    lines = list(diff(old, newest))
    assert [line for line in lines if line.startswith("config.")] == [f"config.checkpoint.folder: run -> {run}"]
    with TokenFileWriter(tmp_path / "tokens", 16) as writer:
        writer.add(np.arange(64) % 16)
    assert main(["evaluate", str(old), "--data", str(tmp_path / "tokens")]) == 0
    assert main(["export", str(old), "--to", "hf", str(tmp_path / "hf")]) == 0
    assert main(["checkpoint", "verify", str(old)]) == 0
    assert "damaged" not in capsys.readouterr().out


def test_a_model_that_version_1_has_imported_is_begun_from(tmp_path: Path) -> None:
    write_hugging_face(LLAMA, tmp_path / "hf")
    path = Path(import_model(tmp_path / "hf", tmp_path / "imported"))

    def without_family(fields: Tree) -> None:
        fields["run"]["config"] = fields["run"]["config"].replace('family = "transformer"\n', "")

    edit(path, without_family)
    checkpoint = read_checkpoint(path, check_run)
    config = config_from_dict(now(tmp_path / "run"), {"model": dict(open_source(path).config)})
    record = checkpoint.manifest.run.model_copy(update={"config": config_to_toml(config)})
    assert "family" not in checkpoint.manifest.run.config
    assert changes(checkpoint.path, checkpoint.manifest, record, 0, own=True) == []
