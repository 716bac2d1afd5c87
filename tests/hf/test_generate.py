"""`megamix generate`: a run, its checkpoint, its export and its import write the same text."""

import pytest

from megamix.cli.verbs import main
from megamix.data.tokenizer import Tokenizer, open_tokenizer
from megamix.data.tokenizer_kinds import ByteTokenizer
from megamix.hf.convert import export_model, import_model
from megamix.hf.source import open_source
from megamix.train import results
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.hf.folders import LLAMA, write_hugging_face


def _generated(capsys, *arguments):
    capsys.readouterr()
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr().out


def test_a_run_its_checkpoint_its_export_and_its_import_go_on_alike(tmp_path, capsys):
    write_data(tmp_path / "data", tokenizer=True)
    vocab_size = Tokenizer.load(tmp_path / "data/tokenizer.json").vocab_size
    model = {"vocab_size": vocab_size, "init_std": 0.3}
    tokenizer = str(tmp_path / "data/tokenizer.json")
    run_on_ranks(tiny_job(tmp_path, model=model, tokenizer=tokenizer, steps=2, eval_interval=0, dtype="bf16"))
    export_model(open_source(tmp_path / "run"), tmp_path / "out", "fp32")
    import_model(tmp_path / "out", tmp_path / "in")
    flags = ["--max-new-tokens", "12", "--dtype", "fp32", "--top-p", "0.9", "--prompt", "def f"]
    paths = [tmp_path / "run", tmp_path / "run/checkpoints/step_00000002", tmp_path / "out", tmp_path / "in"]
    (text,) = {_generated(capsys, str(path), *flags) for path in paths}
    assert text.startswith("def f")
    run = str(tmp_path / "run")
    assert text == _generated(capsys, run, *flags, "--seed", "0")
    assert text != _generated(capsys, run, *flags, "--seed", "1")
    # Each prompt is by itself.
    both = _generated(capsys, run, *flags, "--prompt", "x =")
    assert both == text + _generated(capsys, run, *flags[:-1], "x =")


def test_a_text_ends_at_any_token_that_ends_one(tmp_path, capsys):
    write_data(tmp_path / "data", tokenizer=True)
    tokenizer = Tokenizer.load(tmp_path / "data/tokenizer.json")
    write_hugging_face(LLAMA.model_copy(update={"vocab_size": tokenizer.vocab_size}), tmp_path / "hf")
    (tmp_path / "data/tokenizer.json").rename(tmp_path / "hf/tokenizer.json")
    flags = [str(tmp_path / "hf"), "--prompt", "de", "--temperature", "0", "--max-new-tokens", "9"]
    text = _generated(capsys, *flags).removesuffix("\n")
    third = tokenizer.encode(text)[4]
    (tmp_path / "hf/generation_config.json").write_text(f'{{"eos_token_id": [{third}, 3]}}')
    short = _generated(capsys, *flags).removesuffix("\n")
    assert text.startswith(short)
    assert third not in tokenizer.encode(short)[2:]
    assert len(short) < len(text)


def test_what_is_wrong_is_named(tmp_path, capsys):
    write_hugging_face(LLAMA, tmp_path / "hf")
    assert main(["generate", str(tmp_path / "hf")]) == 2
    assert "has no tokenizer; name one with --tokenizer FILE" in capsys.readouterr().err
    write_data(tmp_path / "data", tokenizer=True)
    tokenizer = ["--tokenizer", str(tmp_path / "data/tokenizer.json")]
    for flag, value, told in (
        ("--tokenizer", str(tmp_path / "none.json"), "none.json' is no tokenizer.json (No such file"),
        ("--top-p", "0", "top_p must be above 0 and at most 1 (all tokens), got 0.0"),
        ("--temperature", "-1", "temperature must be 0 (likeliest token) or 1e-06 and more, got -1.0"),
        ("--max-new-tokens", "-50", "max_new_tokens must be at least 1, got -50"),
        ("--seed", str(2**64), "seed must be from 0 to 2**64 - 1, got 18446744073709551616"),
        ("--prompt", "\udcff", r"prompt must be UTF-8, got '\udcff': write it in UTF-8"),
        ("--prompt", "def", ", the model's vocabulary has 64: give the model's own tokenizer"),
    ):
        assert main(["generate", str(tmp_path / "hf"), *tokenizer, flag, value]) == 2, (flag, value)
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["my_tok.json", "tokenizer.model"])
def test_a_text_ends_at_the_end_token_of_a_tokenizer_of_any_name_and_kind(name, tmp_path, monkeypatch, capsys):
    path = tmp_path / name
    if name == "my_tok.json":
        ByteTokenizer().save(path)
    else:
        _train_sentencepiece(path)
    tokenizer = open_tokenizer(path)
    write_hugging_face(LLAMA.model_copy(update={"vocab_size": tokenizer.vocab_size}), tmp_path / "hf")
    seen = []
    monkeypatch.setattr(results, "generate", lambda model, tokens, *rest: seen.append(rest[4]) or tokens)
    _generated(capsys, str(tmp_path / "hf"), "--tokenizer", str(path), "--prompt", "a b")
    assert seen == [(tokenizer.end_of_text,)]


def _train_sentencepiece(path):
    sentencepiece = pytest.importorskip("sentencepiece")
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c d e f g h"] * 20), model_writer=file, vocab_size=20, minloglevel=2,
            hard_vocab_limit=False,
        )  # fmt: skip
