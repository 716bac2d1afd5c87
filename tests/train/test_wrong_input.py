"""Wrong input is answered before any time is spent: one message with field, value and fix, nothing written, no torch
imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megamix.cli import main
from megamix.config import config_to_toml
from tests.train.jobs import tiny_job, write_data


@pytest.fixture
def job(tmp_path) -> tuple[Path, Path]:
    """(folder, a configuration file for a job in it that would run)."""
    write_data(tmp_path / "data")
    config = tmp_path / "job.toml"
    config.write_text(config_to_toml(tiny_job(tmp_path)))
    return tmp_path, config


def _truncate(folder: Path) -> None:
    with (folder / "data/train.bin").open("r+b") as file:
        file.truncate(100)


def _remove(folder: Path) -> None:
    (folder / "data/valid.idx").unlink()


def _leave_a_run(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run/metrics.jsonl").touch()


def _put_a_file_in_the_way(folder: Path) -> None:
    (folder / "run").touch()


def _nothing(folder: Path) -> None:
    pass


# What is wrong, on how many ranks, what is done to the files, and what the message must name.
MISTAKES: dict[str, tuple[list[str], int, Callable[[Path], None], str]] = {
    "unknown key": (["optimizer.weight_decy=0.1"], 1, _nothing, "optimizer.weight_decy.*weight_decay"),
    "wrong type": (['training.steps="many"'], 1, _nothing, 'training.steps: got "many", must be a whole number; write'),
    "heads do not divide": (["model.num_heads=3"], 1, _nothing, "hidden_size.*32.*num_heads.*3.*write"),
    "batch does not divide": (
        ["training.global_batch_size=7"],
        1,
        _nothing,
        "training.global_batch_size: got 7.*write",
    ),
    "world size does not divide the batch": ([], 3, _nothing, "global_batch_size: got 8.*3.*write"),
    "world size is not dp_size": (
        ["parallelism.dp_size=2"],
        4,
        _nothing,
        "parallelism.dp_size: got 2.*4.*write dp_size = 4",
    ),
    "missing token file": ([], 1, _remove, "data.valid.*valid.idx.*"),
    "truncated token file": ([], 1, _truncate, "data.train.*100 bytes.*"),
    "vocabulary larger than the model's": (["model.vocab_size=60"], 1, _nothing, "model.vocab_size.*60.*"),
    "fp16 without loss scale": (
        ['precision.loss_scale.rule="off"'],
        1,
        _nothing,
        "precision.loss_scale.rule: got .*off.*fp16.*write",
    ),
    "negative lr": (["optimizer.lr=-1.0"], 1, _nothing, "optimizer.lr: got -1.0, must be greater than 0; write"),
    "folder of another run": (
        [],
        1,
        _leave_a_run,
        r"checkpoint.folder: .*run holds another run \(metrics.jsonl\); write",
    ),
    "checkpoint that is none": (
        ["checkpoint.resume=runs"],
        1,
        _nothing,
        "checkpoint.resume: runs is no checkpoint; write auto, never or a path",
    ),
    "folder that cannot be made": (
        [],
        1,
        _put_a_file_in_the_way,
        "checkpoint.folder: .*run cannot be made.*write another",
    ),
    "missing tokenizer": (
        ['data.tokenizer="no.json"'],
        1,
        _nothing,
        "data.tokenizer: tokenizer 'no.json' is missing; name",
    ),
    "tokenizer larger than the model": (
        ['data.tokenizer="{folder}/data/tokenizer.json"'],
        1,
        lambda folder: write_data(folder / "data", tokenizer=True),
        "data.tokenizer: .*tokenizer.json knows 271 tokens, more than model.vocab_size 64; write vocab_size = 271",
    ),
    "checkpoint of the run itself": (
        ["checkpoint.resume={folder}/run/checkpoints/step_00000003"],
        1,
        _nothing,
        "checkpoint.resume: .*step_00000003 is this run's own; write auto",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_nothing_is_written(job, monkeypatch, capsys, name: str) -> None:
    folder, config = job
    overrides, world_size, damage, message = MISTAKES[name]
    damage(folder)
    overrides = [text.format(folder=folder) for text in overrides]
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert main(["train", str(config), *overrides]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert ("2 problems" if "vocabulary" in name else "1 problem\n") in error  # the vocabulary's: train and valid
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_a_check_says_what_the_job_would_do(job, monkeypatch, capsys) -> None:
    folder, config = job
    run = folder / "run"

    def told(*overrides: str) -> str:
        assert main(["train", str(config), "--check", *overrides]) == 0
        return capsys.readouterr().out

    assert told() == f"no problems; 1 rank; would start a new run in {run}\n"
    (run / "checkpoints/step_00000007").mkdir(parents=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert told() == f"no problems; 2 ranks; would go on from step 7 of {run} to step 12\n"
    assert told("training.steps=7") == (
        f"no problems; 2 ranks; {run} is after step 7 already, so no step is left; "
        "training.steps = 8 or more has some\n"
    )
    begun = folder / "other/checkpoints/step_00000003"
    begun.mkdir(parents=True)
    (begun / "manifest.json").touch()
    resume, new = f"checkpoint.resume={begun}", f"checkpoint.folder={folder / 'new'}"
    assert told(resume, new) == f"no problems; 2 ranks; would start a new run in {folder / 'new'} from {begun}\n"
    assert "go on from step 7" in told(resume)  # a run that has saved goes on from its own
    monkeypatch.setenv("RANK", "1")
    assert told() == ""


def test_two_mistakes_are_shown_at_once(job, monkeypatch, capsys) -> None:
    folder, config = job
    assert main(["train", str(config), "optimizer.lr=-1.0", "model.hiden_size=3"]) == 2
    error = capsys.readouterr().err
    assert "2 problems" in error
    assert "optimizer.lr" in error
    assert "model.hiden_size" in error
    _remove(folder)
    _leave_a_run(folder)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["train", str(config)]) == 2
    error = capsys.readouterr().err
    assert "3 problems" in error
    assert all(field in error for field in ("training.global_batch_size", "data.valid", "checkpoint.folder"))


def test_only_the_first_rank_speaks(job, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["train", str(job[1]), "optimizer.lr=-1.0"]) == 2
    assert capsys.readouterr().err == ""


def test_an_empty_corpus_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "texts").mkdir()
    args = ["prepare", "--input", str(tmp_path / "texts"), "--output", str(tmp_path / "out")]
    assert main(args) == 2
    assert re.search("input.*texts.*", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_tensorboard_that_is_not_installed_is_reported_before_the_run(job, monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["train", str(job[1])]) == 2
    assert (
        "metrics.tensorboard: is true, but the package tensorboard is not installed; run pip" in capsys.readouterr().err
    )


def test_tokenizers_that_are_not_installed_are_reported_before_the_run(job, monkeypatch, capsys) -> None:
    folder, config = job
    for name, package in (("tokenizer.json", "tokenizers"), ("t.model", "sentencepiece")):
        (folder / name).write_text("no JSON")
        monkeypatch.setitem(sys.modules, package, None)
        assert main(["train", str(config), f'data.tokenizer="{folder / name}"']) == 2
        want = f"data.tokenizer: the Python package '{package}' is not installed; run pip"
        assert want in capsys.readouterr().err


def test_a_file_that_is_no_tokenizer_is_reported_before_the_run(job, capsys) -> None:
    folder, config = job
    (folder / "tokenizer.json").write_text("{}")
    assert main(["train", str(config), f'data.tokenizer="{folder / "tokenizer.json"}"']) == 2
    assert "is no tokenizer.json" in capsys.readouterr().err


def test_mistakes_are_found_without_importing_torch(job) -> None:
    _, config = job
    code = (
        "import sys; from megamix.cli import main; "
        f"status = main(['train', {str(config)!r}, 'data.tokenizer=\"no.json\"']); "
        "print(status, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2", "False"]


def test_a_cublas_that_is_not_deterministic_is_refused_where_the_run_is_to_be(job, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert main(["train", str(job[1]), "--check"]) == 0
    assert main(["train", str(job[1]), "--check", "training.deterministic=true"]) == 2
    said = capsys.readouterr().err
    assert 'training.deterministic: is true, but CUBLAS_WORKSPACE_CONFIG is ":0:0"' in said
    assert "set it to :4096:8 or :16:8" in said
