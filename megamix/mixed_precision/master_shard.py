"""The FP32 truth: this rank's share of the master weights and of the optimizer's states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives
from megamix.mixed_precision.examination import Examination
from megamix.mixed_precision.flat_layout import FlatLayout, ParamSpec, Run
from megamix.mixed_precision.fused_update import StepScalars, Update


class OwnedRange(NamedTuple):
    """A run of one parameter's elements, flattened, from number `start` on, that this rank owns."""

    spec: ParamSpec
    start: int
    tensors: tuple[Tensor, ...]  # FP32 (n,) each, views: the master, then the optimizer's states


class MasterShard:
    """Per bucket: `master[k]` FP32 (shard_numel,), and `states[k]`, one such tensor per optimizer state, zeros at the
    start. `owners[k]`: the ranks that own a shard of bucket k each.

    `runs[k]`: the pieces of bucket k's shard that belong to one optimizer group each, counted from the shard's start.
    """

    def __init__(self, layout: FlatLayout, owners: Sequence[Collectives], num_states: int, device: torch.device):
        self._layout, self._owners = layout, owners
        shard_numels = [bucket.shard_numel for bucket in layout.buckets]
        self.master = [torch.zeros(numel, device=device) for numel in shard_numels]
        self.states = [tuple(torch.zeros(numel, device=device) for _ in range(num_states)) for numel in shard_numels]
        self.runs = [bucket.shard_runs(own.axis.rank) for bucket, own in zip(layout.buckets, owners, strict=True)]

    def take(self, bucket: int, full: Tensor) -> None:
        """Copy this rank's part of a whole bucket. Shapes: full FP32 (padded_numel,)."""
        axis = self._owners[bucket].axis
        self.master[bucket].copy_(full.view(axis.size, -1)[axis.rank])

    def update(
        self, bucket: int, grad_shard: Tensor, half_shard: Tensor, update: Update, step: StepScalars,
        examination: Examination | None,
    ) -> None:  # fmt: skip
        """Update this rank's part of a bucket in place.

        Shapes: grad_shard half or FP32, half_shard half, both (shard_numel,).
        """
        cuts: Iterable[tuple[Run, Update]] = ((run, update) for run in self.runs[bucket])
        if examination is not None:
            cuts = examination.watched(update, bucket)
        for run, update_ in cuts:
            part = slice(run.start, run.end)
            states = tuple(state[part] for state in self.states[bucket])
            update_(grad_shard[part], self.master[bucket][part], states, half_shard[part], run.group, step)

    def owned_ranges(self) -> Iterator[OwnedRange]:
        """Every element of a parameter that this rank owns, without the padding."""
        for index, bucket in enumerate(self._layout.buckets):
            tensors = (self.master[index], *self.states[index])
            for spec, start, part in bucket.owned(self._owners[index].axis.rank):
                yield OwnedRange(spec, start, tuple(tensor[part] for tensor in tensors))

    def restore(self, master: Sequence[Tensor], states: Sequence[tuple[Tensor, ...]]) -> None:
        """Copy back the saved shards and optimizer states of all buckets."""
        mine = [*self.master, *(state for bucket in self.states for state in bucket)]
        for own, saved in zip(mine, [*master, *(state for bucket in states for state in bucket)], strict=True):
            own.copy_(saved)

    def gather(self, bucket: int) -> Tensor:
        """A whole bucket's master weights, from its owners: FP32 (padded_numel,). All of them must call it."""
        axis = self._owners[bucket].axis
        full = self.master[bucket].new_empty(axis.size, self.master[bucket].numel())
        full[axis.rank].copy_(self.master[bucket])
        self._owners[bucket].all_gather(full.view(-1), full[axis.rank]).wait()
        return full.view(-1)
