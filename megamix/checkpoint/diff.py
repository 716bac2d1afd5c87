"""What differs between two checkpoints: configuration, counters, and every state of every parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamix.checkpoint.boxes import Box, pieces
from megamix.checkpoint.record import printable
from megamix.checkpoint.verify import Checkpoint, PieceReader
from megamix.config import effective_tables

_ABSENT = "(none)"


def differences(old: Checkpoint, new: Checkpoint) -> Iterator[str]:
    """A line for each; none if a run resumed from either is the same run. Holds one piece of each at a time.

    By which ranks a state was saved is no difference.
    Raises: ValueError if a checkpoint's configuration is no TOML.
    """
    yield from changes(_facts(old), _facts(new))
    shapes = {param.name: param.shape for param in new.manifest.params}
    old_reader, new_reader = PieceReader(old), PieceReader(new)
    for param in old.manifest.params:
        for state in old.manifest.states:
            if shapes.get(param.name) == param.shape and state in new.manifest.states:
                gap = _gap(old_reader, new_reader, param.name, state, Box.whole(param.shape))
                if gap.differing:
                    yield printable(f"{state} of {param.name}: {gap}")


def changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A line for each value of two trees that is not the same in both."""
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name, _ABSENT), new.get(name, _ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from changes(before, after, f"{prefix}{name}.")
        elif before != after:
            yield printable(f"{prefix}{name}: {before} -> {after}")


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """All that the manifest says of the state, as a tree."""
    manifest = checkpoint.manifest
    run = manifest.run.model_dump()
    try:
        run["config"] = effective_tables(manifest.run.config)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: its configuration {error}") from None
    kept = {"applied_updates", "skipped_steps", "loss_scale", "loss_scale_rule", "states"}
    counters = manifest.model_dump(include=kept, exclude_none=True)
    return {**run, **counters, "shape": {param.name: param.shape for param in manifest.params}}


@dataclass(slots=True)
class _Gap:
    """How far two versions of one state are apart."""

    numel: int = 0
    differing: int = 0  # elements whose bits are not the same
    largest: float = 0.0  # absolute difference; NaN if one of the two is NaN

    def add(self, old: Tensor, new: Tensor) -> None:
        # By bits, as a resumed run must be equal: a NaN is equal to itself, and 0 is not to -0.
        other = old.view(torch.int32) != new.view(torch.int32)
        self.numel += old.numel()
        if count := int(other.count_nonzero()):
            self.differing += count
            gaps = (old[other].double() - new[other].double()).abs()
            # torch's maximum, since Python's may lose a NaN.
            self.largest = float(torch.cat([gaps, gaps.new_tensor([self.largest])]).max())

    def __str__(self) -> str:
        share = f"{self.differing / self.numel:.2%}"
        return f"{self.differing:,} of {self.numel:,} elements ({share}), by at most {self.largest:.3e}"


def _gap(old: PieceReader, new: PieceReader, param: str, state: str, whole: Box) -> _Gap:
    gap = _Gap()
    # Pieces of the parameter, not of the boxes that two savers cut: those may be in each other's way.
    for piece in pieces(whole):
        gap.add(old.gather(param, state, piece), new.gather(param, state, piece))
    return gap
