"""A flat range of a block is cut into a few boxes, which hold every element once and in order, for any block, range and
number of dims. However a parameter was cut, its boxes cover it exactly once or the fault is named. A brute-force search
confirms both.
"""

import ast
import math
import random

import numpy as np

from megamix.checkpoint.boxes import Box, boxes_of_range, tiling_problem
from tests.conftest import FULL

CASES, TILINGS = (20_000, 60_000) if FULL else (1_000, 900)


def _random_shape(rng):
    return tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))


def _random_box(rng, shape):
    """Return a part of the shape that is not empty."""
    offset = tuple(rng.randrange(length) for length in shape)
    return Box(offset, tuple(rng.randint(1, length - start) for length, start in zip(shape, offset, strict=True)))


def _elements(shape, box):
    """Return the numbers of the box's elements in the full parameter, in the box's own order."""
    return np.arange(math.prod(shape)).reshape(shape)[box.slices_in(Box.whole(shape))].reshape(-1)


def test_the_boxes_of_a_range_are_its_elements_in_order():
    rng = random.Random(0)
    for _ in range(CASES):
        shape = _random_shape(rng)
        block = _random_box(rng, shape)
        start, end = sorted(rng.randint(0, block.numel) for _ in range(2))
        boxes = list(boxes_of_range(start, end, block))
        got = np.concatenate([np.empty(0, int), *(_elements(shape, box) for box in boxes)])
        assert (got == _elements(shape, block)[start:end]).all(), (shape, block, start, end)
        assert len(boxes) <= max(1, 2 * (len(shape) - 1) + 1)


def test_an_intersection_is_what_both_cover_and_is_found_in_both():
    rng = random.Random(1)
    for _ in range(CASES):
        shape = _random_shape(rng)
        one, other = _random_box(rng, shape), _random_box(rng, shape)
        both = one.intersection(other)
        want = np.intersect1d(_elements(shape, one), _elements(shape, other))
        assert (np.sort(_elements(shape, both)) if both else np.empty(0)).tolist() == want.tolist()
        for outer in (one, other):
            if both:
                held = _elements(shape, outer).reshape(outer.size)
                assert (held[both.slices_in(outer)].reshape(-1) == _elements(shape, both)).all()


def test_the_fault_that_is_named_is_there():
    rng = random.Random(3)
    found = {"none": 0, "overlap": 0, "missing": 0}
    for _ in range(TILINGS):
        shape = _random_shape(rng)
        boxes = list(_cut(Box.whole(shape), rng))
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            _hurt(boxes, shape, rng)
        count = np.zeros(shape, int)
        for box in boxes:
            count[box.slices_in(Box.whole(shape))] += 1
        told = tiling_problem(boxes, shape)
        if (count == 1).all():
            assert told is None, (shape, boxes)
            found["none"] += 1
        elif told is not None and told.endswith("overlap"):
            places = told.removesuffix(" overlap").replace(" + ", ", ").split(" and ")
            one, other = (Box(*ast.literal_eval(f"({place})")) for place in places)
            assert one.intersection(other), told
            assert boxes.count(one) + boxes.count(other) >= 2
            found["overlap"] += 1
        else:
            assert told.startswith(f"{count.sum()} of {count.size} elements are there")
            found["missing"] += 1
    assert min(found.values()) > TILINGS // 12, found


def _cut(box, rng):
    """Cut a box across some dim again and again."""
    dim = rng.randrange(len(box.size)) if box.size else 0
    if not box.size or box.size[dim] == 1 or rng.random() < 0.25:
        yield box
        return
    length = rng.randrange(1, box.size[dim])
    for start, size in ((0, length), (length, box.size[dim] - length)):
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        yield from _cut(Box(offset, (*box.size[:dim], size, *box.size[dim + 1 :])), rng)


def _hurt(boxes, shape, rng):
    """Leave one out, repeat one, or put another in its place: also where that leaves the sum of elements right."""
    place = rng.randrange(len(boxes)) if boxes else 0
    other = _random_box(rng, shape)
    match rng.randrange(4):
        case 0 if boxes:
            del boxes[place]
        case 1 if boxes:
            boxes.append(boxes[place])
        case 2 if boxes:
            boxes[place] = other
        case _:
            boxes.append(other)


def test_what_is_no_tiling_is_told():
    assert tiling_problem([Box((0, 0), (2, 3)), Box((1, 0), (1, 3))], (3, 3))  # overlap, where the sum is right
    for no_box in (Box((0, 0), (4, 3)), Box((0,), (9,)), Box((0, 0), (0, 3))):
        assert "is no box" in tiling_problem([no_box], (3, 3))


def test_a_parameter_without_elements_needs_no_box():
    assert list(boxes_of_range(0, 0, Box.whole((0, 4)))) == []
    assert tiling_problem([], (0, 4)) is None
    assert tiling_problem([Box((0, 0), (0, 4))], (0, 4))


def test_as_many_boxes_as_a_large_run_saves_are_checked_in_one_pass():
    """Check the boxes of 500 owners on 8 tensor-parallel ranks, which make eight million pairs."""
    boxes = [Box((64 * row, 512 * column), (64, 512)) for row in range(500) for column in range(8)]
    assert tiling_problem(boxes, (32_000, 4096)) is None
    assert str(tiling_problem(boxes[1:], (32_000, 4096))).startswith(f"{32_000 * 4096 - 64 * 512} of")
