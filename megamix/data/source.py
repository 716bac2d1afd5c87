"""Where the tokens of a sample come from: one small interface, and token files behind it."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megamix.data.sampler import num_windows, windows_of_samples
from megamix.data.token_file import TokenFile


class SampleSource(Protocol):
    """Samples by number. Reading has no state: the same numbers give the same tokens, in any order, from any thread."""

    seq_len: int

    def read(self, samples: range) -> NDArray[np.int64]:
        """Shapes: -> int64 (len(samples), seq_len + 1), one sample a row; the last token is only a target."""
        ...


class TokenFileSource:
    """Windows of a token file in the order of `sampler`; documents stand end to end, each with its end token."""

    def __init__(self, token_file: TokenFile, *, seq_len: int, seed: int) -> None:
        """Raises: ValueError if the file is shorter than one window."""
        self.seq_len = seq_len
        self.num_windows = num_windows(token_file.num_tokens, seq_len)
        self._tokens = token_file.tokens
        self._seed = seed
        if not self.num_windows:
            raise ValueError(
                f"a token file of {token_file.num_tokens} tokens holds no window of model.seq_len + 1 = {seq_len + 1}; "
                "shorten model.seq_len or prepare more text"
            )

    def read(self, samples: range) -> NDArray[np.int64]:
        rows = np.empty((len(samples), self.seq_len + 1), dtype=np.int64)
        for row, window in zip(rows, windows_of_samples(samples, self.num_windows, self._seed).tolist(), strict=True):
            start = window * self.seq_len
            row[:] = self._tokens[start : start + self.seq_len + 1]
        return rows
