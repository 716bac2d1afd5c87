"""The verbs print what was asked for, and answer wrong input by one message, before torch is imported."""

import argparse
import errno
import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from megamix import cli
from megamix.cli.parser import lines_told
from megamix.cli.verbs import VERBS, _parse, main
from megamix.config import load_config

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


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


def test_the_command_takes_words_as_its_verbs_do(capsys):
    assert cli.main(["config", QUICKSTART, "--show"]) == 0
    assert "[model]" in capsys.readouterr().out


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


def test_show_prints_a_file_that_loads_equal_with_overrides_on_both_sides_of_a_flag(capsys, tmp_path):
    assert main(["config", QUICKSTART, "training.steps=90", "--show", "optimizer.lr=2e-3", "training.steps=91"]) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert load_config(shown) == load_config(QUICKSTART, ["optimizer.lr=2e-3", "training.steps=91"])


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


@pytest.mark.parametrize("compiles", [True, False])
def test_train_loads_the_compiler_before_a_job_that_compiles_its_updates(monkeypatch, compiles):
    called = Mock()
    called.disk_problem.return_value = ""
    called.memory_problem.return_value = None
    for module, name in (
        ("train.check", "check"), ("cli.train", "load_compiler"), ("train.main", "run_job"),
        ("train.job_size.JobSize", "memory_problem"), ("train.job_size.JobSize", "disk_problem"),
    ):  # fmt: skip
        monkeypatch.setattr(f"megamix.{module}.{name}", getattr(called, name))
    assert main(["train", QUICKSTART, f"optimizer.compile={str(compiles).lower()}"]) == 0
    loads = ["load_compiler"] if compiles else []
    assert [name for name, *_ in called.mock_calls] == ["check", "memory_problem", "disk_problem", *loads, "run_job"]


def test_prepare_answers_a_broken_disk_with_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "text").write_text("a text")
    flags = ["prepare", "--input", str(tmp_path / "text"), "--tokenizer", "bytes", "--output"]
    assert main([*flags, str(tmp_path / "text/out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megamix prepare: --output: ")
    assert error.endswith("; name a place in a folder that you may write to\n")
    module = importlib.import_module("megamix.data.prepare.prepare_corpus")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(module, "make_plan", Mock(side_effect=full))
    assert main([*flags, str(tmp_path / "out")]) == 2
    line = f"{full}; correct that and run the same command again: it continues\n"
    assert capsys.readouterr().err == f"megamix prepare: {line}"


def test_prepare_takes_a_named_corpus(tmp_path, monkeypatch):
    from megamix.data.prepare.prepare_corpus import Request
    from megamix.data.prepare.tokenizer_choice import TokenizerChoice

    prepare = Mock()
    prepare.return_value.summary.return_value = "done"
    monkeypatch.setattr(importlib.import_module("megamix.data.prepare.prepare_corpus"), "prepare_corpus", prepare)
    assert main(["prepare", "--corpus", "torch", "--output", str(tmp_path), "--valid-fraction", "0.1"]) == 0
    corpus, output, request, _ = prepare.call_args.args
    assert (corpus.flag, output) == ("--corpus torch", tmp_path)
    assert request == Request(tokenizer=TokenizerChoice("train", 2048), valid_fraction=0.1)


def test_wrong_input_is_answered_before_torch_is_imported():
    wrong = [
        *("plot nowhere", "plan nowhere", "verify nowhere", "generate nowhere", "evaluate nowhere"),
        *("export nowhere --to hf out", "import nowhere --output out", "prepare --input nowhere --output out"),
        *("checkpoint ls nowhere", "checkpoint verify nowhere"),
        *("checkpoint export nowhere --to dcp out", "export configs --to hf out --shard-gb 0"),
        *("plan configs/quickstart.toml --memory lots", "verify configs/quickstart.toml --layouts xp4"),
    ]
    code = (
        "import sys; from megamix.cli.verbs import main; "
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


def test_a_python_without_the_dependencies_is_one_line_that_names_the_environment():
    program = "import runpy, sys; sys.modules['pydantic'] = None; runpy.run_module('megamix', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "has no pydantic; run `. .venv/bin/activate`, which ./launch/install.sh makes" in done.stderr


def test_words_behind_two_dashes_are_another_program_s():
    """Whoever audits a script of his own."""
    assert _parse(["audit", "--", "python", "train.py", "--lr=1"]).command == ["python", "train.py", "--lr=1"]
