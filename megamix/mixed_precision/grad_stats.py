"""One agreement on the gradient: is anything not finite, where, and how long is that of the whole model?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megamix.comm.collectives import Collectives, noting
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.optimizers import Optimizer
from megamix.mixed_precision.row_stats import RowStats
from megamix.mixed_precision.step import Recorded, StepProgress
from megamix.mixed_precision.update_slice import StepScalars


def stats_by_piece(buckets: Sequence[Bucket], row_stats: RowStats, counts: bool) -> Tensor:
    """Add up rows by parameter: 1/64 of the data, so that every step knows which parameter is not finite, and how large
    each one's gradient is, without another pass over the gradient.

    `counts`: False where another rank tells the same sums.
    Return FP64 (2, pieces): the sum of squares and max abs of each piece that this rank owns, bucket after bucket.
    """
    rows = [bucket.row_stats(row_stats) for bucket in buckets]
    if rows[0].is_cpu:
        total, peaks = _on_cpu(buckets, rows)
    else:  # where segment_reduce is a launch for each bucket, with one block of threads for a piece
        total = torch.stack(torch._foreach_norm(_by_piece(buckets, rows, 0), 1, dtype=torch.float64))
        peaks = torch.stack(torch._foreach_max(_by_piece(buckets, rows, 1)))
    return torch.stack([total if counts else torch.zeros_like(total), peaks.double()])


def _on_cpu(buckets: Sequence[Bucket], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return each piece's sum, FP64, and its largest. By a call for each bucket: of a small piece a call costs hundreds
    of times its data, 2.6 ms for 580 pieces where this takes 0.03. All of these keep NaN.
    """
    sums = []
    peaks = []
    for bucket, (squares, largest) in zip(buckets, rows, strict=True):
        borders = bucket.row_borders
        sums.append(torch.segment_reduce(squares.double(), "sum", offsets=borders, unsafe=True))
        # Not segment_reduce: its maximum takes 40 times as long.
        peaks.append(torch.from_numpy(np.maximum.reduceat(np.from_dlpack(largest), bucket.piece_starts)))
    return torch.cat(sums), torch.cat(peaks)


def _by_piece(buckets: Sequence[Bucket], rows: Sequence[Tensor], kind: int) -> list[Tensor]:
    both = zip(buckets, rows, strict=True)
    return [piece for bucket, of_bucket in both for piece in torch.split(of_bucket[kind], bucket.piece_rows)]


@dataclass(frozen=True, slots=True)
class GradStats:
    """Holds what every rank knows of this step's gradients, all of it still on the device."""

    # Taken from the ranks' one table by the same operation, so equal on every rank.
    sum_of_squares: Tensor  # FP64 (): of the summed gradient, with the scale
    max_abs: Tensor  # FP64 (): likewise
    loss_sum: Tensor  # FP64 (): over ranks and micro-batches, without the scale
    weight_sum: Tensor  # FP64 (): likewise; 1 where it is 0, and the loss and every gradient too
    found_inf: Tensor  # bool ()
    stop_requested: Tensor  # FP64 (): the largest of the ranks' requests
    lr: Tensor  # FP32 (): the first rank's, so that no two parts of the model can be updated with different ones
    recorded: Recorded  # by this rank, and how many values by all
    unseen_writes: Tensor  # FP64 (ranks,): each one's `UnseenWrites.found`


def agree(
    by_piece: Tensor, progress: StepProgress, stop_request: Tensor, lr: Tensor, unseen_write: Tensor,
    collectives: Collectives,
) -> GradStats:  # fmt: skip
    """Return the model's statistics, from each rank's own.

    Shapes: by_piece FP64 (2, pieces), stop_request FP64 (), lr FP32 (), unseen_write FP64 ().
    """
    sums = (by_piece[0].sum(), by_piece[1].amax(), progress.loss_sum, progress.weight_sum)
    recorded = progress.recorded()
    row = torch.stack([*sums, stop_request, lr, recorded.num_values, unseen_write])  # all of them FP64
    with noting("while the ranks agreed on a step: every rank must call step() as often"):
        by_rank = collectives.table(row)  # FP64 (ranks, 8)
    largest = by_rank.amax(0)
    sum_of_squares, weight_sum = by_rank[:, 0].sum(), by_rank[:, 3].sum()
    # A quotient of zeros would be NaN, and with it every weight.
    weight_sum = weight_sum.masked_fill(weight_sum == 0, 1.0)
    return GradStats(
        sum_of_squares, largest[1], by_rank[:, 2].sum(), weight_sum,
        ~torch.isfinite(sum_of_squares), largest[4], by_rank[0, 5].float(),
        recorded._replace(num_values=by_rank[:, 6].sum()), by_rank[:, 7],
    )  # fmt: skip


def decide(
    stats: GradStats, scale_used: Tensor, clip_grad: float, optimizer: Optimizer, number: Tensor
) -> tuple[StepScalars, Tensor]:
    """Return what the update with this number (INT64 ()) is told, and the norm of the averaged, unscaled gradient
    (FP64 ()). `scale_used` FP32 (): the loss scale of the step's backward.
    """
    divisor = scale_used.double() * stats.weight_sum
    grad_norm = stats.sum_of_squares.sqrt() / divisor
    multiplier = (clip_coefficient(grad_norm, clip_grad) / divisor).float()
    coefficients = optimizer.coefficients(number.double())
    return StepScalars(multiplier, stats.found_inf, stats.lr, number.float(), coefficients), grad_norm


def clip_coefficient(grad_norm: Tensor, clip_grad: float) -> Tensor:
    """Return min(1, clip_grad / (norm + 1e-6)) as everybody's clip_grad_norm_ has it; 1 where clip_grad is 0."""
    if clip_grad == 0:
        return torch.ones_like(grad_norm)
    return (clip_grad / (grad_norm + 1e-6)).clamp(max=1.0)
