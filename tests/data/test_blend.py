"""A blend is within one sample of its shares at every prefix, finds any sample without computing others, and its stages
continue each source where it was.
"""

import random

import numpy as np
import pytest

from megamix.data.sampler import Blend, BlendStage, blend_order
from tests.conftest import FULL


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
    for _ in range(500 if FULL else 30):
        weights = random_weights(draw)
        assert worst_deviation(blend_order(weights), weights) < 1, weights


def largest_error_first(weights):
    period, given = sum(weights), np.zeros(len(weights), dtype=np.int64)
    order = np.empty(period, dtype=np.int32)
    for sample in range(1, period + 1):
        order[sample - 1] = source = int(np.argmax(np.array(weights) * sample - given * period))
        given[source] += 1
    return order


def test_the_largest_error_first_would_not():
    weights = [60, 30, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert worst_deviation(largest_error_first(weights), weights) > 1
    assert worst_deviation(blend_order(weights), weights) < 1


@pytest.mark.parametrize("first", [0, 7, 999_999_990, 10**12])
def test_a_sample_s_place_depends_on_its_number_alone_however_far(first):
    weights = (5, 3, 0, 11)
    blend = Blend([BlendStage(0, weights)])
    samples = np.arange(first, first + 60)
    sources, numbers = blend.locate(samples)
    one_by_one = [blend.locate(samples[i : i + 1]) for i in range(60)]
    places = [(int(source[0]), int(number[0])) for source, number in one_by_one]
    assert places == list(zip(sources, numbers, strict=True))
    for source, weight in enumerate(weights):
        own = numbers[sources == source]
        assert (np.diff(own) == 1).all()  # none is left out, none comes twice
        assert not weight or abs(own[0] - first * weight / sum(weights)) <= 1


def test_a_source_goes_on_in_the_next_stage_where_it_was():
    stages = [BlendStage(0, (3, 1, 0)), BlendStage(10, (0, 1, 2)), BlendStage(25, (7, 1, 1))]
    sources, numbers = Blend(stages).locate(np.arange(100))
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range(int((sources == source).sum())))
    for stage, stop in zip(stages, (10, 25, 100), strict=True):
        within = sources[stage.from_sample : stop]
        assert worst_deviation(within, list(stage.weights)) < 1


def test_the_order_of_a_blend_never_changes_between_versions():
    # A resumed run must find the order of the run before: these numbers are part of the format.
    assert blend_order([5, 3, 2]).tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
