"""Tokens without a corpus, with a loss that is known beforehand: for tests, and equal on every machine."""

import math

import numpy as np

from megamix.data.sampler import mix64, permute
from megamix.data.source import Numbers, Rows


class MarkovSource:
    """A Markov chain in which every token has `branching` successors, all equally likely.

    A model that has learned the chain reaches a loss of exactly `entropy` = ln(branching) nats, and none goes below;
    one that knows nothing starts at ln(vocab_size). `seed` decides which samples are drawn; the chain is the same for
    every seed, so that other samples of it can validate.
    """

    def __init__(self, *, vocab_size: int, seq_len: int, branching: int, seed: int) -> None:
        assert 1 <= branching <= vocab_size, (branching, vocab_size)
        self.seq_len = seq_len
        self.entropy = math.log(branching)  # nats per target
        self._vocab_size = vocab_size
        self._branching = branching
        self._seed = np.uint64(seed)
        keys = np.zeros(vocab_size, dtype=np.uint64)
        self._first_successor = permute(np.arange(vocab_size), vocab_size, keys)  # a bijection: no token dies out

    def read(self, samples: Numbers) -> Rows:
        length = self.seq_len + 1
        cells = np.asarray(samples, dtype=np.int64)[:, None] * length + np.arange(length)
        draws = mix64(self._seed, cells.astype(np.uint64))
        rows = np.empty(draws.shape, dtype=np.int64)
        rows[:, 0] = draws[:, 0] % np.uint64(self._vocab_size)
        choices = (draws % np.uint64(self._branching)).astype(np.int64)
        for place in range(1, length):
            rows[:, place] = (self._first_successor[rows[:, place - 1]] + choices[:, place]) % self._vocab_size
        return Rows(rows)
