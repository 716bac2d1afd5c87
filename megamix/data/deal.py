"""The deal of packed sequences to context-parallel ranks, by the work of attention in each chunk of a sequence."""

import numpy as np

from megamix.base.constants import DEALT_CHUNKS
from megamix.data.sampler import Ints


def deal_chunks(positions: Ints, num_ranks: int) -> Ints:
    """Return the numbers of the chunks that each rank computes, in ascending order. They depend on positions alone.

    The chunk with the most work goes first, to the rank with the least work so far among those that have room. A
    query's work is the number of keys that it sees.
    Shapes: positions (sequences, T), with T a multiple of ranks * DEALT_CHUNKS -> (sequences, ranks, DEALT_CHUNKS).
    """
    keys = np.minimum(positions, np.arange(positions.shape[1])) + 1  # a document may begin in the sequence before
    works = keys.reshape(len(keys), DEALT_CHUNKS * num_ranks, -1).sum(2)
    return np.stack([_deal(work, num_ranks) for work in works])


def _deal(work: Ints, num_ranks: int) -> Ints:
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    for chunk in np.argsort(-work, kind="stable").tolist():
        rank = int(load.argmin())
        dealt[rank].append(chunk)
        # A rank that has all its chunks gets no more.
        load[rank] = load[rank] + work[chunk] if len(dealt[rank]) < DEALT_CHUNKS else np.inf
    return np.sort(np.array(dealt), axis=1)
