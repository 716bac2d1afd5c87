"""What is to be saved: the state of one instant, as views of the engine or as a copy that training leaves alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamix.checkpoint.manifest import Manifest, RunRecord, describe
from megamix.checkpoint.parts import Part, owned_parts, state_names
from megamix.mixed_precision.engine import ShardedEngine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank saves."""

    manifest: Manifest  # its files still to be named; the same on every rank
    parts: Sequence[Part]

    @property
    def largest_size(self) -> int:
        """Bytes that all ranks together will not exceed: the FP32 states, and room for names."""
        numel = sum(math.prod(param.shape) for param in self.manifest.params)
        return int(4 * numel * len(self.manifest.states) * 1.01) + (1 << 20)


def take_snapshot(engine: ShardedEngine, run: RunRecord) -> Snapshot:
    """The engine's state between two steps: views, so save it before the next one. Reads the device."""
    return Snapshot(describe(engine, state_names(engine), run), owned_parts(engine))


class HostCopy:
    """Memory of the host for one snapshot, used again by the next: on a GPU pinned, so that the device copies into it
    while the host goes on.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._copied: torch.cuda.Event | None = None

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Start copying. The engine may go on at once: on a GPU its next step is queued behind the copy."""
        numel = sum(part.box.numel for part in snapshot.parts)
        on_gpu = any(part.tensor.is_cuda for part in snapshot.parts)
        if self._memory.numel() != numel:
            self._memory = torch.empty(numel, pin_memory=on_gpu)
        pieces: Sequence[Tensor] = torch.split(self._memory, [part.box.numel for part in snapshot.parts])
        for part, piece in zip(snapshot.parts, pieces, strict=True):
            piece.copy_(part.tensor.view(-1), non_blocking=True)
        if on_gpu:  # pragma: CUDA only
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        parts = [replace(part, tensor=piece) for part, piece in zip(snapshot.parts, pieces, strict=True)]
        return replace(snapshot, parts=parts)

    def wait(self) -> None:
        """Return once the copy is whole; for any thread."""
        if self._copied is not None:  # pragma: CUDA only
            self._copied.synchronize()
