"""The verbs print what was asked for, and answer wrong input by one message, before torch is imported."""

import argparse
import errno
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from megamix.arguments import lines_told
from megamix.cli import VERBS, _parse, main
from megamix.config import load_config

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


def test_show_prints_a_file_that_loads_equal(capsys, tmp_path):
    assert main(["config", QUICKSTART, "training.steps=90", "--show"]) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert load_config(shown) == load_config(QUICKSTART, ["training.steps=90"])


def test_without_a_verb_the_verbs_are_listed_by_task(capsys):
    assert main([]) == 2
    told = capsys.readouterr().err
    tasks = ["train a model:", "see whether it is right:", "use a model:", "look and measure:"]
    assert sorted(tasks, key=told.index) == tasks
    for verb in VERBS:
        assert re.search(rf"^  {verb.name} +\S", told, re.MULTILINE)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out.rstrip() == told.rstrip()


def test_schema_prints_json(capsys):
    assert main(["config", "--schema"]) == 0
    assert "model" in json.loads(capsys.readouterr().out)["properties"]


def test_show_without_a_file_says_so(capsys):
    assert main(["config", "--show"]) == 2
    assert "write megamix config CONFIG --show" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["checkpoint", "ls", str(ROOT)], ["config", QUICKSTART, "--show"]])
def test_a_reader_that_has_seen_enough_ends_a_verb_without_a_word(words, monkeypatch, capsys):
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w") as nobody_reads:
        monkeypatch.setattr("sys.stdout", nobody_reads)
        assert main(words) == 1
    assert capsys.readouterr().err == ""


def test_a_pipe_that_breaks_within_a_verb_is_told(capsys):
    def lines(arguments):
        yield "one"
        raise BrokenPipeError(errno.EPIPE, "a worker is gone")

    assert lines_told(lines)(argparse.Namespace(verb="prepare")) == 2
    assert "megamix prepare: a worker is gone" in capsys.readouterr().err


def test_overrides_may_stand_on_both_sides_of_a_flag(capsys, tmp_path):
    assert main(["config", QUICKSTART, "training.steps=90", "--show", "optimizer.lr=2e-3", "training.steps=91"]) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert load_config(shown) == load_config(QUICKSTART, ["optimizer.lr=2e-3", "training.steps=91"])
    for wrong, told in (
        (["train", QUICKSTART, "--check", "optimizer.lr=1", "--chek=1", "lr"], "--chek=1 lr; did you mean --check?"),
        (["checkpoint", "ls", "run", "optimizer.lr=1"], "optimizer.lr=1;"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
        assert f": unrecognized arguments: {told} write for example megamix {wrong[0]} " in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["train"], ["config", "--show"]])
