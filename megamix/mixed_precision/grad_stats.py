"""One read of the reduced gradients and one agreement: is anything non-finite, where, and how long is the gradient of
the whole model?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamix import tuned
from megamix.comm.collectives import Collectives, noting, sum_in_rank_order
from megamix.mixed_precision.flat_layout import ROW, FlatLayout, Piece
from megamix.mixed_precision.step import Recorded, StepUnderWay


def row_stats(grad_shard: Tensor) -> Tensor:
    """Return [sum of squares, max abs] of every row of 64 elements, in one pass over a shard.

    FP32 within a row, FP64 over rows (see PieceStats): an FP32 sum would depend on where the shard is cut, and with it
    the clip coefficient of every rank. A row of FP16 cannot overflow FP32, so the sum is finite exactly if the
    gradient is; in BF16 and FP32 a gradient beyond about 1e19 counts as an overflow too.
    Shapes: grad_shard half or FP32 (rows * 64,) -> FP32 (2, rows).
    """
    return _stats_of_rows(grad_shard.view(-1, ROW).float())


def _stats_of_rows(rows: Tensor) -> Tensor:
    return torch.stack([rows.square().sum(1), rows.abs().amax(1)])


def chunked_row_stats(grad_shard: Tensor) -> Tensor:
    """Do what `row_stats` does on machines without a compiler, where each operation is a pass of its own: in chunks
    that stay in a CPU's cache.
    """
    size = tuned.piece(tuned.STATS_PIECE, grad_shard.numel(), on_gpu=not grad_shard.is_cpu)
    return torch.cat([row_stats(chunk) for chunk in torch.split(grad_shard, size)], dim=1)


def sum_in_pieces(of_shard: Callable[[Tensor], Tensor], parts: Tensor, grad_shard: Tensor) -> Tensor:
    """Sum half parts into the FP32 shard, and take the statistics of each piece while it is in a CPU's cache, instead
    of in a pass of their own.
    """
    size = tuned.piece(tuned.SUMMED_PIECE, grad_shard.numel(), on_gpu=not grad_shard.is_cpu)
    rows = []
    for piece, piece_parts in zip(torch.split(grad_shard, size), torch.split(parts, size, dim=1), strict=True):
        sum_in_rank_order(piece_parts, piece)
        rows.append(of_shard(piece))
    return torch.cat(rows, dim=1)


def sum_at_once(parts: Tensor, grad_shard: Tensor) -> Tensor:
    """Do the same, with the same bits of the sum, for a GPU's compiler to make one pass of it: 2 bytes of each part and
    4 of the sum an element, where uncompiled the sum is read and written for every rank.

    Shapes: parts half (ranks, rows, 64), grad_shard FP32 (rows, 64) -> FP32 (2, rows).
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    grad_shard.copy_(total)
    return _stats_of_rows(total)


class PieceStats:
    """Adds up rows by parameter: 1/64 of the data, so that every step knows which parameter is not finite, and how
    large each one's gradient is, without another pass over the gradient.

    `pieces`: the parts of parameters that this rank owns, bucket after bucket; `by_bucket` the same, bucket by bucket.
    """

    def __init__(self, layout: FlatLayout, shards: Sequence[int], device: torch.device, counts: bool):
        """`shards`: which one of each bucket is this rank's. `counts`: False where another rank tells the same sums."""
        self._counts = counts
        self.by_bucket = [bucket.shard_pieces(shard) for bucket, shard in zip(layout.buckets, shards, strict=True)]
        self.pieces: list[Piece] = [piece for pieces in self.by_bucket for piece in pieces]
        self._row_counts = [[(piece.end - piece.start) // ROW for piece in pieces] for pieces in self.by_bucket]
        self.row_borders = [
            torch.tensor([0, *(piece.end // ROW for piece in pieces)], device=device) for pieces in self.by_bucket
        ]

    def __call__(self, rows: list[Tensor]) -> Tensor:
        """Shapes: rows FP32 (2, rows) per bucket -> FP64 (2, pieces): each piece's sum of squares and max abs."""
        if rows[0].is_cpu:
            sums = [
                torch.segment_reduce(bucket_rows[0].double(), "sum", offsets=borders, unsafe=True)
                for bucket_rows, borders in zip(rows, self.row_borders, strict=True)
            ]
            total = torch.cat(sums)
        else:  # where segment_reduce is a launch for each bucket, with one block of threads for a piece
            total = torch.stack(torch._foreach_norm(self._by_piece(rows, 0), 1, dtype=torch.float64))
        # Not segment_reduce: its maximum takes ten times as long on a CPU. All of these keep NaN.
        peaks = torch._foreach_max(self._by_piece(rows, 1))
        return torch.stack([total if self._counts else torch.zeros_like(total), torch.stack(peaks).double()])

    def _by_piece(self, rows: list[Tensor], kind: int) -> list[Tensor]:
        counted = zip(rows, self._row_counts, strict=True)
        return [piece for bucket_rows, counts in counted for piece in torch.split(bucket_rows[kind], counts)]


@dataclass(frozen=True, slots=True)
class GradStats:
    """What every rank knows of this step's gradients, all of it still on the device."""

    # Of the ranks' one table by the same operation, so equal on every rank.
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
    by_piece: Tensor, under_way: StepUnderWay, stop_request: Tensor, lr: Tensor, unseen_write: Tensor,
    collectives: Collectives,
) -> GradStats:  # fmt: skip
    """Return the model's statistics, from each rank's own.

    Shapes: by_piece FP64 (2, pieces), stop_request FP64 (), lr FP32 (), unseen_write FP64 ().
    """
    sums = (by_piece[0].sum(), by_piece[1].amax(), under_way.loss_sum.double(), under_way.weight_sum)
    recorded = under_way.recorded()
    row = torch.stack([*sums, stop_request, lr.double(), recorded.num_values, unseen_write])
    with noting("while the ranks agreed on a step: every rank must call step() as often"):
        by_rank = collectives.table(row)  # FP64 (ranks, 8)
    sum_of_squares, weight_sum = by_rank[:, 0].sum(), by_rank[:, 3].sum()
    # A quotient of zeros would be NaN, and with it every weight.
    weight_sum = weight_sum.masked_fill(weight_sum == 0, 1.0)
    return GradStats(
        sum_of_squares, by_rank[:, 1].amax(), by_rank[:, 2].sum(), weight_sum,
        ~torch.isfinite(sum_of_squares), by_rank[:, 4].amax(), by_rank[0, 5].float(),
        recorded._replace(num_values=by_rank[:, 6].sum()), by_rank[:, 7],
    )  # fmt: skip


def clip_coefficient(grad_norm: Tensor, clip_grad: float) -> Tensor:
    """Return min(1, clip_grad / (norm + 1e-6)) as everybody's clip_grad_norm_ has it; 1 where clip_grad is 0."""
    if clip_grad == 0:
        return torch.ones_like(grad_norm)
    return (clip_grad / (grad_norm + 1e-6)).clamp(max=1.0)
