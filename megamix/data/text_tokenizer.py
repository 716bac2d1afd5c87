"""The interface of tokenizers of every kind."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class TextTokenizer(ABC):
    """A tokenizer of any kind: text to token ids and back."""

    file_name = "tokenizer.json"  # name of its file in prepare's output
    vocab_size: int
    end_token = ""  # ends a document; "" if none is known
    begin_token = ""  # begins a text, by the tokenizer's files; "" if they name none
    begin: tuple[int, ...] = ()  # ids that the tokenizer puts before a text

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return a token's id; None if the vocabulary lacks it."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without the tokens that begin and end it."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; unknown ids are left out."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the tokenizer's file."""

    @property
    def end_of_text(self) -> int:
        """Return the id of the token that ends a document. Raises: ValueError if none is known."""
        return self._id_of(self.end_token, "--end-token")

    def begin_with(self, token: str | None) -> None:
        """Put this token before each text from now on; None: no token. "" means the one that the files name.

        Raises: ValueError if the vocabulary lacks it.
        """
        self.begin_token = token or self.begin_token
        self.begin = () if token is None else (self._id_of(self.begin_token, "--begin-token"),)

    def _id_of(self, token: str, flag: str) -> int:
        found = self.token_id(token)
        if found is None:
            why = f"{token!r} is not in the tokenizer's vocabulary" if token else "the tokenizer's files name none"
            raise ValueError(f"{flag}: {why}; name a token of the vocabulary, as in {flag} '<s>'")
        return found

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of the beginning of a text, with the tokens that the tokenizer puts before a text."""
        return [*self.begin, *self.encode(text)]

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each document, with the tokens that begin it and the end token."""
        end = self.end_of_text
        return [np.array([*self.begin, *self.encode(text), end], dtype=np.int64) for text in texts]

    def speed_up(self, sample: Sequence[str]) -> bool:
        """Encode by a faster library from now on, if one gives equal ids on the sample.
        Return whether ids are equal.
        """
        return True
