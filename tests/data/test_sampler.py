"""The order of samples depends on seed and index alone, each window once an epoch. A blend is within one sample of its
shares at every prefix, and its stages continue each source where it was. The chunks of a packed
sequence are dealt evenly, each once, by the sequence's documents alone.
"""

import itertools
import math
import random

import numpy as np
import pytest

from megamix.base.constants import DEALT_CHUNKS
from megamix.data.deal import deal_chunks
from megamix.data.sampler import Blend, BlendStage, blend_order, micro_batches, mix64, permute, windows_of_samples
from tests.conftest import FULL

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64, 97, 100, 127, 128, 129, 1009, 4096, 65537]


def keys(count):
    return mix64(np.uint64(7), np.arange(count, dtype=np.uint64))


@pytest.mark.parametrize("size", SIZES)
def test_every_window_comes_exactly_once_in_every_epoch(size):
    for epoch in range(3):
        windows = windows_of_samples(range(epoch * size, (epoch + 1) * size), size, seed=11)
        assert sorted(windows.tolist()) == list(range(size))


def test_a_position_has_an_image_without_the_others_even_in_a_huge_stream():
    size = 10**12 + 39
    images = permute(np.arange(5000) * 10**8, size, np.full(5000, 3, dtype=np.uint64))
    assert len(set(images.tolist())) == 5000
    assert 0 <= images.min() <= images.max() < size
    assert abs(images.mean() / size - 0.5) < 5 * math.sqrt(1 / 12 / 5000)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(windows_of_samples(range(epoch * 50, epoch * 50 + 50), 50, seed).tolist())
        for epoch, seed in itertools.product(range(20), range(20))
    }
    assert len(orders) == 400  # in particular (epoch 1, seed 0) is not (epoch 0, seed 1)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_windows_are_about_equally_likely(size):
    draws = 20_000
    places = [permute(np.full(draws, place), size, keys(draws)) for place in range(size)]
    _, counts = np.unique(np.stack(places), axis=1, return_counts=True)
    assert len(counts) == math.factorial(size)
    _assert_uniform(counts)


@pytest.mark.parametrize("size", [97, 1000, 1024])
@pytest.mark.parametrize("place", [0, 13, 96])
def test_a_sample_meets_all_windows_about_equally_often(size, place):
    images = permute(np.full(20_000, place), size, keys(20_000))
    _assert_uniform(np.bincount(images, minlength=size))


def test_neighbouring_samples_are_unrelated():
    size = 20_011
    windows = windows_of_samples(range(size), size, seed=5)
    steps = np.diff(windows) % size
    _assert_uniform(np.histogram(steps, bins=100, range=(0, size))[0])
    other_epoch = windows_of_samples(range(size, 2 * size), size, seed=5)
    for other in (np.roll(windows, 1), other_epoch, np.arange(size)):
        assert abs(np.corrcoef(windows, other)[0, 1]) < 5 / math.sqrt(size)


def test_the_order_never_changes_between_versions():
    # A resumed run must find the order of the run before: these numbers are part of the format.
    assert windows_of_samples(range(98, 106), 100, seed=1234).tolist() == [9, 90, 61, 82, 76, 39, 24, 98]


def _assert_uniform(counts):
    """Chi-squared within five standard deviations of its mean: fixed keys, so it passes for ever or never."""
    expected = counts.sum() / len(counts)
    chi_squared = ((counts - expected) ** 2).sum() / expected
    freedom = len(counts) - 1
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom), (chi_squared, freedom)


def test_a_batch_of_several_ranges_is_cut_as_if_they_stood_end_to_end():
    batch = (range(5, 8), range(20, 21), range(40, 44))
    cuts = [micro_batches(batch, micro_batch_size=2, dp_rank=rank, dp_size=2) for rank in range(2)]
    assert cuts == [[(range(5, 7),), (range(7, 8), range(20, 21))], [(range(40, 42),), (range(42, 44),)]]


