"""Two other kinds of tokenizer: bytes, and a SentencePiece .model, as Llama 2 and T5 have."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamix.base.durable import write_text, written_aside
from megamix.data import import_extra
from megamix.data.text_tokenizer import TextTokenizer
from megamix.data.tokenizer_bulk import byte_alphabet
from megamix.data.tokenizer_files import read_settings, special_token


class ByteTokenizer(TextTokenizer):
    """A tokenizer of bytes: UTF-8 byte b is token b, and 256 ends a document. It needs no training and no package.

    Its file is a tokenizer.json that other libraries read, too.
    """

    vocab_size = 257
    end_token = "<|endoftext|>"

    @classmethod
    def wrote(cls, path: Path) -> bool:
        """Return whether `save` wrote the file."""
        return path.is_file() and path.read_text(encoding="utf-8", errors="replace") == cls._file_text()

    def token_id(self, token: str) -> int | None:
        return 256 if token == self.end_token else None

    def begin_with(self, token: str | None) -> None:
        if token is not None:
            raise ValueError(f"--begin-token {token!r}: a tokenizer of bytes has none; leave it out")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each document, the end token last."""
        end = np.int64(self.end_of_text)
        return [np.append(np.frombuffer(text.encode(), np.uint8), end) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with the end token shown and unknown ids left out. An incomplete character
        shows as the replacement character.
        """
        pieces = [*(bytes([byte]) for byte in range(256)), self.end_token.encode()]
        return b"".join(pieces[token] for token in token_ids if token < len(pieces)).decode(errors="replace")

    def save(self, path: Path) -> None:
        write_text(path, self._file_text())

    @classmethod
    def _file_text(cls) -> str:
        """Return the file's text: a byte-level BPE without merges, in the format of `tokenizers`."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        end = {"id": 256, "content": cls.end_token, "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        vocab = byte_alphabet() | {cls.end_token: 256}
        content = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end | flags], "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }  # fmt: skip
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


class SentencePieceTokenizer(TextTokenizer):
    """A tokenizer by the rules of a SentencePiece model. If the model normalizes, decoding gives another text back."""

    file_name = "tokenizer.model"

    def __init__(self, path: Path, end_token: str | None = None) -> None:
        """Open a model. Raises: ValueError if the file is no model, or `sentencepiece` is not installed."""
        sentencepiece = import_extra("sentencepiece", "sentencepiece")
        try:
            self._content = path.read_bytes()
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=self._content)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"tokenizer {str(path)!r} is no SentencePiece model ({error})") from error
        self.vocab_size = int(self._model.get_piece_size())
        settings = read_settings(path)
        self.end_token = end_token or self._token(special_token(settings, "eos_token"), self._model.eos_id())
        self.begin_token = self._token(special_token(settings, "bos_token"), self._model.bos_id())
        if self.begin_token and settings.get("add_bos_token", True):
            self.begin_with(self.begin_token)

    def _token(self, named: str, own: int) -> str:
        """Return a token that settings name, or else the piece of the model's own id; "" if it has none, either."""
        if self.token_id(named) is not None:
            return named
        return str(self._model.id_to_piece(own)) if own >= 0 else ""

    def token_id(self, token: str) -> int | None:
        found = int(self._model.piece_to_id(token))
        return found if self._model.id_to_piece(found) == token else None  # an unknown name has the unknown piece's id

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without the tokens that begin and end it."""
        return list(self._model.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; unknown ids are left out."""
        return str(self._model.decode([token for token in token_ids if token < self.vocab_size]))

    def save(self, path: Path) -> None:
        with written_aside(path) as file:
            file.write(self._content)
