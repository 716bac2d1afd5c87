"""Tokenizers: text to token ids; one token ends each document. `open_tokenizer` opens the file of any tokenizer."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megamix.base.durable import write_text
from megamix.data import import_extra
from megamix.data.text_tokenizer import TextTokenizer
from megamix.data.tokenizer_bulk import bulk_encoder
from megamix.data.tokenizer_files import copy_files, read_settings, save_settings, special_token
from megamix.data.tokenizer_kinds import ByteTokenizer, SentencePieceTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # 256 bytes and END_OF_TEXT
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


def save_tokenizer(tokenizer: TextTokenizer, folder: Path, source: Path | None = None) -> None:
    """Write the tokenizer's file, and in Hugging Face's form the tokens that begin and end a document. `source`: the
    file that it was opened from, whose settings come along.
    """
    if source is not None:
        copy_files(source, folder)
        for path in folder.glob("tokenizer.*"):  # a second vocabulary would begin texts by a rule of its own
            path.unlink()
    tokenizer.save(folder / tokenizer.file_name)
    save_settings(tokenizer, folder)


class Tokenizer(TextTokenizer):
    """A tokenizer.json with the two rules that training needs: text is never a special token, and each document has one
    end token.
    """

    def __init__(self, tokenizer: "HuggingFaceTokenizer", end_token: str | None = None, begin_token: str = "") -> None:
        # A document that spells a special token out must not end there: its characters are encoded as plain text.
        tokenizer.encode_special_tokens = True
        # Switch these settings off: they would cut or pad documents and prompts, or give other ids in each run.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if hasattr(tokenizer.model, "dropout"):
            tokenizer.model.dropout = None
        self._tokenizer = tokenizer
        self._bulk: Callable[[str], list[int] | None] | None = None
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)  # ids may have gaps
        known = (token for token in _END_TOKENS if tokenizer.token_to_id(token) is not None)
        self.end_token = end_token or next(known, "")
        text = tokenizer.encode("a" if tokenizer.num_special_tokens_to_add(is_pair=False) else "")
        self.begin = tuple(text.ids[: [*text.special_tokens_mask, 0].index(0)])  # the special tokens that come first
        self.begin_token = begin_token or "".join(str(tokenizer.id_to_token(it)) for it in self.begin[:1])

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn the merges of a byte-level BPE from texts. Any text can be encoded, and decodes unchanged.

        A corpus with few pairs gives fewer than `vocab_size` tokens; no corpus gives more.
        Raises: ValueError if `tokenizers` is not installed.
        """
        tokenizers = import_extra("tokenizers", "tokenizers")
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = byte_level.alphabet()  # also bytes that the corpus lacks
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path, end_token: str | None = None) -> "Tokenizer":
        """Open any tokenizer.json, whoever wrote it.

        Raises: ValueError if the file is missing or no tokenizer, or `tokenizers` is not installed.
        """
        tokenizers = import_extra("tokenizers", "tokenizers")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for any file it cannot read
            told = f"tokenizer {str(path)!r} is no tokenizer.json ({error})"
            raise ValueError(f"{told}; name a tokenizer.json or SentencePiece .model") from error
        settings = read_settings(path)
        return cls(tokenizer, end_token or special_token(settings, "eos_token"), special_token(settings, "bos_token"))

    def begin_with(self, token: str | None) -> None:
        """Put this token before each text from now on, as TextTokenizer says, and nothing behind it."""
        before = self.begin
        super().begin_with(token)
        if self.begin != before or self._tokenizer.num_special_tokens_to_add(is_pair=False) > len(before):
            from tokenizers.processors import TemplateProcessing

            first = [self.begin_token] if self.begin else []
            pair, special = [*first, "$A", *first, "$B"], [*zip(first, self.begin, strict=True)]
            self._tokenizer.post_processor = TemplateProcessing([*first, "$A"], pair, special)

    def save(self, path: Path) -> None:
        write_text(path, self._tokenizer.to_str(pretty=True))

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def speed_up(self, sample: Sequence[str]) -> bool:
        """Encode by tiktoken from now on, if it can express this tokenizer and gives equal ids on the sample. Return
        whether it does.
        """
        bulk = bulk_encoder(json.loads(self._tokenizer.to_str()))
        if bulk is not None and all(bulk(text) == self.encode(text) for text in sample):
            self._bulk = bulk
        return self._bulk is not None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without the tokens that begin and end it."""
        token_ids = self._bulk(text) if self._bulk else None
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids) if token_ids is None else token_ids

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each document, as TextTokenizer does. Without `speed_up` all cores encode."""
        end = self.end_of_text
        if self._bulk is not None:
            return super().encode_documents(texts)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # fast: it computes no offsets
        return [np.array([*self.begin, *encoding.ids, end], dtype=np.int64) for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with the end token shown. An incomplete character shows as the replacement
        character.
        """
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
