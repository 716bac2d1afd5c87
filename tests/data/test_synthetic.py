"""The synthetic source has the entropy it states."""

import math

import numpy as np
import pytest

from megamix.data.source import MarkovSource


def chain(seed=3, branching=4):
    return MarkovSource(vocab_size=32, seq_len=15, branching=branching, seed=seed)


def test_a_sample_depends_on_seed_and_number_alone():
    together = chain().read(range(100, 110)).tokens
    assert together.dtype == np.int64
    assert together.shape == (10, 16)
    assert (together == np.concatenate([chain().read(range(i, i + 1)).tokens for i in range(100, 110)])).all()
    assert (together != chain(seed=4).read(range(100, 110)).tokens).any()


@pytest.mark.parametrize("branching", [1, 2, 4, 32])
def test_the_entropy_is_the_one_stated(branching):
    rows = chain(branching=branching).read(range(8000)).tokens
    counts = np.zeros((32, 32))
    np.add.at(counts, (rows[:, :-1].ravel(), rows[:, 1:].ravel()), 1)
    assert ((counts > 0).sum(axis=1) == branching).all()  # every token occurs and has that many successors
    frequencies = counts / counts.sum()
    conditional = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(frequencies * np.log(np.where(conditional > 0, conditional, 1))).sum()
    # Counting underestimates by about (cells - rows) / (2 draws) = 0.004 nats at most.
    assert math.log(branching) - 0.006 < entropy <= math.log(branching) + 1e-12


def test_all_tokens_are_about_equally_frequent():
    counts = np.bincount(chain().read(range(4000)).tokens.ravel(), minlength=32)
    assert counts.min() > 0.8 * counts.mean()


def test_samples_do_not_repeat():
    rows = chain(branching=32).read(range(2000)).tokens
    assert len(np.unique(rows, axis=0)) == 2000
