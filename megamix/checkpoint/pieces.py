"""A checkpoint's states piece by piece, so that nothing as large as a parameter is ever held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megamix.checkpoint.boxes import Box, boxes_of_range
from megamix.checkpoint.verify import Checkpoint, Stored

_LARGEST = 1 << 22  # elements: 16 MiB


def pieces(box: Box) -> Iterator[Box]:
    """Cut a box into boxes of at most 4 Mi elements, in order."""
    for start in range(0, box.numel, _LARGEST):
        yield from boxes_of_range(start, min(start + _LARGEST, box.numel), box)


class PieceReader:
    """Reads pieces of a checkpoint. Opening a file means parsing its header, so the last one is kept open."""

    def __init__(self, checkpoint: Checkpoint):
        self._folder, self._stored = checkpoint.path, checkpoint.stored
        self._name: str | None = None
        self._file: Any = None

    def read(self, stored: Stored, piece: Box) -> Tensor:
        """A part of a stored box: FP32, the piece's shape, a view of the mapped file."""
        if stored.file != self._name:
            self._file, self._name = safe_open(self._folder / stored.file, "pt"), stored.file
        part: Tensor = self._file.get_slice(stored.key)[piece.slices_in(stored.box)]
        return part

    def gather(self, param: str, state: str, box: Box) -> Tensor:
        """Put together a box of a parameter from the boxes that were saved of it: FP32, the box's shape."""
        out = torch.empty(box.size)
        for stored in self._stored[param, state]:
            if common := stored.box.intersection(box):
                out[common.slices_in(box)] = self.read(stored, common)
        return out
