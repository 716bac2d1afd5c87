"""However a parameter was cut, its boxes cover it exactly once or the fault is named."""

import ast
import itertools
import random

import numpy as np
import pytest

from megamix.checkpoint.boxes import Box, boxes_of_range, tiling_problem
from tests.conftest import FULL

CASES = 20_000 if FULL else 300


@pytest.mark.uncounted
def test_a_tiling_is_accepted_whatever_cut_it():
    rng = random.Random(2)
    for _ in range(CASES // 4):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 7))))
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


def _grid(shape, rng):
    """Cut the parameter along one dim, as tensor parallelism does."""
    if not shape:
        return [Box.whole(shape)]
    dim = rng.randrange(len(shape))
    cut = rng.randint(1, shape[dim])
    parts = [(0, cut), (cut, shape[dim])] if cut < shape[dim] else [(0, cut)]
    whole = Box.whole(shape)
    return [
        Box((*whole.offset[:dim], start, *whole.offset[dim + 1 :]), (*shape[:dim], end - start, *shape[dim + 1 :]))
        for start, end in parts
    ]


def test_the_fault_that_is_named_is_there():
    rng = random.Random(3)
    found = {"none": 0, "overlap": 0, "missing": 0}
    for _ in range(3 * CASES):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 4)))
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
            one, other = (Box(*ast.literal_eval(f"({text.replace(' + ', ', ')})")) for text in
                          told.removesuffix(" overlap").split(" and "))  # fmt: skip
            assert one.intersection(other), told
            assert boxes.count(one) + boxes.count(other) >= 2
            found["overlap"] += 1
        else:
            assert told is not None
            assert told.startswith(f"{count.sum()} of {count.size} elements are there")
            found["missing"] += 1
    assert min(found.values()) > CASES // 4, found


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
    offset = tuple(rng.randrange(length) for length in shape)
    other = Box(offset, tuple(rng.randint(1, length - at) for length, at in zip(shape, offset, strict=True)))
    match rng.randrange(4):
        case 0 if boxes:
            del boxes[place]
        case 1 if boxes:
            boxes.append(boxes[place])
        case 2 if boxes:
            boxes[place] = other
        case _:
            boxes.append(other)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (2, 3)), Box((1, 0), (1, 3))],  # overlap, and the second row of three is missing: the sum is right
        [Box((0, 0), (4, 3))],
        [Box((0,), (9,))],
        [Box((-1, 0), (4, 3))],
        [Box((0, 0), (3, 3)), Box((0, 0), (0, 3))],
        [Box((0, 0), (3, 3))] * 17,
    ],
)
def test_what_is_no_tiling_is_told(boxes):
    assert tiling_problem(boxes, (3, 3))


def test_a_parameter_without_elements_needs_no_box():
    assert list(boxes_of_range(0, 0, Box.whole((0, 4)))) == []
    assert tiling_problem([], (0, 4)) is None
    assert tiling_problem([], (0, 2**53, 2**53)) is None
    assert tiling_problem([Box((0, 0), (0, 4))], (0, 4))


def test_as_many_boxes_as_a_large_run_saves_are_checked_in_one_pass():
    """Check the boxes of 2,000 owners on 8 tensor-parallel ranks, which make a hundred million pairs."""
    boxes = [Box((16 * row, 512 * column), (16, 512)) for row in range(2000) for column in range(8)]
    assert tiling_problem(boxes, (32_000, 4096)) is None
    assert str(tiling_problem(boxes[1:], (32_000, 4096))).startswith(f"{32_000 * 4096 - 16 * 512} of")
