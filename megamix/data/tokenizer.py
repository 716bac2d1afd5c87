"""Tokenizers: text to token ids; one token ends each document. `open_tokenizer` opens the file of any tokenizer."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megamix.data import import_extra
from megamix.data.text_tokenizer import TextTokenizer
from megamix.data.tokenizer_bulk import BulkEncoder
from megamix.data.tokenizer_kinds import ByteTokenizer, SentencePieceTokenizer
from megamix.durable import write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # 256 bytes and END_OF_TEXT
CONFIG_NAME = "tokenizer_config.json"  # Hugging Face's file beside a tokenizer.json, which names the end token
# End tokens of GPT-2 and Qwen; Llama 3; Llama 2 and Mistral; Gemma; DeepSeek. The first one in a vocabulary is taken.
_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


def open_tokenizer(path: Path, end_token: str | None = None) -> TextTokenizer:
    """Open a tokenizer.json of any kind, or SentencePiece's .model. `end_token`: replaces the one that the files name.

    Raises: ValueError if the file is missing or no tokenizer, or the package that reads it is not installed.
    """
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, end_token)
    if ByteTokenizer.wrote(path) and end_token in (None, END_OF_TEXT):
        return ByteTokenizer()
    return Tokenizer.load(path, end_token)


def save_tokenizer(tokenizer: TextTokenizer, folder: Path) -> None:
    """Write the tokenizer's file, and the end token in Hugging Face's form, so that `transformers` loads the folder."""
    tokenizer.save(folder / tokenizer.file_name)
    if tokenizer.file_name == Tokenizer.file_name:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
        write_text(folder / CONFIG_NAME, json.dumps(config, indent=1, ensure_ascii=False) + "\n")


class Tokenizer(TextTokenizer):
    """A tokenizer.json with the two rules that training needs: text is never a special token, and each document has one
    end token.
    """

    def __init__(self, tokenizer: "HuggingFaceTokenizer", end_token: str | None = None) -> None:
        # A document that spells a special token out must not end there: its characters are encoded as plain text.
        tokenizer.encode_special_tokens = True
        # Switch these settings off: they would cut or pad documents and prompts, or give other ids in each run.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        self._tokenizer = tokenizer
        self._bulk: BulkEncoder | None = None
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)  # ids may have gaps
        known = (token for token in _END_TOKENS if tokenizer.token_to_id(token) is not None)
        self._end_token = end_token or next(known, None)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn the merges of a byte-level BPE from texts. Any text can be encoded, and decodes unchanged.

        A corpus with few pairs gives fewer than `vocab_size` tokens; no corpus gives more.
        Raises: ValueError if `vocab_size` cannot hold every byte, or `tokenizers` is not installed.
        """
        cls.check_vocab_size(vocab_size)
        tokenizers = import_extra("tokenizers", "tokenizers")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),  # also bytes that the corpus lacks
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @staticmethod
    def check_vocab_size(vocab_size: int) -> None:
        """Refuse a size that is too small. Raises: ValueError if the vocabulary cannot hold every byte."""
        if vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"--vocab-size {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need {MIN_VOCAB_SIZE}; "
                f"give at least {MIN_VOCAB_SIZE}"
            )

    @classmethod
    def load(cls, path: Path, end_token: str | None = None) -> "Tokenizer":
        """Open any tokenizer.json, whoever wrote it.

        Raises: ValueError if the file is missing or no tokenizer, or `tokenizers` is not installed.
        """
        tokenizers = import_extra("tokenizers", "tokenizers")
        if not path.is_file():
            raise ValueError(f"tokenizer {str(path)!r} is missing; name a tokenizer.json or SentencePiece .model")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for any file it cannot read
            raise ValueError(f"tokenizer {str(path)!r} is no tokenizer.json ({error}); write it again") from error
        return cls(tokenizer, end_token or _configured_end_token(path.with_name(CONFIG_NAME)))

    def save(self, path: Path) -> None:
        write_text(path, self._tokenizer.to_str(pretty=True))

    @property
    def end_token(self) -> str:  # type: ignore[override]  # read-only
        """Return the token that ends a document.

        Raises: ValueError if no such token is known, or if the vocabulary lacks it.
        """
        if self._end_token is None:
            raise ValueError(
                f"no token that ends a document is known: the tokenizer has none of {', '.join(_END_TOKENS)}, and no "
                f"{CONFIG_NAME} with an eos_token lies beside it; name the token by --end-token"
            )
        if self._tokenizer.token_to_id(self._end_token) is None:
            raise ValueError(
                f"the token that ends a document, {self._end_token!r}, is not in the tokenizer's vocabulary; name one "
                "that is by --end-token"
            )
        return self._end_token

    @property
    def end_of_text(self) -> int:  # type: ignore[override]  # read-only
        """Return the id of the token that ends a document. Raises: ValueError as `end_token`."""
        token_id = self._tokenizer.token_to_id(self.end_token)
        assert token_id is not None, "end_token has looked"
        return int(token_id)

    def speed_up(self, sample: Sequence[str]) -> bool:
        """Encode by tiktoken from now on, if it can express this tokenizer and gives equal ids on the sample. Return
        whether it does.
        """
        bulk = BulkEncoder.of(json.loads(self._tokenizer.to_str()))
        if bulk is None or any(bulk.encode(text) != self.encode(text) for text in sample):
            return False
        self._bulk = bulk
        return True

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without an end token."""
        token_ids = self._bulk.encode(text) if self._bulk is not None else None
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if token_ids is None else token_ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of the beginning of a text, with the tokens that the tokenizer puts before it, as
        Llama's does.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each document, the end token last. Without `speed_up` all cores of the machine
        encode.
        """
        end = self.end_of_text
        if self._bulk is not None:
            return super().encode_documents(texts)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # fast: it computes no offsets
        return [np.array([*encoding.ids, end], dtype=np.int64) for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with the end token shown. An incomplete character shows as the replacement
        character.
        """
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _configured_end_token(path: Path) -> str | None:
    """Return the eos_token of a tokenizer_config.json: a text, or an object with the text as its content. Return None
    if the file has none or cannot be read.
    """
    try:
        token = json.loads(path.read_text(encoding="utf-8"))["eos_token"]
        return str(token["content"] if isinstance(token, dict) else token) if token else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
