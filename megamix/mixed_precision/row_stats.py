"""Row statistics of a sum of gradients: each row's sum of squares and max abs, taken in one read or while the sum is
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megamix.base import constants
from megamix.comm.collectives import sum_in_rank_order
from megamix.mixed_precision.flat_layout import ROW


@dataclass(frozen=True, slots=True)
class RowStats:
    """Holds the two ways of taking the `row_stats` of a shard, FP32 (2, rows): in one read of the shard, or while it is
    summed.
    """

    of_shard: Callable[[Tensor], Tensor]
    # Arguments: the owners' half parts (ranks, shard_numel), and the FP32 shard (shard_numel,) that receives their sum
    # in rank order.
    of_sum: Callable[[Tensor, Tensor], Tensor]


def row_stats(grad_shard: Tensor) -> Tensor:
    """Return [sum of squares, max abs] of every row of 64 elements, in one pass over a shard.

    Sums are FP32 within a row and FP64 over rows (see `stats_by_piece`). An FP32 sum over rows would depend on where
    the shard is cut, and so would the clip coefficient of every rank. A row of FP16 cannot overflow FP32, so the sum is
    finite exactly if the gradient is; in BF16 and FP32 a gradient beyond about 1e19 counts as an overflow, too.
    Shapes: grad_shard half or FP32 (rows * 64,) -> FP32 (2, rows).
    """
    return _stats_of_rows(grad_shard.view(-1, ROW).float())


def _stats_of_rows(rows: Tensor) -> Tensor:
    return torch.stack([rows.square().sum(1), rows.abs().amax(1)])


def chunked_row_stats(grad_shard: Tensor) -> Tensor:
    """Return the statistics of `row_stats` with its uncompiled bits, for machines without a compiler.

    There each operation is a pass of its own, so all of them work in place, in one buffer that stays in a CPU's cache.
    """
    size = constants.chunk(constants.STATS_CHUNK, grad_shard.numel(), on_gpu=not grad_shard.is_cpu) // ROW
    rows = grad_shard.view(-1, ROW)
    stats = torch.empty(2, len(rows), dtype=torch.float32, device=rows.device)
    buffer = torch.empty(size, ROW, dtype=torch.float32, device=rows.device)
    for chunk, squares, peaks in zip(*(torch.split(one, size) for one in (rows, *stats)), strict=True):
        wide = buffer[: len(chunk)].copy_(chunk).abs_()
        # The bits of non-negative floats, read as integers, have the floats' order, NaN last. Integers compare twice as
        # fast.
        torch.amax(wide.view(torch.int32), 1, out=peaks.view(torch.int32))
        torch.sum(wide.square_(), 1, out=squares)
    return stats


def sum_in_chunks(of_shard: Callable[[Tensor], Tensor], parts: Tensor, grad_shard: Tensor) -> Tensor:
    """Sum half parts into the FP32 shard, chunk by chunk; return the row statistics.

    Each chunk's statistics are taken while the chunk is in a CPU's cache, which saves a pass of their own.
    """
    size = constants.chunk(constants.SUMMED_CHUNK, grad_shard.numel(), on_gpu=not grad_shard.is_cpu)
    rows = []
    for chunk, chunk_parts in zip(torch.split(grad_shard, size), torch.split(parts, size, dim=1), strict=True):
        sum_in_rank_order(chunk_parts, chunk)
        rows.append(of_shard(chunk))
    return torch.cat(rows, dim=1)


def sum_at_once(parts: Tensor, grad_shard: Tensor) -> Tensor:
    """Do the same as `sum_in_chunks`, with the same bits of the sum, as one pass for a GPU's compiler.

    Compiled, it moves 2 bytes of each part and 4 of the sum per element. Uncompiled, the sum is read and written once
    per rank.
    Shapes: parts half (ranks, rows, 64), grad_shard FP32 (rows, 64) -> FP32 (2, rows).
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    grad_shard.copy_(total)
    return _stats_of_rows(total)
