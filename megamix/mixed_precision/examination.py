"""A step looked at closely: whose gradient is not finite, how small gradients are, which updates the half copy misses.

Only steps that were asked for it (`engine.examine_next_step()`) pay for these passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamix.mixed_precision.flat_layout import FlatLayout, Run
from megamix.mixed_precision.fused_update import Update

_CHUNK = 1 << 20  # elements, a multiple of ROW: the passes' own memory is a few of these, whatever a shard's size

EXPONENT_BIAS = 127  # of FP32
_EXPONENTS = 256


class Examination:
    """The tables of one examined step on one rank. Device tensors; nothing here waits for the device.

    `local` FP64 (micro-batches, parameters, 3): of this rank's own gradient of each micro-batch, before it is added to
    any other, the scale in it: how many elements are inf, how many NaN, and max abs (NaN where there is one).
    `exponents` INT64 (layers, 256): of the gradient that the step reads (summed over ranks and micro-batches, the scale
    in it) how many elements have each biased exponent of FP32. Bin e: 2^(e - 127) <= |g| < 2^(e - 126); bin 0: zero and
    FP32's subnormals; bin 255: inf and NaN. Every element that this rank owns is in one bin, padding in none.
    `zeros` INT64 (layers,): exact zeros among them.
    `updates` INT64 (layers, 2): master elements that the update changed, and of these the ones whose half copy it did
    not change.
    """

    def __init__(
        self, layout: FlatLayout, shards: Sequence[int], param_names: Sequence[str], micro_batches: int,
        device: torch.device,
    ):  # fmt: skip
        """`shards`: which one of each bucket is this rank's. `param_names`: in registration order, which is that of
        `local` and, by first appearance, of `layers`.
        """
        self.param_names, self.layers = tuple(param_names), layers_of(param_names)
        self._param_index = {name: index for index, name in enumerate(self.param_names)}
        self._layer_index = {name: self.layers.index(layer_of(name)) for name in self.param_names}
        self._groups = {slot.spec.name: slot.spec.group for bucket in layout.buckets for slot in bucket.slots}
        self._pieces = [bucket.shard_pieces(shard) for bucket, shard in zip(layout.buckets, shards, strict=True)]
        self.local = torch.zeros(micro_batches, len(self.param_names), 3, dtype=torch.float64, device=device)
        self.exponents = torch.zeros(len(self.layers), _EXPONENTS, dtype=torch.int64, device=device)
        self.zeros = torch.zeros(len(self.layers), dtype=torch.int64, device=device)
        self.updates = torch.zeros(len(self.layers), 2, dtype=torch.int64, device=device)

    def look(self, micro_batch: int) -> Callable[[str, Tensor], None]:
        """For one micro-batch's ready hooks: called with a parameter's name and gradient, as often as one comes."""

        def look_at(name: str, grad: Tensor) -> None:
            inf, nan, max_abs = self.local[micro_batch, self._param_index[name]]
            for chunk in torch.split(grad.reshape(-1), _CHUNK):
                inf += chunk.isinf().sum()
                nan += chunk.isnan().sum()
                torch.maximum(max_abs, chunk.abs().amax(), out=max_abs)

        return look_at

    def count(self, grad_shards: Sequence[Tensor]) -> None:
        """Count this rank's part of the reduced gradient. Shapes: half or FP32 (shard_numel,) per bucket."""
        for grad_shard, pieces in zip(grad_shards, self._pieces, strict=True):
            for piece in pieces:
                layer = self._layer_index[piece.name]
                for chunk in torch.split(grad_shard[piece.start : piece.start + piece.numel], _CHUNK):
                    count_exponents(chunk, self.exponents[layer])
                    self.zeros[layer] += chunk.numel() - chunk.count_nonzero()

    def watched(self, update: Update, bucket: int) -> Iterator[tuple[Run, Update]]:
        """A bucket's runs in smaller cuts, with an update that compares before and after.

        The update is the same bit for bit on any cut at a row, so what is compared need not be kept for a whole shard.
        """
        for piece in self._pieces[bucket]:
            compared = partial(self._compared, update, self._layer_index[piece.name])
            for start in range(piece.start, piece.end, _CHUNK):
                yield Run(self._groups[piece.name], start, min(start + _CHUNK, piece.end)), compared

    def _compared(self, update: Update, layer: int, *arguments: Any) -> None:
        _, master, _, half, *_ = arguments
        old_master, old_half = master.clone(), half.clone()
        update(*arguments)
        changed = master != old_master  # never in the padding: zeros stay zeros
        self.updates[layer, 0] += changed.sum()
        self.updates[layer, 1] += (changed & (half == old_half)).sum()


def count_exponents(values: Tensor, counts: Tensor) -> None:
    """Add to `counts` how many values have each biased exponent of FP32. Shapes: half or FP32 (n,), INT64 (256,).

    Neither bincount nor histc would do: the first waits for the device, the second takes five times as long on a CPU.
    """
    exponents = (values.float().view(torch.int32) >> 23) & (_EXPONENTS - 1)
    one = torch.ones((), dtype=torch.int64, device=values.device)
    counts.index_add_(0, exponents, one.expand(values.numel()))


def layer_of(param_name: str) -> str:
    """The layer a parameter belongs to: its name up to the first number, else without its last part.

    `blocks.0.attention.query.weight` -> `blocks.0`, `embedding.weight` -> `embedding`, `gain` -> `gain`.
    """
    parts = param_name.split(".")
    numbered = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: max(numbered, 0) + 1])


def layers_of(param_names: Sequence[str]) -> tuple[str, ...]:
    """The layers of these parameters, each once, in the order of their first parameters."""
    return tuple(dict.fromkeys(map(layer_of, param_names)))
