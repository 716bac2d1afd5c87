"""The FP32 truth: this rank's share of the master weights and of the optimizer's states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives
from megamix.mixed_precision.flat_layout import FlatLayout, ParamSpec


class OwnedRange(NamedTuple):
    """A run of one parameter's elements, flattened, from number `start` on, that this rank owns."""

    spec: ParamSpec
    start: int
    tensors: tuple[Tensor, ...]  # FP32 (n,) each, views: the master, then the optimizer's states


class MasterShard:
    """Per bucket: `master[k]` FP32 (padded_numel / dp_size,), and `states[k]`, one such tensor per optimizer state,
    zeros at the start.

    `runs[k]`: the pieces of bucket k's shard that belong to one optimizer group each, counted from the shard's start.
    """

    def __init__(self, layout: FlatLayout, rank: int, num_states: int, device: torch.device):
        self._layout, self._rank, self._dp_size = layout, rank, layout.dp_size
        shard_numels = [bucket.padded_numel // layout.dp_size for bucket in layout.buckets]
        self.master = [torch.zeros(numel, device=device) for numel in shard_numels]
        self.states = [tuple(torch.zeros(numel, device=device) for _ in range(num_states)) for numel in shard_numels]
        self.runs = [bucket.shard_runs(rank, layout.dp_size) for bucket in layout.buckets]

    def take(self, bucket: int, full: Tensor) -> None:
        """Copy this rank's part of a whole bucket. Shapes: full FP32 (padded_numel,)."""
        self.master[bucket].copy_(full.view(self._dp_size, -1)[self._rank])

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Every element of a parameter that this rank owns, without the padding."""
        for bucket, master, states in zip(self._layout.buckets, self.master, self.states, strict=True):
            first = self._rank * master.numel()
            for slot in bucket.slots:
                start, end = max(slot.start, first), min(slot.end, first + master.numel())
                if start < end:
                    views = tuple(tensor[start - first : end - first] for tensor in (master, *states))
                    yield OwnedRange(slot.spec, start - slot.start, views)

    def restore(self, master: Sequence[Tensor], states: Sequence[tuple[Tensor, ...]]) -> None:
        """Copy back the saved shards and optimizer states of all buckets."""
        mine = [*self.master, *(state for bucket in self.states for state in bucket)]
        for own, saved in zip(mine, [*master, *(state for bucket in states for state in bucket)], strict=True):
            own.copy_(saved)

    def gather(self, bucket: int, collectives: Collectives) -> Tensor:
        """A whole bucket's master weights, from every rank: FP32 (padded_numel,). Every rank must call it."""
        full = self.master[bucket].new_empty(self._dp_size, self.master[bucket].numel())
        full[self._rank].copy_(self.master[bucket])
        collectives.all_gather(full.view(-1), full[self._rank]).wait()
        return full.view(-1)
