"""Where every parameter lies: buckets, optimizer runs, padding and owners. Pure arithmetic: no tensors, no ranks
talking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Every parameter and every shard starts on a multiple of 64 elements: 128 bytes in half precision, so that vector
# loads are aligned (a compiled kernel copies misaligned inputs first), and one row of the statistics, so that no row
# is cut by a shard border.
ROW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """What the engine knows of one trainable parameter. A shared parameter has one spec; `name` is the first
    registered one.
    """

    name: str
    shape: tuple[int, ...]
    group: int  # index of its optimizer group
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in its bucket: elements [start, end)."""

    spec: ParamSpec
    start: int

    @property
    def end(self) -> int:
        return self.start + self.spec.numel


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring elements [start, end) of one optimizer group; both are multiples of ROW."""

    group: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that a rank owns: elements [start, end) of its shard of a bucket, with the padding
    that follows the parameter; both are multiples of ROW.
    """

    name: str
    start: int
    end: int
    numel: int  # elements of the parameter; what follows them is padding


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer's plan: parameters of one group stand together, each on a row border; the end is padded for the
    ranks.
    """

    slots: tuple[Slot, ...]
    runs: tuple[Run, ...]
    padded_numel: int

    def shard_runs(self, rank: int, dp_size: int) -> tuple[Run, ...]:
        """The runs of the part that `rank` owns, counted from the start of that part: at most one per group."""
        shard_numel = self.padded_numel // dp_size
        first, last = rank * shard_numel, (rank + 1) * shard_numel
        clipped = (Run(run.group, max(run.start, first) - first, min(run.end, last) - first) for run in self.runs)
        return tuple(run for run in clipped if run.start < run.end)

    def shard_pieces(self, rank: int, dp_size: int) -> tuple[Piece, ...]:
        """The parameters in the part that `rank` owns, in order and without gaps."""
        shard_numel = self.padded_numel // dp_size
        first, last = rank * shard_numel, (rank + 1) * shard_numel
        ends = [*(slot.start for slot in self.slots[1:]), self.padded_numel]
        pieces = []
        for slot, end in zip(self.slots, ends, strict=True):
            start = max(slot.start, first)
            if start < min(end, last):
                numel = max(0, min(slot.end, last) - start)
                pieces.append(Piece(slot.spec.name, start - first, min(end, last) - first, numel))
        return tuple(pieces)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All buckets of a model, in the order in which backward fills them."""

    buckets: tuple[Bucket, ...]
    dp_size: int

    @property
    def padded_numel(self) -> int:
        return sum(bucket.padded_numel for bucket in self.buckets)

    @property
    def largest_bucket(self) -> int:
        return max(bucket.padded_numel for bucket in self.buckets)

    def resident_bytes(self, half_bytes: int, grad_bytes: int, num_states: int) -> int:
        """Bytes that one rank holds between steps: half parameters and gradients whole, FP32 master and states by
        share.

        With half gradients and Adam (two states) 4 + 12 / dp_size per padded element; NAG (one) 4 + 8 / dp_size,
        without momentum (none) 4 + 4 / dp_size.
        """
        return self.padded_numel * (half_bytes + grad_bytes) + self.padded_numel // self.dp_size * 4 * (1 + num_states)


def default_bucket_size(numel: int, dp_size: int) -> int:
    """Elements per bucket: large enough to use the wire well, yet at least four buckets, so that most of the
    reduction overlaps backward, as long as each keeps a million elements."""
    return min(max(40_000_000, 1_000_000 * dp_size), max(1_000_000, math.ceil(numel / 4)))


def build_layout(specs: Sequence[ParamSpec], dp_size: int, bucket_size: int | None = None) -> FlatLayout:
    """Cut the parameters, in reverse registration order (about the order of their gradients), into buckets.

    A bucket is closed once it holds `bucket_size` elements, so 1 gives a bucket per parameter.
    Raises: ValueError if there is nothing to train or bucket_size is not positive.
    """
    if not specs:
        raise ValueError("the model has no trainable parameter: every requires_grad is False")
    if bucket_size is None:
        bucket_size = default_bucket_size(sum(spec.numel for spec in specs), dp_size)
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}; None picks a size by itself")
    buckets: list[Bucket] = []
    held: list[ParamSpec] = []
    for spec in reversed(specs):
        held.append(spec)
        if sum(spec.numel for spec in held) >= bucket_size:
            buckets.append(_bucket(held, dp_size))
            held = []
    if held:
        buckets.append(_bucket(held, dp_size))
    return FlatLayout(tuple(buckets), dp_size)


def _bucket(specs: list[ParamSpec], dp_size: int) -> Bucket:
    slots: list[Slot] = []
    runs: list[Run] = []
    end = 0
    for spec in sorted(specs, key=lambda spec: spec.group):  # stable: keeps the reverse order within a group
        slots.append(Slot(spec, end))
        start, end = end, end + _round_up(spec.numel, ROW)
        if runs and runs[-1].group == spec.group:
            runs[-1] = Run(spec.group, runs[-1].start, end)
        else:
            runs.append(Run(spec.group, start, end))
    # The padding belongs to the last run: its weights, gradients and states are zeros, and every optimizer keeps
    # them so.
    padded_numel = _round_up(end, ROW * dp_size)
    runs[-1] = Run(runs[-1].group, runs[-1].start, padded_numel)
    return Bucket(tuple(slots), tuple(runs), padded_numel)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
