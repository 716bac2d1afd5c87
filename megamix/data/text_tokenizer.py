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
    end_token: str  # token that ends a document
    end_of_text: int  # id of `end_token`

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without an end token."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; unknown ids are left out."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the tokenizer's file."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of the beginning of a text, with the tokens that the tokenizer puts before a text."""
        return self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each document, the end token last."""
        end = self.end_of_text
        return [np.array([*self.encode(text), end], dtype=np.int64) for text in texts]

    def speed_up(self, sample: Sequence[str]) -> bool:
        """Encode by a faster library from now on, if one gives equal ids on the sample.
        Return whether ids are equal.
        """
        return True
