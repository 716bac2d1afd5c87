"""A SentencePiece .model, as Llama 2 and T5 came with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SentencePieceTokenizer:
    """Encodes by the model's own rules: where it normalizes, the text does not come back unchanged."""

    file_name = "tokenizer.model"

    def __init__(self, path: Path, end_token: str | None = None) -> None:
        """Raises: ValueError if the file is no model, `sentencepiece` is not installed, or no token ends documents."""
        try:
            import sentencepiece
        except ImportError as error:
            raise ValueError(
                "the Python package 'sentencepiece' is not installed; run: pip install 'megamix[sentencepiece]'"
            ) from error
        try:
            self._content = path.read_bytes()
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=self._content)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"tokenizer {str(path)!r} is no SentencePiece model ({error})") from error
        self.vocab_size = int(self._model.get_piece_size())
        self.end_of_text = self._find_end(end_token)
        self.end_token = str(self._model.id_to_piece(self.end_of_text))

    def _find_end(self, end_token: str | None) -> int:
        if end_token is None:
            end = int(self._model.eos_id())
            if end < 0:
                raise ValueError("the SentencePiece model has no end token; name a piece of it by --end-token")
            return end
        end = int(self._model.piece_to_id(end_token))
        if self._model.id_to_piece(end) != end_token:  # it answers with the unknown piece
            raise ValueError(f"--end-token {end_token!r} is no piece of the SentencePiece model; name one that is")
        return end

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, without an end."""
        return list(self._model.encode(text))

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of the beginning of a text, with the token in front that begins one, if the model has it."""
        begin = self._model.bos_id()
        return [*([begin] if begin >= 0 else []), *self.encode(text)]

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of each document, the end token last."""
        return [np.array([*self._model.encode(text), self.end_of_text], dtype=np.int64) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, those that mean nothing left out."""
        return str(self._model.decode([token for token in token_ids if token < self.vocab_size]))

    def save(self, path: Path) -> None:
        path.write_bytes(self._content)

    def speed_up(self, sample: Sequence[str]) -> bool:
        return True
