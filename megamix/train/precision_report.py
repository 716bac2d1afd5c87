"""What an examined step says of FP16's range, layer by layer, once the ranks' counts are added up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megamix.mixed_precision.culprits import headroom, peaks_by_param
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.examination import EXPONENT_BIAS, layer_of
from megamix.mixed_precision.step import Examination
from megamix.train.metrics import FIRST_EXPONENT, LAST_EXPONENT, LayerPrecision

_LIMITS = (-14, -24)  # exponents of FP16: of its smallest normal number, and of its smallest at all


def gather_precision(
    engine: ShardedEngine, examination: Examination, by_piece: Tensor, loss_scale: float
) -> dict[str, LayerPrecision]:
    """Layer -> what an examined step says of it. Every rank must call it, between steps: one small collective.

    `by_piece` and `loss_scale` are the same step's; 1.0 where there is no scale. Waits for the device.
    """
    peaks = peaks_by_param(by_piece.cpu(), engine.piece_stats.pieces, engine.param_names)
    mine = count_layers(examination, peaks[:, 1], loss_scale)
    table = engine.collectives.table(mine.flatten().to(examination.zeros.device))
    return merge_layers(table.cpu().view(-1, *mine.shape), examination.layers)


def count_layers(examination: Examination, max_abs: Tensor, loss_scale: float) -> Tensor:
    """One rank's counts: FP64 (layers, 8 counts + histogram + max abs), see `merge_layers`.

    The scale is a power of two, so that what an element would be without it is a shift of its exponent, and every
    threshold a border of two bins. Shapes: max_abs FP64 (params,), of the gradient with the scale in it.
    """
    counted, zeros, updates = (
        tensor.cpu() for tensor in (examination.exponents, examination.zeros, examination.updates)
    )
    nonzero = counted[:, :-1].clone()  # without inf and NaN
    nonzero[:, 0] -= zeros
    scaled = torch.arange(nonzero.shape[1]) - EXPONENT_BIAS
    unscaled = scaled - int(math.log2(loss_scale))
    small = [nonzero[:, exponents < limit].sum(1) for exponents in (scaled, unscaled) for limit in _LIMITS]
    histogram = torch.zeros(len(zeros), LAST_EXPONENT - FIRST_EXPONENT + 1, dtype=torch.int64)
    histogram.index_add_(1, unscaled.clamp(FIRST_EXPONENT, LAST_EXPONENT) - FIRST_EXPONENT, nonzero)
    peaks = torch.zeros(len(zeros), dtype=torch.float64)
    for name, peak in zip(examination.param_names, max_abs, strict=True):
        layer = examination.layers.index(layer_of(name))
        peaks[layer] = torch.maximum(peaks[layer], peak)  # keeps NaN
    counts = torch.stack([counted.sum(1), zeros, *small, *updates.T], dim=1)
    return torch.cat([counts.double(), histogram.double(), peaks[:, None]], dim=1)


def merge_layers(by_rank: Tensor, layers: tuple[str, ...]) -> dict[str, LayerPrecision]:
    """All ranks' `count_layers` as one. Shapes: FP64 (ranks, layers, columns)."""
    totals, peaks = by_rank[..., :-1].sum(0).tolist(), by_rank[..., -1].amax(0).tolist()
    return {layer: _layer(total, peak) for layer, total, peak in zip(layers, totals, peaks, strict=True)}


def _layer(counts: list[float], max_abs: float) -> LayerPrecision:
    elements, zeros, subnormal, below, unscaled_subnormal, unscaled_below, updated, hidden, *histogram = counts
    return LayerPrecision(
        zero_share=zeros / elements,
        subnormal_share=subnormal / elements,
        below_share=below / elements,
        unscaled_subnormal_share=unscaled_subnormal / elements,
        unscaled_below_share=unscaled_below / elements,
        headroom=headroom(max_abs),
        hidden_update_share=hidden / updated if updated else None,
        exponents=tuple(map(int, histogram)),
    )
