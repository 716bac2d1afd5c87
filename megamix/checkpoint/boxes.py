"""Boxes of an N-d parameter: a flat range is cut into boxes, and boxes are checked to cover each element exactly once.

The module is pure arithmetic: no tensors, no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LARGEST_SUB_BOX = 1 << 22  # elements: 16 MiB


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements [offset, offset + size) in each dim. For a 0-d parameter both are empty, and the box has one
    element.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.offset} + {self.size}"

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offset, self.size, strict=True))

    def moved(self, by: tuple[int, ...]) -> Box:
        return Box(tuple(offset + step for offset, step in zip(self.offset, by, strict=True)), self.size)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Return whether this box lies within a parameter of that shape."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            0 <= offset <= length - size for offset, size, length in zip(self.offset, self.size, shape, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """Return the box that both cover; None if they share no element."""
        offset = tuple(map(max, self.offset, other.offset))
        size = tuple(min(ends) - start for *ends, start in zip(self.end, other.end, offset, strict=True))
        return Box(offset, size) if all(length > 0 for length in size) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return where this box lies in a tensor that holds `outer`."""
        starts = tuple(mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + length) for start, length in zip(starts, self.size, strict=True))


def boxes_of_range(start: int, end: int, block: Box) -> Iterator[Box]:
    """Yield the elements [start, end) of a row-major block, as boxes of the full parameter that contains the block.

    The boxes come in order, and each is contiguous in the block. So they cut the flat range into consecutive parts.
    There are at most 2 (N - 1) + 1 boxes: each dim but the last has at most one incomplete row at either end.
    """
    if not block.size:
        yield from [block][start:end]
        return
    row_sizes = [math.prod(block.size[dim + 1 :]) for dim in range(len(block.size))]
    while start < end:
        # Take the outermost dim that has a whole row beginning here, and as many of its rows as fit.
        dim = next(dim for dim, size in enumerate(row_sizes) if start % size == 0 and start + size <= end)
        place = tuple(start // size % length for size, length in zip(row_sizes, block.size, strict=True))
        rows = min((end - start) // row_sizes[dim], block.size[dim] - place[dim])
        yield Box(place, (*(1,) * dim, rows, *block.size[dim + 1 :])).moved(block.offset)
        start += rows * row_sizes[dim]


def sub_boxes(box: Box, largest: int | None = None) -> Iterator[Box]:
    """Cut a box into boxes of at most `largest` elements, in order. The default is 4 Mi elements."""
    largest = largest or _LARGEST_SUB_BOX
    for start in range(0, box.numel, largest):
        yield from boxes_of_range(start, min(start + largest, box.numel), box)


def tiling_problem(boxes: Sequence[Box], shape: tuple[int, ...]) -> str | None:
    """Return why these boxes do not cover each element of a parameter exactly once; None if they do."""
    for box in boxes:
        if not box.inside(shape) or not box.numel:
            return f"{box} is no box of shape {shape}"
    reaching = list[Box]()  # of those before a box, the ones that end beyond its first row
    for box in sorted(boxes):
        reaching = [other for other in reaching if other.end[:1] > box.offset[:1]]
        for other in reaching:
            if box.intersection(other):
                return f"{other} and {box} overlap"
        reaching.append(box)
    held, want = sum(box.numel for box in boxes), math.prod(shape)
    return None if held == want else f"{held} of {want} elements are there"
