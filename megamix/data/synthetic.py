"""Tokens without a corpus, with a loss that is known beforehand: for tests, and equal on every machine."""

import math

import numpy as np
from numpy.typing import NDArray

from megamix.data.sampler import mix64, permute


class MarkovSource:
    """A Markov chain in which every token has `branching` successors, all equally likely.

    A model that has learned the chain reaches a loss of exactly `entropy` = ln(branching) nats, and none goes below;
    one that knows nothing starts at ln(vocab_size). The chain itself depends on `seed` alone.
    """

    def __init__(self, *, vocab_size: int, seq_len: int, branching: int, seed: int) -> None:
        assert 1 <= branching <= vocab_size, (branching, vocab_size)
        self.seq_len = seq_len
        self.entropy = math.log(branching)  # nats per target
        self._vocab_size = vocab_size
        self._branching = branching
        self._seed = np.uint64(seed)
        keys = np.full(vocab_size, self._seed, dtype=np.uint64)
        self._first_successor = permute(np.arange(vocab_size), vocab_size, keys)  # a bijection: no token dies out

    def read(self, samples: range) -> NDArray[np.int64]:
        length = self.seq_len + 1
        cells = np.arange(samples.start * length, samples.stop * length, dtype=np.uint64)
        draws = mix64(self._seed, cells).reshape(len(samples), length)
        rows = np.empty(draws.shape, dtype=np.int64)
        rows[:, 0] = draws[:, 0] % np.uint64(self._vocab_size)
        choices = (draws % np.uint64(self._branching)).astype(np.int64)
        for place in range(1, length):
            rows[:, place] = (self._first_successor[rows[:, place - 1]] + choices[:, place]) % self._vocab_size
        return rows
