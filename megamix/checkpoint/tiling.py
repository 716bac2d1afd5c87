"""Whether boxes cover a parameter, each element once: exact, and near-linear in their number however they lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megamix.checkpoint.boxes import Box

# Up to here pairs are compared: the fastest for the few boxes that a usual checkpoint has of each parameter.
_FEW = 16
# Corners that may be looked at, per box. Boxes cut in up to 4 dims never have more, and ranges of blocks, which is what
# ranks save, had 8 at most in any number of dims. What a stranger made may not take longer than that.
_MOST_CORNERS = 32

_Ints = NDArray[np.int64]


class _TooManyCornersError(Exception):
    pass


def tiling_problem(boxes: Sequence[Box], shape: tuple[int, ...]) -> str | None:
    """Why these boxes do not cover each element of a parameter exactly once; None if they do."""
    if len(boxes) == 1 and boxes[0] == Box.whole(shape) and boxes[0].numel:
        return None  # of most parameters there is one box: a moment for each, where there are 100,000
    for box in boxes:
        if not box.inside(shape) or not box.numel:
            return f"{_text(box)} is no box of shape {shape}"
    held, want = sum(box.numel for box in boxes), math.prod(shape)
    told = f"{held} of {want} elements are there"
    if len(boxes) <= _FEW:
        for one, other in itertools.combinations(sorted(boxes), 2):
            if one.intersection(other):
                return f"{_text(one)} and {_text(other)} overlap"
        return told if held != want else None
    try:
        element = _first_fault(boxes, shape)
    except _TooManyCornersError:
        return f"its {len(boxes)} boxes lie across each other in too many ways to be checked; ranks save ranges"
    if element is None:
        return None
    holders = [box for box in boxes if box.intersection(Box(element, (1,) * len(shape)))]
    if not holders:
        return f"{told}; {element} is not"
    return f"{_text(holders[0])} and {_text(holders[1])} overlap"


def _text(box: Box) -> str:
    return f"{box.offset} + {box.size}"


def _first_fault(boxes: Sequence[Box], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The first element, the last dim counting most, that does not lie in exactly one of the boxes, all inside the
    shape.

    Let each box count 1 at its elements and the whole parameter -1: the boxes tile it if the sum is 0 everywhere. So
    are then its differences along each dim in turn, and those live on corners alone: + where a box starts, - where it
    ends. After each dim equal corners of equal boxes are added up, and most are gone. The first corner that is left is
    the first element whose sum is not 0, for nothing lies before it.
    """
    # The last dim comes first: a flat range is cut there into pieces of rows, and those add up to whole rows at once.
    cut = [dim for dim in reversed(range(len(shape))) if any(box.size[dim] < shape[dim] for box in boxes)]
    values, sides = _coordinates([*boxes, Box.whole(shape)], cut)
    rests = _rests(sides, len(boxes) + 1)
    weight = np.append(np.ones(len(boxes), np.int64), -1)
    # A corner's coordinates as far as they are known, by their number in `corners`.
    corner, box, weight = _added_up(np.zeros(len(weight), np.int64), np.arange(len(weight)), weight, rests[0])
    corners: list[_Ints] = []
    looked_at = 0
    for value, side, rest in zip(values, sides, rests[1:], strict=True):
        ending = side[1, box] < len(value) - 1  # the others end with the parameter: no element lies behind them
        at = np.concatenate([corner * len(value) + side[0, box], (corner * len(value) + side[1, box])[ending]])
        known, corner = _numbered(at)
        corners.append(known)
        box, weight = np.concatenate([box, box[ending]]), np.concatenate([weight, -weight[ending]])
        corner, box, weight = _added_up(corner, box, weight, rest)
        looked_at += len(box)
        if looked_at > _MOST_CORNERS * (len(boxes) + 1):
            raise _TooManyCornersError
    if not len(corner):
        return None
    element, number = [0] * len(shape), int(corner[0])
    for dim, known, value in reversed([*zip(cut, corners, values, strict=True)]):
        number, coordinate = divmod(int(known[number]), len(value))
        element[dim] = int(value[coordinate])
    return tuple(element)


def _coordinates(boxes: Sequence[Box], dims: Sequence[int]) -> tuple[list[_Ints], list[_Ints]]:
    """Of each dim the coordinates at which any box starts or ends, in order; and where each box does, by their number.

    Shapes: -> (coordinates,), (2, boxes).
    """
    values, sides = [], []
    for dim in dims:
        starts = np.array([box.offset[dim] for box in boxes])
        value, number = _numbered(np.concatenate([starts, starts + np.array([box.size[dim] for box in boxes])]))
        values.append(value)
        sides.append(number.reshape(2, -1))
    return values, sides


def _rests(sides: Sequence[_Ints], boxes: int) -> list[_Ints]:
    """For each dim, and for none: a number of each box, equal for those that are alike from that dim on."""
    rests = [np.zeros(boxes, np.int64)]
    for side in reversed(sides):
        _, span = _numbered(side[0] * (side.max() + 1) + side[1])
        rests.append(_numbered(span * (rests[-1].max() + 1) + rests[-1])[1])
    return rests[::-1]


def _added_up(corner: _Ints, box: _Ints, weight: _Ints, rest: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """One for all that have the corner and the rest of the box in common, in the corners' order; none where that is 0.

    The weights are sums of few enough ones for FP64.
    """
    _, first, same = np.unique(corner * (rest.max() + 1) + rest[box], return_index=True, return_inverse=True)
    weight = np.bincount(same, weight).astype(np.int64)
    left = first[weight != 0]
    return corner[left], box[left], weight[weight != 0]


def _numbered(values: _Ints) -> tuple[_Ints, _Ints]:
    """The different values in order, and of each which it is."""
    different, number = np.unique(values, return_inverse=True)
    return different, number
