"""Samples that count: each begins at a token drawn by seed and number, and goes on by a step of one to `stride`."""

import numpy as np
from pydantic import PositiveInt

from megamix.data.sampler import mix64
from megamix.data.source import Rows
from megamix.plugins import Section, register_source


class CountingConfig(Section):
    """Samples that count."""

    stride: PositiveInt = 3
    """The largest step from a token to the next."""


class Counting:
    """The same sample for a number at any time, on any rank: a pure function of it."""

    def __init__(self, stride, seq_len, vocab_size, seed):
        if stride >= vocab_size:
            raise ValueError(f"counting.stride must be below model.vocab_size = {vocab_size}, got {stride}")
        self.seq_len, self._stride, self._vocab_size, self._seed = seq_len, stride, vocab_size, np.uint64(seed)
        self.fingerprint = f"counting by up to {stride}"

    def read(self, samples):
        draws = mix64(self._seed, np.asarray(samples, dtype=np.uint64))[:, None]
        steps = draws % np.uint64(self._stride) + np.uint64(1)
        tokens = draws % np.uint64(self._vocab_size) + steps * np.arange(self.seq_len + 1, dtype=np.uint64)
        return Rows((tokens % np.uint64(self._vocab_size)).astype(np.int64))


register_source("counting", CountingConfig, Counting)
