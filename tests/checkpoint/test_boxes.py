"""A flat range of a block is cut into a few boxes, which hold every element once and in order, for any block, range and
number of dims. A brute-force search confirms it.
"""

import math
import random

import numpy as np

from megamix.checkpoint.boxes import Box, boxes_of_range
from tests.conftest import FULL

CASES = 20_000 if FULL else 1_000


def _random_block(rng):
    """Return a shape of 0 to 4 dims, and a part of it that is not empty."""
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    offset = tuple(rng.randrange(length) for length in shape)
    size = tuple(rng.randint(1, length - start) for length, start in zip(shape, offset, strict=True))
    return shape, Box(offset, size)


def _elements(shape, box):
    """Return the numbers of the box's elements in the full parameter, in the box's own order."""
    return np.arange(math.prod(shape)).reshape(shape)[box.slices_in(Box.whole(shape))].reshape(-1)


def test_the_boxes_of_a_range_are_its_elements_in_order():
    rng = random.Random(0)
    for _ in range(CASES):
        shape, block = _random_block(rng)
        start, end = sorted(rng.randint(0, block.numel) for _ in range(2))
        boxes = list(boxes_of_range(start, end, block))
        got = np.concatenate([np.empty(0, int), *(_elements(shape, box) for box in boxes)])
        assert (got == _elements(shape, block)[start:end]).all(), (shape, block, start, end)
        assert len(boxes) <= max(1, 2 * (len(shape) - 1) + 1)


def test_an_intersection_is_what_both_cover_and_is_found_in_both():
    rng = random.Random(1)
    for _ in range(CASES):
        shape, one = _random_block(rng)
        offset = tuple(rng.randrange(length) for length in shape)
        other = Box(offset, tuple(rng.randint(1, length - at) for length, at in zip(shape, offset, strict=True)))
        both = one.intersection(other)
        want = np.intersect1d(_elements(shape, one), _elements(shape, other))
        assert (np.sort(_elements(shape, both)) if both else np.empty(0)).tolist() == want.tolist()
        for outer in (one, other):
            if both:
                held = _elements(shape, outer).reshape(outer.size)
                assert (held[both.slices_in(outer)].reshape(-1) == _elements(shape, both)).all()
