"""The ranks' agreement on the gradient: whether it is finite, which parameter is not, and the norm of the
whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megamix.comm.collectives import Collectives, noting
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.step import Recorded, StepProgress
from megamix.mixed_precision.update_slice import Frozen, StepScalars


def stats_by_piece(buckets: Sequence[Bucket], rows: Sequence[Tensor], counts: bool, frozen: Frozen) -> Tensor:
    """Add up the statistics of rows by parameter.

    The statistics have two numbers for each row of 64 elements. So every step learns which parameter is not finite and
    how large each gradient is, without another pass over the gradient.
    `rows`: the `row_stats` of each bucket. `counts`: False if another rank reports the same sums. `frozen`: gradients
    that count neither in the norm nor as an overflow, as in torch with `p.grad = None`. Return FP64 (2, pieces): the
    sum of squares and max abs of each piece that this rank owns, bucket after bucket.
    """
    if rows[0].is_cpu:
        total, peaks = _on_cpu(buckets, rows)
    else:  # on a GPU segment_reduce would be a launch per bucket, with one block of threads per piece
        total = torch.stack(torch._foreach_norm(_by_piece(buckets, rows, 0), 1, dtype=torch.float64))
        peaks = torch.stack(torch._foreach_max(_by_piece(buckets, rows, 1)))
    by_piece = torch.stack([total if counts else torch.zeros_like(total), peaks.double()])
    if frozen:
        never = by_piece.new_zeros((), dtype=torch.bool)
        of_pieces = [frozen.get(piece.spec.group, never) for bucket in buckets for piece in bucket.pieces]
        by_piece = by_piece.masked_fill(torch.stack(of_pieces), 0.0)
    return by_piece


def peak_rows(buckets: Sequence[Bucket], rows: Sequence[Tensor]) -> Tensor:
    """Return where the largest element of each piece of experts' matrices lies, so that an overflow has an expert:
    INT64 (2, pieces of experts), the first and the last row within the piece that reach it. NaN is the largest.
    `rows`: the `row_stats` of each bucket.
    """
    found = [
        torch.stack([peaks.argmax(), len(peaks) - 1 - peaks.flip(0).argmax()])
        for bucket, (_, largest) in zip(buckets, rows, strict=True)
        for piece, peaks in zip(bucket.pieces, torch.split(largest, bucket.piece_rows), strict=True)
        if piece.spec.is_of_experts
    ]
    return torch.stack(found, 1) if found else torch.zeros(2, 0, dtype=torch.int64, device=rows[0].device)


def _on_cpu(buckets: Sequence[Bucket], rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return each piece's sum, FP64, and its maximum, with one call per bucket.

    For 580 pieces, one call per piece takes 2.6 ms and one call per bucket 0.03 ms: a call costs hundreds of times as
    much as the data of a small piece. All of these operations keep NaN.
    """
    sums = []
    peaks = []
    for bucket, (squares, largest) in zip(buckets, rows, strict=True):
        borders = bucket.row_borders
        sums.append(torch.segment_reduce(squares.double(), "sum", offsets=borders, unsafe=True))
        # Not segment_reduce, whose maximum takes 40 times as long.
        peaks.append(torch.from_numpy(np.maximum.reduceat(np.from_dlpack(largest), bucket.piece_starts)))
    return torch.cat(sums), torch.cat(peaks)


def _by_piece(buckets: Sequence[Bucket], rows: Sequence[Tensor], kind: int) -> list[Tensor]:
    both = zip(buckets, rows, strict=True)
    return [piece for bucket, of_bucket in both for piece in torch.split(of_bucket[kind], bucket.piece_rows)]


@dataclass(frozen=True, slots=True)
class GradStats:
    """Holds what every rank knows of this step's gradients, all of it still on the device."""

    # Every rank computes these from the same table by the same operation, so they are equal on every rank.
    sum_of_squares: Tensor  # FP64 (): of the summed gradient, loss scale included
    max_abs: Tensor  # FP64 (): of the summed gradient, loss scale included
    loss_sum: Tensor  # FP64 (): over ranks and micro-batches, without the loss scale
    weight_sum: Tensor  # FP64 (): over ranks and micro-batches; 1 in place of 0 (then loss and gradients are 0)
    found_inf: Tensor  # bool (): some gradient is not finite
    stop_requested: Tensor  # FP64 (): the largest of all ranks' requests
    lr: Tensor  # FP32 (): learning rate of the first rank, used by all ranks
    recorded: Recorded  # this rank's values, and the number of all ranks' values
    unseen_writes: Tensor  # FP64 (ranks,): each rank's `UnseenWrites.found`


def agree(
    by_piece: Tensor,
    progress: StepProgress,
    stop_request: Tensor,
    lr: Tensor,
    unseen_write: Tensor,
    collectives: Collectives,
) -> GradStats:
    """Return the statistics of the whole model, from those of each rank.

    Shapes: by_piece FP64 (2, pieces), stop_request FP64 (), lr FP32 (), unseen_write FP64 ().
    """
    sums = (by_piece[0].sum(), by_piece[1].amax(), progress.loss_sum, progress.weight_sum)
    recorded = progress.recorded()
    row = torch.stack([*sums, stop_request, lr, recorded.num_values, unseen_write])  # all of them FP64
    with noting("while the ranks agreed on a step: every rank must call step() as often"):
        by_rank = collectives.table(row)  # FP64 (ranks, 8)
    largest = by_rank.amax(0)
    sum_of_squares, weight_sum = by_rank[:, 0].sum(), by_rank[:, 3].sum()
    # A quotient of zeros would be NaN and would make every weight NaN.
    weight_sum = weight_sum.masked_fill(weight_sum == 0, 1.0)
    return GradStats(
        sum_of_squares, largest[1], by_rank[:, 2].sum(), weight_sum,
        ~torch.isfinite(sum_of_squares), largest[4], by_rank[0, 5].float(),
        recorded._replace(num_values=by_rank[:, 6].sum()), by_rank[:, 7],
    )  # fmt: skip


def decide(stats: GradStats, scale_used: Tensor, clip_grad: float, number: Tensor) -> tuple[StepScalars, Tensor]:
    """Return the update's scalars, and the norm of the averaged, unscaled gradient (FP64 ()).

    `number` INT64 (): the number of the update, 1 for the first. `scale_used` FP32 (): the loss scale of the step's
    backward.
    """
    divisor = scale_used.double() * stats.weight_sum
    grad_norm = stats.sum_of_squares.sqrt() / divisor
    multiplier = (clip_coefficient(grad_norm, clip_grad) / divisor).float()
    return StepScalars(multiplier, stats.found_inf, stats.lr, number.float()), grad_norm


def clip_coefficient(grad_norm: Tensor, clip_grad: float) -> Tensor:
    """Return min(1, clip_grad / (norm + 1e-6)), as torch's clip_grad_norm_ does; 1 if clip_grad is 0."""
    if clip_grad == 0:
        return torch.ones_like(grad_norm)
    return (clip_grad / (grad_norm + 1e-6)).clamp(max=1.0)
