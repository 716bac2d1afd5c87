"""Whoever trains with a downloaded tokenizer: what it says of special tokens, templates and lengths goes through
prepare, a run, export and import, and a text begins as those that were trained, here and in transformers.
"""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from megamix.cli.verbs import main
from megamix.data.tokenizer import Tokenizer, open_tokenizer
from megamix.data.tokenizer_kinds import ByteTokenizer
from megamix.hf.convert import export_model, import_model
from megamix.hf.source import open_source
from megamix.hf.tokenizer_files import copy_tokenizer
from megamix.train import results
from tests.builders import corpus_of, run_on_ranks, tiny_job

SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
    "model_max_length": 128, "padding_side": "left", "auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]},
    "name_or_path": "/home/them/theirs", "tokenizer_file": "/home/them/tokenizer.json",
}  # fmt: skip
TEXTS = [f"document {number}: the same few words again" for number in range(9)]
READ = ("bos_token", "eos_token", "pad_token", "chat_template", "model_max_length", "padding_side")


@pytest.fixture
def theirs(tmp_path):
    """A folder with a tokenizer that puts <s> before a text and </s> behind it."""
    folder = tmp_path / "theirs"
    (folder / "additional_chat_templates").mkdir(parents=True)
    own = Tokenizer.train(TEXTS, 300)._tokenizer
    own.add_special_tokens(["<s>", "</s>", "<pad>", "<mine>"])
    ends = [(token, own.token_to_id(token)) for token in ("<s>", "</s>")]
    own.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}, "pad_token": "<pad>"}')
    (folder / "added_tokens.json").write_text('{"<extra>": 310}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / f"texts/{number}.txt").write_text(text)
    return folder


def _prepare(folder, tokenizer, *flags):
    fixed = ["--workers=1", "--valid-fraction=0", f"--tokenizer={tokenizer}", f"--output={folder / 'data'}"]
    assert main(["prepare", "--input", str(folder / "texts"), *fixed, *flags]) == 0
    return np.fromfile(folder / "data/train.bin", "<u2").tolist()


def _loaded(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("begin", [[], ["--begin-token"], ["--begin-token", "<mine>"]])
def test_settings_and_beginning_go_from_prepare_to_import(tmp_path, theirs, monkeypatch, caplog, capsys, begin):
    ids = _prepare(tmp_path, theirs / "tokenizer.json", *begin)
    left_out = "begins a text with <s>, but documents begin without it; --begin-token writes it"
    assert sum(left_out in message for message in caplog.messages) == (not begin)
    own = tokenizers.Tokenizer.from_file(str(theirs / "tokenizer.json"))
    first = [own.token_to_id(token) for token in (["<s>", *begin][-1].replace("--begin-token", "<s>"),) if begin]
    assert [ids.count(token_id) for token_id in first] == [9] * len(first)
    assert ids[: len(first)] == first

    prompts = []
    generate = results.generate
    monkeypatch.setattr(
        results, "generate", lambda model, ids, *rest: prompts.append(ids) or generate(model, ids, *rest)
    )
    path = str(tmp_path / "data/tokenizer.json")
    settings = {"valid": None, "eval_interval": 0, "vocab_size": 320, "steps": 2}
    config = tiny_job(tmp_path, tokenizer=path, sample_prompt="words", **settings)
    run_on_ranks(config)
    export_model(open_source(tmp_path / "run"), tmp_path / "out", "fp32")
    import_model(tmp_path / "out", tmp_path / "in")
    capsys.readouterr()
    generates = ["generate", str(tmp_path / "in"), "--max-new-tokens", "1"]
    assert main([*generates, "--prompt", "words"]) == 0
    assert capsys.readouterr().out.startswith("words")
    words = own.encode("words", add_special_tokens=False).ids
    assert [prompt.tolist() for prompt in prompts] == [[[*first, *words]]] * 2
    assert main(generates) == 0  # what opens an empty text is not printed, either
    assert not capsys.readouterr().out.startswith(own.id_to_token(prompts[-1].flatten()[0].item()))

    other = tiny_job(tmp_path, tokenizer=str(theirs / "tokenizer.json"), **settings)  # puts <s> before a text
    told = [["prepare again with --begin-token" in line for line in corpus_of(it).warnings()] for it in (config, other)]
    assert told == [[], [] if begin == ["--begin-token"] else [True]]

    settings = {key: value for key, value in SETTINGS.items() if key != "auto_map"}  # transformers would ask for code
    (theirs / "tokenizer_config.json").write_text(json.dumps(settings))
    want = {name: getattr(_loaded(theirs), name) for name in READ}
    want["bos_token"] = begin[1] if len(begin) > 1 else "<s>"
    for folder in ("data", "out", "in"):
        found = _loaded(tmp_path / folder)
        assert {name: getattr(found, name) for name in READ} == want
        assert found("words")["input_ids"] == [*first, *words]
        assert (tmp_path / folder / "added_tokens.json").is_file()
        settings = json.loads((tmp_path / folder / "tokenizer_config.json").read_text())
        assert not {"auto_map", "name_or_path", "tokenizer_file"} & settings.keys()
        assert settings["add_bos_token"] == bool(begin)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["bos_token_id"] == (first[0] if first else None)
    assert config["pad_token_id"] == own.token_to_id("<pad>")


def test_another_end_and_another_name_of_the_file_are_told_to_transformers(tmp_path, theirs):
    (theirs / "tokenizer.json").rename(theirs / "mine.json")
    assert _prepare(tmp_path, theirs / "mine.json", "--end-token", "<mine>")[-1] == 295
    found = _loaded(tmp_path / "data")
    assert (found.eos_token, found.pad_token, found.model_max_length) == ("<mine>", "<pad>", 128)
    assert found.convert_tokens_to_ids("<extra>") == 296  # by added_tokens.json
    Tokenizer.train(TEXTS, 300).save(theirs / "tokenizer.json")  # now the settings are that one's
    copy_tokenizer(theirs / "mine.json", tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()
    assert Tokenizer.load(theirs / "mine.json").begin_token == "<s>"  # by its own rule
    (theirs / "tokenizer_config.json").write_text('{"eos_token": "<other>", "bos_token": "<other>"}')
    assert Tokenizer.load(theirs / "mine.json").end_token != "<other>"


def test_a_model_of_others_keeps_the_rule_of_its_tokenizer(tmp_path, theirs):
    (tmp_path / "out").mkdir()
    copy_tokenizer(theirs, tmp_path / "out")
    found = _loaded(tmp_path / "out")
    assert found("words")["input_ids"] == Tokenizer.load(theirs / "tokenizer.json")._tokenizer.encode("words").ids
    # A prompt goes on, so what the tokenizer puts behind a text is not in it.
    assert open_tokenizer(tmp_path / "out/tokenizer.json").encode_prompt("words") == found("words")["input_ids"][:-1]


@pytest.mark.parametrize("begin", [[], ["--begin-token"]])
def test_sentencepiece_begins_as_it_was_trained(tmp_path, theirs, begin):
    sentencepiece = pytest.importorskip("sentencepiece")
    with (tmp_path / "own.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=file, vocab_size=300, model_type="bpe", byte_fallback=True,
            minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
    assert open_tokenizer(tmp_path / "own.model").begin == (1,)
    ids = _prepare(tmp_path, tmp_path / "own.model", *begin)
    first = [1] if begin else []
    assert ids.count(1) == 9 * len(first)
    words = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "own.model")).encode("few words")
    assert open_tokenizer(tmp_path / "data/tokenizer.model").encode_prompt("few words") == [*first, *words]
    assert _loaded(tmp_path / "data")("few words")["input_ids"] == [*first, *words]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ["--tokenizer", "bytes.json", "--begin-token"],
            "--begin-token '': a tokenizer of bytes has none; leave",
        ),
        (["--begin-token", "<no>"], "--begin-token: '<no>' is not in the tokenizer's vocabulary; name"),
        (["--begin-token"], "--begin-token: the tokenizer's files name none; name"),
        (
            ["--tokenizer", "bytes", "--begin-token"],
            "--begin-token  is for the file of a tokenizer; with --tokenizer",
        ),
    ],
)
def test_a_begin_token_that_nobody_knows_is_refused(tmp_path, theirs, monkeypatch, capsys, flags, told):
    monkeypatch.chdir(tmp_path)
    own = tokenizers.Tokenizer.from_file(str(theirs / "tokenizer.json"))
    own.post_processor = None
    own.save(str(tmp_path / "plain.json"))
    ByteTokenizer().save(tmp_path / "bytes.json")
    flags = ["--tokenizer", str(tmp_path / "plain.json"), *flags]
    assert main(["prepare", "--input", str(tmp_path / "texts"), "--output", str(tmp_path / "data"), *flags]) == 2
    assert told in capsys.readouterr().err
