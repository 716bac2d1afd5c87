"""Boxes against brute force: every element once, in order, under any block, range and number of dims."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from megamix.checkpoint.boxes import Box, boxes_of_range, tiling_problem
from tests.conftest import FULL

CASES = 20_000 if FULL else 1_000


def _random_block(rng: random.Random) -> tuple[tuple[int, ...], Box]:
    """A shape of 0 to 4 dims and a part of it that is not empty."""
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    offset = tuple(rng.randrange(length) for length in shape)
    size = tuple(rng.randint(1, length - start) for length, start in zip(shape, offset, strict=True))
    return shape, Box(offset, size)


def _elements(shape: tuple[int, ...], box: Box) -> np.ndarray:
    """The numbers of the box's elements in the full parameter, in the box's own order."""
    return np.arange(math.prod(shape)).reshape(shape)[box.slices_in(Box.whole(shape))].reshape(-1)


def test_the_boxes_of_a_range_are_its_elements_in_order() -> None:
    rng = random.Random(0)
    for _ in range(CASES):
        shape, block = _random_block(rng)
        start, end = sorted(rng.randint(0, block.numel) for _ in range(2))
        boxes = list(boxes_of_range(start, end, block))
        got = np.concatenate([np.empty(0, int), *(_elements(shape, box) for box in boxes)])
        assert (got == _elements(shape, block)[start:end]).all(), (shape, block, start, end)
        assert len(boxes) <= max(1, 2 * (len(shape) - 1) + 1)


def test_an_intersection_is_what_both_cover_and_is_found_in_both() -> None:
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


def test_a_tiling_is_accepted_whatever_cut_it() -> None:
    rng = random.Random(2)
    for _ in range(CASES // 4):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
        boxes = []
        for block in _grid(shape, rng):
            cuts = sorted({0, block.numel, *(rng.randint(0, block.numel) for _ in range(rng.randint(0, 3)))})
            for start, end in itertools.pairwise(cuts):
                boxes += boxes_of_range(start, end, block)
        rng.shuffle(boxes)
        assert tiling_problem(boxes, shape) is None, (shape, boxes)
        hurt = rng.randrange(len(boxes))
        assert tiling_problem(boxes[:hurt] + boxes[hurt + 1 :], shape), "one is missing"
        assert tiling_problem([*boxes, boxes[hurt]], shape), "one is there twice"


def _grid(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    """The parameter cut along one dim, as tensor parallelism does it."""
    if not shape:
        return [Box.whole(shape)]
    dim = rng.randrange(len(shape))
    cut = rng.randint(1, shape[dim])
    parts = [(0, cut), (cut, shape[dim])] if cut < shape[dim] else [(0, cut)]
    whole = Box.whole(shape)
    return [
        Box(
            (*whole.offset[:dim], start, *whole.offset[dim + 1 :]),
            (*shape[:dim], end - start, *shape[dim + 1 :]),
        )
        for start, end in parts
    ]


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (2, 3)), Box((1, 0), (1, 3))],  # overlap, and the second row of three is missing: the sum is right
        [Box((0, 0), (4, 3))],
        [Box((0,), (9,))],
        [Box((-1, 0), (4, 3))],
        [Box((0, 0), (3, 3)), Box((0, 0), (0, 3))],
    ],
)
def test_what_is_no_tiling_is_told(boxes: list[Box]) -> None:
    assert tiling_problem(boxes, (3, 3))


def test_a_parameter_without_elements_needs_no_box() -> None:
    assert list(boxes_of_range(0, 0, Box.whole((0, 4)))) == []
    assert tiling_problem([], (0, 4)) is None
