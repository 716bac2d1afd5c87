"""A step looked at closely: whose gradient is not finite, how small gradients are, which updates the half copy misses.

Only steps that were asked for it (`engine.examine_next_step()`) pay for these passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamix.mixed_precision.flat_layout import Piece, Run
from megamix.mixed_precision.fused_update import Cut, Update
from megamix.mixed_precision.step import Examination

# Elements, a multiple of ROW, on a CPU and on a GPU: the passes' own memory is a few of these, whatever a shard's size.
_CHUNK, _CHUNK_GPU = 1 << 20, 1 << 24

EXPONENT_BIAS = 127  # of FP32
_EXPONENTS = 256
_LANES = 1024  # of a GPU's counts


def new_examination(param_names: Sequence[str], micro_batches: int, device: torch.device) -> Examination:
    """Return the empty tables of one step. `param_names`: of the whole model, in registration order."""
    layers = layers_of(param_names)
    return Examination(
        tuple(param_names),
        layers,
        local=torch.zeros(micro_batches, len(param_names), 3, dtype=torch.float64, device=device),
        exponents=torch.zeros(len(layers), _EXPONENTS, dtype=torch.int64, device=device),
        zeros=torch.zeros(len(layers), dtype=torch.int64, device=device),
        updates=torch.zeros(len(layers), 2, dtype=torch.int64, device=device),
    )


def look(examination: Examination | None, micro_batch: int) -> Callable[[str, Tensor], None] | None:
    """Return what one micro-batch's ready hooks call with a parameter's name and gradient, as often as one comes; None
    where nothing is examined.
    """
    if examination is None:
        return None
    rows = dict(zip(examination.param_names, examination.local[micro_batch], strict=True))

    def look_at(name: str, grad: Tensor) -> None:
        inf, nan, max_abs = rows[name]
        for chunk in torch.split(grad.reshape(-1), _chunk(grad)):
            inf += chunk.isinf().sum()
            nan += chunk.isnan().sum()
            torch.maximum(max_abs, chunk.abs().amax(), out=max_abs)

    return look_at


def watch(
    examination: Examination, pieces: Sequence[Sequence[Piece]], grad_shards: Sequence[Tensor], update: Update
) -> list[list[Cut]]:
    """Count this rank's part of the reduced gradient; return each bucket's runs in smaller cuts, with an update that
    compares before and after.

    The update is the same bit for bit on any cut at a row, so what is compared need not be kept for a whole shard.
    `pieces`: of each bucket, those that this rank owns. Shapes: grad_shards half or FP32 (shard_numel,) per bucket.
    """
    cuts: list[list[Cut]] = []
    for own, grad_shard in zip(pieces, grad_shards, strict=True):
        cuts.append([])
        size = _chunk(grad_shard)
        for piece in own:
            layer = examination.layers.index(layer_of(piece.spec.name))
            for chunk in torch.split(grad_shard[piece.elements], size):
                count_exponents(chunk, examination.exponents[layer])
                examination.zeros[layer] += chunk.numel() - chunk.count_nonzero()
            compared = partial(_compare, update, examination.updates[layer])
            for start in range(piece.start, piece.end, size):
                cuts[-1].append((Run(piece.spec.group, start, min(start + size, piece.end)), compared))
    return cuts


def _chunk(tensor: Tensor) -> int:
    return _CHUNK if tensor.is_cpu else _CHUNK_GPU


def _compare(update: Update, counts: Tensor, *arguments: Any) -> None:
    _, master, _, half, *_ = arguments
    old_master = master.clone()
    update(*arguments)
    changed = master != old_master  # never in the padding: zeros stay zeros
    counts[0] += changed.sum()
    counts[1] += (changed & (half == old_master.to(half.dtype))).sum()


def count_exponents(values: Tensor, counts: Tensor) -> None:
    """Add to `counts` how many values have each biased exponent of FP32. Shapes: half or FP32 (n,), INT64 (256,).

    Neither bincount nor histc would do: the first waits for the device, the second takes five times as long on a CPU.
    """
    exponents = (values.float().view(torch.int32) >> 23) & (_EXPONENTS - 1)
    ones = torch.ones((), dtype=torch.int64, device=values.device).expand(values.numel())
    if values.is_cpu:
        counts.index_add_(0, exponents, ones)
        return
    # A gradient's exponents are about ten: so many threads would wait for each other at ten places. Each lane has its
    # own, and neighbours are of different lanes.
    lanes = torch.arange(values.numel(), dtype=torch.int32, device=values.device) % _LANES
    by_lane = counts.new_zeros(_LANES * _EXPONENTS).index_add_(0, exponents + _EXPONENTS * lanes, ones)
    counts += by_lane.view(_LANES, _EXPONENTS).sum(0)


def layer_of(param_name: str) -> str:
    """Return the layer a parameter belongs to: its name up to the first number, else without its last part.

    `blocks.0.attention.query.weight` -> `blocks.0`, `embedding.weight` -> `embedding`, `gain` -> `gain`.
    """
    parts = param_name.split(".")
    numbered = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: max(numbered, 0) + 1])


def layers_of(param_names: Sequence[str]) -> tuple[str, ...]:
    """Return the layers of these parameters, each once, in the order of their first parameters."""
    return tuple(dict.fromkeys(map(layer_of, param_names)))
