"""Any text comes back unchanged from every kind of tokenizer, a document ends with one end token, the fast library
gives the same ids, and a saved tokenizer opens as what it was.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from megamix.data import installing
from megamix.data.prepare.corpus import named_corpus
from megamix.data.prepare.tokenizer_choice import _PROBE, TokenizerChoice
from megamix.data.tokenizer import END_OF_TEXT, Tokenizer, open_tokenizer, save_tokenizer
from megamix.data.tokenizer_bulk import bulk_encoder
from megamix.data.tokenizer_kinds import ByteTokenizer
from tests.conftest import FULL

# The patterns of Llama 3 and Qwen 2, from the tokenizer.json of each.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
HARD = [
    _PROBE,
    "",
    " ",
    "\n" * 300 + "x" + " " * 300,
    "a" * 3000,
    "<tool_call>x</tool_call> <|endoftext|> <tool_call",
    "A\u030a \u212b \u1e9b\u0323 \ufb01 \uac00\u11a8",  # not NFC
    "".join(chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000),
]


def make(kind, texts):
    import tokenizers
    from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

    if kind == "gpt2":
        return Tokenizer.train(texts, 2000)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=kind == "llama3"))
    split = pre_tokenizers.Split(Regex(LLAMA3 if kind == "llama3" else QWEN2), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT if kind == "qwen2" else "<|end_of_text|>"])
    if kind == "qwen2":
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("<tool_call>", "</tool_call>")])
    return Tokenizer(tokenizer)


@pytest.fixture(scope="module")
def texts():
    """All of the standard library with --full; else a sixtieth of it, from all over."""
    files = named_corpus("stdlib").files
    return [Path(file.path).read_text(encoding="utf-8") for file in (files if FULL else files[7::60])]


@pytest.fixture(scope="module")
def tokenizer(texts):
    return make("gpt2", texts[:2])


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2"])
def test_the_fast_way_gives_equal_ids(kind, texts):
    tokenizer = make(kind, texts[:20])
    slow = tokenizer.encode_documents([*HARD, *texts])
    assert tokenizer.speed_up([*HARD[:3], texts[0]])
    fast = tokenizer.encode_documents([*HARD, *texts])
    assert all(np.array_equal(*pair) for pair in zip(slow, fast, strict=True))


def test_what_overflows_the_fast_way_takes_the_slow_one(texts):
    tokenizer = make("gpt2", texts[:2])
    spaces = " " * 1_000_000
    slow = tokenizer.encode(spaces)
    assert tokenizer.speed_up(())
    assert tokenizer._bulk(spaces) is None  # else this test has no subject
    assert tokenizer.encode(spaces) == slow


def test_what_tiktoken_cannot_express_is_left_to_tokenizers(tokenizer):
    content = json.loads(tokenizer._tokenizer.to_str())
    assert bulk_encoder(content) is not None
    model, before, word = content["model"], content["pre_tokenizer"], content["added_tokens"][0] | {"special": False}
    merges = model["merges"]
    for changes in (
        {"model": model | {"type": "WordPiece"}},
        {"model": model | {"dropout": 0.1}},
        {"model": model | {"merges": [merges[1], merges[0], *merges[2:]]}},  # the order is not that of the ids
        {"model": model | {"merges": merges[:-1]}},  # a token that only tiktoken would reach
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": before | {"add_prefix_space": True}},
        {"pre_tokenizer": before | {"use_regex": False}},
        {"added_tokens": [word | {"lstrip": True}]},
        {"added_tokens": [word, word | {"content": word["content"] + "2", "id": 9999}]},
    ):
        assert bulk_encoder(content | changes) is None, changes


def test_ids_that_differ_on_the_sample_turn_the_fast_way_off(texts, monkeypatch):
    tokenizer = make("gpt2", texts[:2])
    monkeypatch.setattr("megamix.data.tokenizer_bulk._GPT2_PATTERN", r"\S+|\s+")
    assert not tokenizer.speed_up(["don't  you"])
    assert tokenizer._bulk is None


def test_any_text_comes_back_unchanged_and_a_document_has_one_end_token(tokenizer):
    for text in ("", " leading", "trailing  \n\n", "tabs\tand\r\n", "Käse 日本 \U0001f9c0 \x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    spoof = f"not {END_OF_TEXT} the end"
    first, second, nothing = tokenizer.encode_documents(["a text", spoof, ""])
    assert first.tolist() == [*tokenizer.encode("a text"), tokenizer.end_of_text]
    assert second.tolist().count(tokenizer.end_of_text) == 1
    assert tokenizer.decode(second.tolist()) == spoof + END_OF_TEXT
    assert nothing.tolist() == [tokenizer.end_of_text]


def test_truncation_padding_and_dropout_of_a_file_change_no_document_and_no_prompt(tokenizer, texts, tmp_path):
    import tokenizers

    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    foreign = tokenizers.Tokenizer.from_file(str(path))
    foreign.enable_truncation(max_length=3)
    foreign.enable_padding(length=64)
    foreign.model.dropout = 0.5
    foreign.save(str(path))
    loaded = Tokenizer.load(path)
    assert np.array_equal(*(each.encode_documents(texts[:1])[0] for each in (loaded, tokenizer)))
    assert loaded.encode_prompt(texts[0]) == tokenizer.encode_prompt(texts[0])


def test_a_missing_or_damaged_tokenizer_file_is_named(tmp_path):
    path = tmp_path / "its.json"
    with pytest.raises(ValueError, match=r"tokenizer .*its.json' is no tokenizer.json .*; name"):
        Tokenizer.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"its.json' is no tokenizer.json"):
        Tokenizer.load(path)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory, texts):
    import sentencepiece

    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text("\n".join(texts[:5]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "m"), vocab_size=400, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    return folder / "m.model"


@pytest.mark.parametrize("kind", ["bytes", "json", "sentencepiece"])
def test_a_tokenizer_opens_again_as_what_it_was(tmp_path, tokenizer, model_file, kind):
    if kind != "json":
        tokenizer = ByteTokenizer() if kind == "bytes" else open_tokenizer(model_file)
    save_tokenizer(tokenizer, tmp_path)
    again = open_tokenizer(tmp_path / tokenizer.file_name)
    assert type(again) is type(tokenizer)
    for name in ("vocab_size", "end_token", "end_of_text", "begin"):
        assert getattr(again, name) == getattr(tokenizer, name)
    text = "for x in range(10): print('Käse')"
    (document,) = again.encode_documents([text])
    assert document.tolist() == [*tokenizer.encode_prompt(text), tokenizer.end_of_text]
    assert document.max() < again.vocab_size
    assert again.decode(document.tolist()[len(again.begin) : -1]) == text


def test_other_libraries_read_the_file_of_bytes_and_the_end_token(tmp_path):
    import tokenizers

    save_tokenizer(ByteTokenizer(), tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(f"Käse\n{END_OF_TEXT}").ids == [*ByteTokenizer().encode("Käse\n"), 256]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}


def test_ids_beyond_a_tokenizer_s_are_left_out_of_the_text(tmp_path, model_file):
    """A model may have more rows than the tokenizer has tokens."""
    save_tokenizer(ByteTokenizer(), tmp_path)
    for tokenizer in (ByteTokenizer(), Tokenizer.load(tmp_path / "tokenizer.json"), open_tokenizer(model_file)):
        ids = tokenizer.encode("some text")
        beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 50]
        assert tokenizer.decode([*beyond, *ids, *beyond]) == tokenizer.decode(ids)


def test_a_byte_tokenizer_needs_no_package(tmp_path, monkeypatch):
    save_tokenizer(ByteTokenizer(), tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert open_tokenizer(tmp_path / "tokenizer.json").decode([75, 195, 164, 256]) == f"Kä{END_OF_TEXT}"


def _foreign(folder, **vocab):
    import tokenizers

    path = folder / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, **vocab}, unk_token="?")).save(str(path))
    return path


def test_the_end_token_is_the_flag_s_then_the_configuration_s_then_a_known_one(tmp_path):
    path = _foreign(tmp_path, **{"</s>": 1, "<|end_of_text|>": 2, "<mine>": 9})
    assert open_tokenizer(path).end_token == "<|end_of_text|>"
    assert open_tokenizer(path).vocab_size == 10  # ids that are left out count
    token = {"content": "</s>", "lstrip": False}
    for config, end in (({"eos_token": "</s>"}, 1), ({"eos_token": token}, 1), ({}, 2), ({"eos_token": None}, 2)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert open_tokenizer(path).end_of_text == end
        assert open_tokenizer(path, "<mine>").end_of_text == 9


def test_no_end_token_is_refused_before_anything_is_read(tmp_path, model_file):
    path = str(_foreign(tmp_path, a=1))
    assert open_tokenizer(Path(path)).encode("a") == [1]
    with pytest.raises(ValueError, match="--end-token: the tokenizer's files name none; name a token"):
        TokenizerChoice(path)
    with pytest.raises(ValueError, match="--end-token: 'b' is not in the tokenizer's vocabulary; name a token"):
        TokenizerChoice(path, end_token="b")
    with pytest.raises(ValueError, match="--end-token: '<none>' is not in the tokenizer's vocabulary; name a token"):
        TokenizerChoice(str(model_file), end_token="<none>")


@pytest.mark.parametrize("package", ["sentencepiece", "tokenizers"])
def test_a_missing_package_is_answered_with_the_pip_line(tmp_path, model_file, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # makes the import fail
    told = pytest.raises(ValueError, match=rf"run pip install -e '\.\[{package}\]' in the checkout")
    with told:
        open_tokenizer(model_file if package == "sentencepiece" else tmp_path / "tokenizer.json")
    if package == "tokenizers":
        with told:
            Tokenizer.train([""], 280)


def test_without_a_checkout_the_pip_line_names_the_packages(monkeypatch, tmp_path):
    monkeypatch.setattr("megamix.data._ROOT", tmp_path)
    assert installing("tokenizers") == "run pip install 'tokenizers>=0.21' 'tiktoken>=0.8'"
    assert installing("plot") == "run pip install 'matplotlib>=3.9'"
