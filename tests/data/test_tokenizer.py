"""Any text comes back unchanged, a document ends with one end token, and a saved tokenizer loads to the same."""

import sys

import pytest

from megamix.data import installing
from megamix.data.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, Tokenizer

TEXTS = ["def add(left, right):\n    return left + right\n", "def subtract(left, right):\n\treturn left - right\n"] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, 280)


@pytest.mark.parametrize(
    "text", ["", " leading", "trailing  \n\n", "tabs\tand\r\n", "Käse 日本 \U0001f9c0 \x00", *TEXTS]
)
def test_any_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_document_ends_with_the_end_token_and_has_no_other(tokenizer):
    spoof = f"not {END_OF_TEXT} the end"
    first, second, nothing = tokenizer.encode_documents([TEXTS[0], spoof, ""])
    assert first.tolist() == [*tokenizer.encode(TEXTS[0]), tokenizer.end_of_text]
    assert second.tolist().count(tokenizer.end_of_text) == 1
    assert tokenizer.decode(second.tolist()) == spoof + END_OF_TEXT
    assert nothing.tolist() == [tokenizer.end_of_text]


def test_merges_are_learned_up_to_the_size_asked(tokenizer):
    assert tokenizer.vocab_size == 280
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_a_small_corpus_gives_fewer_tokens_never_more():
    tokenizer = Tokenizer.train(["abc"], 1000)
    assert MIN_VOCAB_SIZE <= tokenizer.vocab_size < 300


def test_a_saved_tokenizer_loads_to_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])
    assert loaded.encode_documents([END_OF_TEXT])[0].tolist().count(loaded.end_of_text) == 1
    assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)


def test_truncation_padding_and_dropout_of_a_file_change_no_document_and_no_prompt(tokenizer, tmp_path):
    import tokenizers

    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    foreign = tokenizers.Tokenizer.from_file(str(path))
    foreign.enable_truncation(max_length=3)
    foreign.enable_padding(length=64)
    foreign.model.dropout = 0.5
    foreign.save(str(path))
    loaded = Tokenizer.load(path)
    assert [ids.tolist() for ids in loaded.encode_documents(TEXTS)] == [
        ids.tolist() for ids in tokenizer.encode_documents(TEXTS)
    ]
    assert loaded.encode_prompt(TEXTS[0]) == tokenizer.encode_prompt(TEXTS[0])


def test_a_vocabulary_without_room_for_every_byte_is_refused():
    with pytest.raises(ValueError, match=r"--vocab-size 256 is too small.* give at least 257"):
        Tokenizer.train(TEXTS, 256)


def test_a_missing_or_damaged_tokenizer_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer .*absent.json' is missing; name"):
        Tokenizer.load(tmp_path / "absent.json")
    (tmp_path / "damaged.json").write_text("{")
    with pytest.raises(ValueError, match=r"damaged.json' is no tokenizer.json"):
        Tokenizer.load(tmp_path / "damaged.json")


def test_a_foreign_vocabulary_without_end_token_encodes_but_says_that_it_has_none():
    import tokenizers

    foreign = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?")))
    assert foreign.encode("a") == [0]
    with pytest.raises(ValueError, match=r"no token that ends a document is known: .* name the token by --end-token"):
        _ = foreign.end_of_text


def test_a_missing_package_is_answered_with_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # makes the import fail
    with pytest.raises(ValueError, match=r"run pip install -e '\.\[tokenizers\]' in the checkout"):
        Tokenizer.train(TEXTS, 280)


def test_without_a_checkout_the_pip_line_names_the_packages(monkeypatch, tmp_path):
    monkeypatch.setattr("megamix.data._ROOT", tmp_path)
    assert installing("tokenizers") == "run pip install 'tokenizers>=0.21' 'tiktoken>=0.8'"
    assert installing("plot") == "run pip install 'matplotlib>=3.9'"
