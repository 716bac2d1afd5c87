"""Bytes as token ids: nothing to train, nothing to install."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megamix.data.tokenizer_bulk import byte_alphabet
from megamix.durable import write_text


class ByteTokenizer:
    """UTF-8 byte b is token b, 256 ends a document. Its file is a tokenizer.json that other libraries read too."""

    file_name = "tokenizer.json"
    vocab_size = 257
    end_token = "<|endoftext|>"
    end_of_text = 256

    @classmethod
    def wrote(cls, path: Path) -> bool:
        """Whether the file is one of `save`'s."""
        return path.is_file() and path.read_text(encoding="utf-8", errors="replace") == cls._file_text()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of each document, the end token last."""
        end = np.array([self.end_of_text])
        return [np.concatenate([np.frombuffer(text.encode(), np.uint8), end]) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, the end token shown, ids that mean nothing left out; a character cut in two shows as the
        replacement character.
        """
        pieces = [*(bytes([byte]) for byte in range(256)), self.end_token.encode()]
        return b"".join(pieces[token] for token in token_ids if token < len(pieces)).decode(errors="replace")

    def save(self, path: Path) -> None:
        write_text(path, self._file_text())

    def speed_up(self, sample: Sequence[str]) -> bool:
        return True

    @classmethod
    def _file_text(cls) -> str:
        """A byte-level BPE without merges, in the format of `tokenizers`."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        end = {"id": cls.end_of_text, "content": cls.end_token, "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end | flags],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": byte_alphabet() | {cls.end_token: cls.end_of_text}, "merges": []},
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