@pytest.mark.parametrize(("global_batch_size", "fix"), [(10, 8), (13, 16), (1, 8)])
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(global_batch_size, fix):
    told = rf"training.global_batch_size = {global_batch_size} must.* = 8; set it to {fix}$"
    with pytest.raises(ValueError, match=told):
        micro_batches((range(global_batch_size),), micro_batch_size=4, dp_rank=0, dp_size=2)


def worst_deviation(order, weights):
    """Return the largest distance of a source's count from its exact share over all prefixes, in samples. It is exact
    until the last division.
    """
    period, counts = sum(weights), np.zeros((len(order), len(weights)), dtype=np.int64)
    counts[np.arange(len(order)), order] = 1
    exact = np.arange(1, len(order) + 1)[:, None] * np.array(weights)
    return float(np.abs(counts.cumsum(0) * period - exact).max() / period)


def random_weights(draw):
    """Return a few or many weights, alike or of very different sizes."""
    largest = draw.choice([1, 3, 100, 2000])
    return [draw.choice([1, draw.randint(1, largest)]) for _ in range(draw.choice([1, 2, 3, 5, 20, 80]))]


def test_every_source_stays_within_one_sample_of_its_share_at_every_prefix():
    draw = random.Random(1)
    # The largest error first would leave the first of these by more than one.
    for weights in ([60, 30, *[6] * 16, *[1] * 12], *(random_weights(draw) for _ in range(500 if FULL else 30))):
        assert worst_deviation(blend_order(weights), weights) < 1, weights


@pytest.mark.parametrize("first", [0, 7, 999_999_990, 10**12])
def test_a_source_s_samples_are_numbered_without_a_gap_however_far(first):
    weights = (5, 3, 0, 11)
    blend = Blend([BlendStage(0, weights)])
    sources, numbers = blend.locate(np.arange(first, first + 60))
    for source, weight in enumerate(weights):
        own = numbers[sources == source]
        assert (np.diff(own) == 1).all()  # none is left out, none comes twice
        assert not weight or abs(own[0] - first * weight / sum(weights)) <= 1


def test_a_source_goes_on_in_the_next_stage_where_it_was():
    stages = [BlendStage(0, (3, 1, 0)), BlendStage(10, (0, 1, 2)), BlendStage(25, (7, 1, 1))]
    sources, numbers = Blend(stages).locate(np.arange(100))
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range(int((sources == source).sum())))
    assert worst_deviation(sources[25:], [7, 1, 1]) < 1


def test_the_order_of_a_blend_never_changes_between_versions():
    # A resumed run must find the order of the run before: these numbers are part of the format.
    assert blend_order([5, 3, 2]).tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


def _packed(dice, kind, num_positions):
    """Return positions of one sequence of documents whose lengths are spread as real ones' are."""
    lengths = dice.lognormal(6.5, 1.1, 2000) if kind == "lognormal" else 200 * (1 + dice.pareto(0.9, 2000))
    return np.concatenate([np.arange(max(1, min(int(length), num_positions))) for length in lengths])[:num_positions]


@pytest.mark.parametrize("kind", ["lognormal", "heavy-tailed"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_every_chunk_is_dealt_once_and_the_busiest_rank_has_the_mean_work(kind, num_ranks):
    dice = np.random.default_rng(0)
    rows = np.stack([_packed(dice, kind, 131_072) for _ in range(40 if FULL else 8)])
    deals = deal_chunks(rows, num_ranks)
    shares = []
    for row, deal in zip(rows, deals, strict=True):
        assert sorted(deal.flatten()) == [*range(num_ranks * DEALT_CHUNKS)]
        assert np.array_equal(deal, np.sort(deal, 1))
        assert np.array_equal(deal, deal_chunks(row[None], num_ranks)[0])  # its own, whatever lies beside it
        keys = np.minimum(row, np.arange(len(row))) + 1  # that each query sees
        work = keys.reshape(deal.size, -1).sum(1)[deal].sum(1)
        shares.append(work.max() / work.mean())
    assert np.mean(shares) < 1.05


def test_what_a_document_has_in_the_sequence_before_is_no_work():
    rows = np.stack([np.arange(64), np.arange(64) + 1000])
    one, other = deal_chunks(rows, 2)
    assert np.array_equal(one, other)
