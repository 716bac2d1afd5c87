"""`megamix generate`: from a run, an imported model and a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamix.cli import main
from megamix.data.tokenizer import Tokenizer
from megamix.hub.export_model import export_model
from megamix.hub.import_model import import_model
from megamix.hub.source import open_source
from tests.hub.folders import LLAMA, write_hugging_face
from tests.train.jobs import run_on_ranks, tiny_job, write_data


def _generated(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def test_a_run_its_checkpoint_its_export_and_its_import_go_on_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path / "data", tokenizer=True)
    vocab_size = Tokenizer.load(tmp_path / "data/tokenizer.json").vocab_size
    config = tiny_job(
        tmp_path,
        model={"vocab_size": vocab_size, "init_std": 0.3},
        data={"tokenizer": str(tmp_path / "data/tokenizer.json")},
        training={"steps": 2, "eval_interval": 0},
        precision={"dtype": "bf16", "growth_interval": None},
    )
    run_on_ranks(config)
    export_model(open_source(tmp_path / "run"), tmp_path / "out", "fp32")
    import_model(tmp_path / "out", tmp_path / "in")
    flags = ["--prompt", "def f", "--max-new-tokens", "12", "--dtype", "fp32"]
    paths = [tmp_path / "run", tmp_path / "run/checkpoints/step_00000002", tmp_path / "out", tmp_path / "in"]
    texts = {_generated(capsys, str(path), *flags, "--top-p", "0.9") for path in paths}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("def f")
    run = str(tmp_path / "run")
    assert text == _generated(capsys, run, *flags, "--top-p", "0.9", "--seed", "0")
    assert text != _generated(capsys, run, *flags, "--top-p", "0.9", "--seed", "1")
    # Each prompt is by itself.
    both = _generated(capsys, run, *flags, "--top-p", "0.9", "--prompt", "x =")
    assert both == text + _generated(capsys, run, "--prompt", "x =", *flags[2:], "--top-p", "0.9")


def test_a_text_ends_at_any_token_that_ends_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(tmp_path / "data", tokenizer=True)
    tokenizer = Tokenizer.load(tmp_path / "data/tokenizer.json")
    write_hugging_face(LLAMA.model_copy(update={"vocab_size": tokenizer.vocab_size}), tmp_path / "hf")
    for name in ("tokenizer.json",):
        (tmp_path / "hf" / name).write_bytes((tmp_path / "data" / name).read_bytes())
    flags = [str(tmp_path / "hf"), "--prompt", "de", "--temperature", "0", "--max-new-tokens", "9"]
    text = _generated(capsys, *flags).removesuffix("\n")
    third = tokenizer.encode(text)[4]
    (tmp_path / "hf/generation_config.json").write_text(f'{{"eos_token_id": [{third}, 3]}}')
    short = _generated(capsys, *flags).removesuffix("\n")
    assert text.startswith(short)
    assert third not in tokenizer.encode(short)[2:]
    assert len(short) < len(text)


def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path)]) == 2
    assert "is no run, checkpoint or Hugging Face folder" in capsys.readouterr().err
    write_hugging_face(LLAMA, tmp_path / "hf")
    for flags, told in (
        ([], "has no tokenizer; name one with --tokenizer FILE"),
        (["--tokenizer", str(tmp_path / "none.json")], "none.json' is missing"),
    ):
        assert main(["generate", str(tmp_path / "hf"), *flags]) == 2
        assert told in capsys.readouterr().err
    write_data(tmp_path / "data", tokenizer=True)
    for flag, value, told in (("--top-p", "0", "top_p must be above 0"), ("--temperature", "-1", "temperature must")):
        tokenizer = ["--tokenizer", str(tmp_path / "data/tokenizer.json"), "--prompt", "a"]
        assert main(["generate", str(tmp_path / "hf"), *tokenizer, flag, value]) == 2
        assert told in capsys.readouterr().err
