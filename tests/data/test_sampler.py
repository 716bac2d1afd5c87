"""The order of samples depends on seed and index alone, each window once an epoch."""

import itertools
import math

import numpy as np
import pytest

from megamix.data.sampler import micro_batches, mix64, permute, windows_of_samples
from megamix.data.source import TokenSpan

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


@pytest.mark.parametrize("first", [0, 5, 95, 195, 1000])
def test_a_window_depends_on_its_sample_s_number_alone(first):
    in_one_go = windows_of_samples(range(first, first + 250), 100, seed=1)
    one_by_one = [windows_of_samples(range(i, i + 1), 100, seed=1)[0] for i in range(first, first + 250)]
    assert in_one_go.tolist() == one_by_one


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


@pytest.mark.parametrize(("num_tokens", "windows"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_windows_of_eight_and_one_tokens_overlap_by_one(num_tokens, windows):
    stretch = TokenSpan(None, 0, num_tokens)  # type: ignore[arg-type]  # no file is read
    assert max(0, stretch.windows(8, packed=False)) == windows


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_ranks_side_by_side_read_the_same_global_batch_for_any_dp_size(dp_size, micro_batch_size):
    for global_batch in (0, 1, 17):
        samples = [
            sample
            for dp_rank in range(dp_size)
            for micro_batch in micro_batches(
                (range(global_batch * 24, global_batch * 24 + 24),),
                micro_batch_size=micro_batch_size,
                dp_rank=dp_rank,
                dp_size=dp_size,
            )
            for part in micro_batch
            for sample in part
        ]
        assert samples == list(range(global_batch * 24, global_batch * 24 + 24))


def test_a_rank_takes_its_block_in_micro_batches_in_order():
    batches = micro_batches((range(48, 64),), micro_batch_size=4, dp_rank=1, dp_size=2)
    assert batches == [(range(56, 60),), (range(60, 64),)]


def test_a_batch_of_several_ranges_is_cut_as_if_they_stood_end_to_end():
    batch = (range(5, 8), range(20, 21), range(40, 44))
    cuts = [micro_batches(batch, micro_batch_size=2, dp_rank=rank, dp_size=2) for rank in range(2)]
    assert cuts == [[(range(5, 7),), (range(7, 8), range(20, 21))], [(range(40, 42),), (range(42, 44),)]]


@pytest.mark.parametrize(("global_batch_size", "fix"), [(10, 8), (13, 16), (1, 8)])
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(global_batch_size, fix):
    with pytest.raises(
        ValueError, match=rf"training.global_batch_size = {global_batch_size} must.* = 8; set it to {fix}$"
    ):
        micro_batches((range(global_batch_size),), micro_batch_size=4, dp_rank=0, dp_size=2)
