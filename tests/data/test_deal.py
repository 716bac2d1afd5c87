"""The chunks of a packed sequence are dealt evenly, each once, by the sequence's documents alone."""

import numpy as np
import pytest

from megamix.data.deal import deal_chunks
from megamix.tuned import DEALT_CHUNKS
from tests.conftest import FULL


def _packed(dice, kind, num_positions):
    """Return positions of one sequence of documents whose lengths are spread as real ones' are."""
    position = np.empty(num_positions, np.int64)
    done = 0
    while done < num_positions:
        length = dice.lognormal(6.5, 1.1) if kind == "lognormal" else 200 * (1 + dice.pareto(0.9))
        length = min(max(1, int(length)), num_positions - done)
        position[done : done + length] = np.arange(length)
        done += length
    return position


def _work(positions, deal):
    """Return the keys that each rank's queries of one sequence see."""
    chunks = np.minimum(positions, np.arange(len(positions))).reshape(deal.size, -1) + 1
    work = chunks.sum(1)[deal].sum(1)
    return work


@pytest.mark.parametrize("kind", ["lognormal", "heavy-tailed"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_every_chunk_is_dealt_once_and_the_busiest_rank_has_the_mean_work(kind, num_ranks):
    dice = np.random.default_rng(0)
    rows = np.stack([_packed(dice, kind, 131_072) for _ in range(40 if FULL else 8)])
    deals = deal_chunks(rows, num_ranks)
    assert deals.shape == (len(rows), num_ranks, DEALT_CHUNKS)
    shares = []
    for row, deal in zip(rows, deals, strict=True):
        assert sorted(deal.flatten()) == [*range(num_ranks * DEALT_CHUNKS)]
        assert np.array_equal(deal, np.sort(deal, 1))
        assert np.array_equal(deal, deal_chunks(row[None], num_ranks)[0])  # its own, whatever lies beside it
        work = _work(row, deal)
        shares.append(work.max() / work.mean())
    print(f"{kind}, {num_ranks} ranks: busiest over mean {np.mean(shares):.3f}, at most {max(shares):.3f}")
    assert np.mean(shares) < 1.05


def test_what_a_document_has_in_the_sequence_before_is_no_work():
    rows = np.stack([np.arange(64), np.arange(64) + 1000])
    one, other = deal_chunks(rows, 2)
    assert np.array_equal(one, other)
