"""Boxes of an N-d parameter. Pure arithmetic: no tensors, no files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

_LARGEST_PIECE = 1 << 22  # elements: 16 MiB


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements [offset, offset + size) in each dim. Of a 0-d parameter: both empty, one element."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

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
        """Whether it is a box of a parameter of that shape."""
        return len(self.offset) == len(shape) and all(
            0 <= offset <= length - size for offset, size, length in zip(self.offset, self.size, shape, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """What both cover; None where that is nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        size = tuple(min(ends) - start for *ends, start in zip(self.end, other.end, offset, strict=True))
        return Box(offset, size) if all(length > 0 for length in size) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        starts = tuple(mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + length) for start, length in zip(starts, self.size, strict=True))


def boxes_of_range(start: int, end: int, block: Box) -> Iterator[Box]:
    """The elements [start, end) of a row-major block, as boxes of the full parameter that the block is a part of.

    In order, each contiguous in the block, so that they cut the flat range into consecutive pieces: at most
    2 (N - 1) + 1 of them, because at each dim but the last one there is at most one incomplete row at either end.
    """
    for box in _range_of_shape(start, end, block.size):
        yield box.moved(block.offset)


def _range_of_shape(start: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    if start >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row_numel = math.prod(shape[1:])
    first, head = divmod(start, row_numel)
    last, tail = divmod(end, row_numel)
    if first == last:  # within one row
        yield from _in_row(first, head, tail, shape)
        return
    if head:
        yield from _in_row(first, head, row_numel, shape)
        first += 1
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _in_row(last, 0, tail, shape)


def _in_row(row: int, start: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    for box in _range_of_shape(start, end, shape[1:]):
        yield Box((row, *box.offset), (1, *box.size))


def pieces(box: Box) -> Iterator[Box]:
    """Cut a box into boxes of at most 4 Mi elements, in order."""
    for start in range(0, box.numel, _LARGEST_PIECE):
        yield from boxes_of_range(start, min(start + _LARGEST_PIECE, box.numel), box)
