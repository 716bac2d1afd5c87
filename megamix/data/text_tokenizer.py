"""The interface that tokenizers of every kind have."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class TextTokenizer(ABC):
    """A tokenizer of any kind: text to token ids and back."""

    file_name = "tokenizer.json"  # in the folder of prepare
    vocab_size: int
    end_token: str  # ends a document
    end_of_text: int  # its id

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a piece of text, without an end."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, those that mean nothing left out."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the tokenizer's file."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of the beginning of a text, with what the tokenizer puts in front of one."""
        return self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each document, the end token last."""
        end = self.end_of_text
        return [np.array([*self.encode(text), end], dtype=np.int64) for text in texts]

    def speed_up(self, sample: Sequence[str]) -> bool:
        """Encode by a faster library from now on, if one gives equal ids on the sample; tell whether that is so."""
        return True
