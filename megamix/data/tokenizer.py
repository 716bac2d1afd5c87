"""A byte-level BPE: any text goes in and comes back unchanged, one token ends each document."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megamix.data.durable import write_synced

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # 256 bytes and END_OF_TEXT


class Tokenizer:
    """A tokenizer.json together with the two rules that training needs: no special text, one end per document."""

    def __init__(self, tokenizer: "HuggingFaceTokenizer") -> None:
        # A document that spells the special token out must not end there: it is encoded as plain characters.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._end_of_text: int | None = tokenizer.token_to_id(END_OF_TEXT)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn merges from texts. A corpus with few pairs gives fewer tokens than `vocab_size`, never more.

        Raises: ValueError if `vocab_size` cannot hold every byte, or `tokenizers` is not installed.
        """
        check_vocab_size(vocab_size)
        tokenizers = _import_tokenizers()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),  # bytes the corpus lacks still encode
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Open any tokenizer.json, also one that others wrote.

        Raises: ValueError if the file is missing or no tokenizer, or `tokenizers` is not installed.
        """
        tokenizers = _import_tokenizers()
        if not path.is_file():
            raise ValueError(f"tokenizer {str(path)!r} is missing; run `megamix prepare` or set data.tokenizer")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception for whatever it cannot read
            raise ValueError(f"tokenizer {str(path)!r} is no tokenizer.json ({error}); write it again") from error

    def save(self, path: Path) -> None:
        write_synced(path, self._tokenizer.to_str(pretty=True))

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def end_of_text(self) -> int:
        """Id of the token that ends a document.

        Raises: ValueError if this vocabulary has none.
        """
        if self._end_of_text is None:
            raise ValueError(f"the tokenizer has no {END_OF_TEXT} token; add it as a special token")
        return self._end_of_text

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, without an end."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of the beginning of a text, with what the tokenizer puts in front of one, as Llama's does."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of each document, END_OF_TEXT last; the documents are spread over the machine's cores."""
        end_of_text = self.end_of_text
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # fast: without offsets
        return [np.array([*encoding.ids, end_of_text], dtype=np.int64) for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, END_OF_TEXT shown; a character cut in two shows as the replacement character."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def check_vocab_size(vocab_size: int) -> None:
    """Raises: ValueError if the vocabulary cannot hold every byte."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need {MIN_VOCAB_SIZE}; "
            f"give at least {MIN_VOCAB_SIZE}"
        )


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            "the Python package 'tokenizers' is not installed; run: pip install 'megamix[tokenizers]'"
        ) from error
    return tokenizers
