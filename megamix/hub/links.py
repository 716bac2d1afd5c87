"""Which part of which Hugging Face tensor a parameter is. Arithmetic on boxes: no tensors, no files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megamix.checkpoint.boxes import Box


@dataclass(frozen=True, slots=True)
class Link:
    """One of our parameters lies in one of their tensors, from `offset` on, turned around where theirs is (in, out)."""

    ours: str
    theirs: str
    shape: tuple[int, ...]  # of ours
    offset: tuple[int, ...]  # in theirs
    transposed: bool = False

    @property
    def region(self) -> Box:
        """What of their tensor is ours."""
        return self.to_theirs(Box.whole(self.shape))

    def to_theirs(self, box: Box) -> Box:
        """Where a box of our parameter lies in their tensor."""
        return self._turned(box).moved(self.offset)

    def to_ours(self, box: Box) -> Box:
        """The reverse, for a box within `region`."""
        return self._turned(box.moved(tuple(-start for start in self.offset)))

    def _turned(self, box: Box) -> Box:
        return Box(box.offset[::-1], box.size[::-1]) if self.transposed else box


def their_shapes(links: Iterable[Link]) -> dict[str, tuple[int, ...]]:
    """The whole of each of their tensors, in the links' order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        end = link.region.end
        shapes[link.theirs] = tuple(map(max, end, shapes.get(link.theirs, end)))
    return shapes
