"""A checkpoint's bytes on their way into a rank's memory, verified as they go by: no byte is read twice for it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamix.checkpoint.boxes import Box, boxes_of_range
from megamix.checkpoint.manifest import FileRecord
from megamix.checkpoint.parts import Part
from megamix.checkpoint.verify import Checkpoint, Stored, verified_chunks

_Wanted = dict[Stored, list[Part]]  # of one file: which parts have something of what lies where


def fill(checkpoint: Checkpoint, parts: Sequence[Part], rank: int = 0, size: int = 1) -> list[str]:
    """Fill the parts' memory, and verify one file in `size`: it is read whole, of the others what lies in the parts.

    Returns what is wrong, a line for each file. Only where no rank has found anything do the parts hold what was saved.
    """
    wanted: dict[str, _Wanted] = defaultdict(dict)
    for part in parts:
        for stored in checkpoint.stored[part.param, part.state]:
            if part.box.intersection(stored.box):
                wanted[stored.file].setdefault(stored, []).append(part)
    problems = []
    for number, record in enumerate(checkpoint.manifest.files):
        path = checkpoint.path / record.name
        try:
            # Saved by as many ranks, it is the rank's own file that it verifies, and all that it needs.
            if number % size == rank:
                _fill_and_verify(path, record, wanted[record.name])
            elif wanted[record.name]:
                _fill_beside(path, wanted[record.name])
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return problems


def _fill_and_verify(path: Path, record: FileRecord, wanted: _Wanted) -> None:
    """Read the whole file, in order. Raises: ValueError at the end if it is not what was written; OSError."""
    to_come = deque(sorted(wanted, key=lambda stored: stored.start))
    position = 0
    for chunk in verified_chunks(path, record):
        while to_come and to_come[0].start < position + len(chunk):
            stored = to_come[0]
            _copy_from_chunk(chunk, position, stored, wanted[stored])
            if stored.end > position + len(chunk):
                break
            to_come.popleft()
        position += len(chunk)


def _copy_from_chunk(chunk: memoryview, position: int, stored: Stored, parts: list[Part]) -> None:
    """Copy what of a stored box lies in the chunk, of which `position` is the place in the file: bytes."""
    start, end = max(position, stored.start), min(position + len(chunk), stored.end)
    values = torch.frombuffer(chunk, dtype=torch.float32, count=(end - start) // 4, offset=start - position)
    done, first = 0, (start - stored.start) // 4
    for box in boxes_of_range(first, first + values.numel(), stored.box):
        piece = values[done : done + box.numel].view(box.size)
        done += box.numel
        for part in parts:
            _copy_common(piece, box, part)


def _copy_common(values: Tensor, box: Box, part: Part) -> None:
    """Copy what lies in the part as well. Shapes: values FP32 (*box.size)."""
    if common := part.box.intersection(box):
        part.tensor.view(part.box.size)[common.slices_in(part.box)].copy_(values[common.slices_in(box)])


def _fill_beside(path: Path, wanted: _Wanted) -> None:
    """Read only what lies in the parts, of a file that another rank verifies. Raises: ValueError, OSError."""
    try:
        with safe_open(path, "pt") as tensors:
            for stored, parts in wanted.items():
                for part in parts:
                    if common := part.box.intersection(stored.box):
                        piece = tensors.get_slice(stored.key)[common.slices_in(stored.box)]
                        _copy_common(piece, common, part)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from None
