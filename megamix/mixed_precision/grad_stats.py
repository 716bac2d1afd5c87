"""One read of the reduced gradients and one agreement: is anything non-finite, and how long is the gradient of the
whole model?
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives
from megamix.mixed_precision.flat_layout import ROW

_CHUNK = 1 << 18  # elements per pass without a compiler: its FP32 copy (1 MiB) stays in cache


def shard_stats(grad_shard: Tensor) -> Tensor:
    """[sum of squares, max abs] of one shard, in one pass.

    FP32 within a row of 64 elements, FP64 over rows: an FP32 sum would depend on where the shard is cut, and with it
    the clip coefficient of every rank. A row of FP16 cannot overflow FP32, so the sum is finite exactly if the
    gradient is; in BF16 and FP32 a gradient beyond about 1e19 counts as an overflow too.
    Shapes: grad_shard half or FP32 (rows * 64,) -> FP64 (2,).
    """
    rows = grad_shard.view(-1, ROW).float()
    sums, peaks = rows.square().sum(1), rows.abs().amax(1)
    return torch.stack([sums.double().sum(), peaks.amax().double()])


def chunked_shard_stats(grad_shard: Tensor) -> Tensor:
    """`shard_stats` for machines without a compiler, where each operation is a pass of its own: in pieces that stay
    in cache.
    """
    parts = torch.stack([shard_stats(chunk) for chunk in torch.split(grad_shard, _CHUNK)])
    return torch.stack([parts[:, 0].sum(), parts[:, 1].amax()])


@dataclass(frozen=True, slots=True)
class GradStats:
    """What every rank knows of this step's gradients, all of it still on the device."""

    by_rank: Tensor  # FP64 (dp_size, 2): each rank's sum of squares and max abs, times the divisor of the sums
    sum_of_squares: Tensor  # FP64 (): of the same table by the same operation, so equal on every rank
    max_abs: Tensor  # FP64 ()
    found_inf: Tensor  # bool ()


def agree(stats: list[Tensor], collectives: Collectives) -> GradStats:
    """The model's statistics from each rank's per-bucket ones. Shapes: FP64 (2,) each."""
    own = torch.stack(stats)
    by_rank = collectives.table(torch.stack([own[:, 0].sum(), own[:, 1].amax()]))
    sum_of_squares = by_rank[:, 0].sum()
    return GradStats(by_rank, sum_of_squares, by_rank[:, 1].amax(), ~torch.isfinite(sum_of_squares))


def clip_coefficient(grad_norm: Tensor, clip_grad: float) -> Tensor:
    """min(1, clip_grad / (norm + 1e-6)) as everybody's clip_grad_norm_ has it; 1 where clip_grad is 0."""
    if clip_grad == 0:
        return torch.ones_like(grad_norm)
    return (clip_grad / (grad_norm + 1e-6)).clamp(max=1.0)