def test_wrong_input_is_one_message_and_status_2(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # no data lies here
    name, *flags = verb
    assert main([name, *flags, QUICKSTART, "optimizer.lr=-1", "model.num_heads=5"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    files = 0 if name == "config" else 3  # that a job also lacks
    assert captured.err.startswith(f"megamix {name}: {QUICKSTART}: {2 + files} problems\n  optimizer.lr: got -1,")
    assert ("\n  data.train" in captured.err) is (name == "train")


def test_only_rank_0_speaks_and_every_rank_fails(capsys, monkeypatch):
    said = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", QUICKSTART, "optimizer.lr=-1"]) == 2
        said[rank] = capsys.readouterr().err
    assert "optimizer.lr" in said["0"]
    assert said["1"] == ""


def test_a_rank_that_torchrun_leaves_alone_with_its_mistake_says_it(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for name, value in {"RANK": "9", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", QUICKSTART, "model.num_heads=-1"]) == 2
    assert capsys.readouterr().err.startswith(f"rank 9: megamix train: {QUICKSTART}: 1 problem\n  model.num_heads")
    assert waited == [6.0]


def test_train_hands_the_configuration_to_the_trainer(monkeypatch):
    ran = []
    checked = []
    job, preflight, ahead, size = (
        ModuleType(f"megamix.{name}") for name in ("train.job", "run.run_folder", "run.resume_rules", "run.job_size")
    )
    monkeypatch.setattr(job, "run_job", lambda config, memory_line, **_: ran.append(config), raising=False)
    nothing = "no problems"
    monkeypatch.setattr(preflight, "check", lambda config, *_, **__: checked.append(config) or nothing, raising=False)
    monkeypatch.setattr(ahead, "outlook", lambda config: "a new run", raising=False)
    monkeypatch.setattr(size, "size_lines", lambda config: [], raising=False)
    monkeypatch.setattr(size, "disk_problem", lambda config: None, raising=False)
    monkeypatch.setitem(sys.modules, "megamix.run.job_size", size)
    monkeypatch.setitem(sys.modules, "megamix.run.resume_rules", ahead)
    monkeypatch.setitem(sys.modules, "megamix.train.job", job)
    monkeypatch.setitem(sys.modules, "megamix.run.run_folder", preflight)
    assert main(["train", QUICKSTART, "training.steps=90", "--check"]) == 0
    assert ([config.training.steps for config in checked], ran) == ([90], [])
    assert main(["train", QUICKSTART, "training.steps=100"]) == 0
    assert [config.training.steps for config in ran] == [100]


def test_prepare_writes_and_reuses(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text("a small corpus of plain words\n" * 20)
    flags = ["--input", str(tmp_path / "text"), "--output", str(tmp_path / "out"), "--vocab-size", "260"]
    assert main(["prepare", *flags]) == 0
    assert main(["prepare", *flags]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert ": prepared;" in first
    assert "already prepared" in second
    assert (tmp_path / "out" / "train.bin").is_file()


def test_prepare_names_what_is_wrong(tmp_path, capsys):
    output = tmp_path / "out"
    assert main(["prepare", "--input", str(tmp_path / "none"), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megamix prepare: --input ")
    assert not output.exists()


def test_prepare_answers_a_broken_disk_and_a_dead_worker_with_one_line(tmp_path, capsys, monkeypatch):
    from megamix.data.prepare.workers import WorkerDiedError

    (tmp_path / "text").write_text("a text")
    flags = ["prepare", "--input", str(tmp_path / "text"), "--tokenizer", "bytes", "--output"]
    assert main([*flags, str(tmp_path / "text/out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megamix prepare: --output: ")
    assert error.endswith("; name a place in a folder that you may write to\n")
    module = importlib.import_module("megamix.data.prepare.prepare_corpus")
    for raised in (OSError(errno.ENOSPC, "No space left on device"), WorkerDiedError("a worker died at piece 3")):
        monkeypatch.setattr(module, "make_plan", Mock(side_effect=raised))
        assert main([*flags, str(tmp_path / "out")]) == 2
        line = f"{raised}; correct that and run the same command again: it continues\n"
        assert capsys.readouterr().err == f"megamix prepare: {line}"


def test_prepare_takes_a_named_corpus(tmp_path, monkeypatch):
    from megamix.data.prepare.prepare_corpus import Request
    from megamix.data.prepare.tokenizer_choice import TokenizerChoice

    module = importlib.import_module("megamix.data.prepare.prepare_corpus")
    seen = []

    class Prepared:
        def summary(self):
            return "done"

    def prepare_corpus(corpus, output, request, progress):
        seen.append((corpus.flag, output, request))
        return Prepared()

    monkeypatch.setattr(module, "prepare_corpus", prepare_corpus)
    assert main(["prepare", "--corpus", "torch", "--output", str(tmp_path), "--valid-fraction", "0.1"]) == 0
    assert seen == [("--corpus torch", tmp_path, Request(tokenizer=TokenizerChoice("train", 2048), valid_fraction=0.1))]


def test_wrong_input_is_answered_before_torch_is_imported():
    wrong = [
        *("plot nowhere", "plan nowhere", "verify nowhere", "generate nowhere", "evaluate nowhere"),
        *("export nowhere --to hf out", "import nowhere --output out", "prepare --input nowhere --output out"),
        *("checkpoint ls nowhere", "checkpoint verify nowhere"),
        *("checkpoint export nowhere --to dcp out", "export configs --to hf out --shard-gb 0"),
        *("plan configs/quickstart.toml --memory lots", "verify configs/quickstart.toml --layouts xp4"),
    ]
    code = (
        "import sys; from megamix.cli import main; "
        f"status = main(['train', {QUICKSTART!r}, 'model.num_heads=-1']); assert 'numpy' not in sys.modules\n"
        f"for words in {wrong}:\n"
        "    assert main(words.split()) == status, words\n"
        "    assert 'torch' not in sys.modules, words\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2, done.stderr
    assert "model.num_heads: got -1, must be greater than 0" in done.stderr
    assert "Traceback" not in done.stderr


def test_module_is_the_command():
    command = [sys.executable, "-m", "megamix", "config", QUICKSTART, "data.train=3", "--show"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == [
        '  data.train: got 3, must be text in quotes, or a list of tables; write for example train = "runs/data/train"'
    ]


def test_a_python_without_the_dependencies_is_one_line_that_names_the_environment():
    program = "import runpy, sys; sys.modules['pydantic'] = None; runpy.run_module('megamix', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "has no pydantic; run `. .venv/bin/activate`, which ./launch/install.sh makes" in done.stderr


def test_words_behind_two_dashes_are_another_program_s():
    """Whoever audits a script of his own."""
    assert _parse(["audit", "--", "python", "train.py", "--lr=1"]).command == ["python", "train.py", "--lr=1"]
