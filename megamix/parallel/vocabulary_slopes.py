"""The loss of logits that are divided over the vocabulary: no rank ever has all of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives
from megamix.data.loader import IGNORE
from megamix.model.cross_entropy import SLOPE_SCALE


class VocabularySlopes:
    """`megamix.model.cross_entropy.slopes` where a rank has some columns: log-likelihoods of all logits, the same on
    every rank, and the slopes by its own. `tp`: the ranks, each with an equal part of the columns, in order.

    Three FP32 numbers of each row travel: the largest logit here, the sum of exponentials relative to it, and the
    target's logit from the rank that has it.
    """

    def __init__(self, tp: Collectives):
        self._tp = tp

    def __call__(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: logits FP32 (rows, columns), targets INT64 (rows,) -> FP32 (rows,), FP32 (rows, columns)."""
        column = (targets - self._tp.axis.rank * logits.shape[1]).unsqueeze(1)
        here = (column >= 0) & (column < logits.shape[1])
        column = column.where(here, 0)
        peak = logits.amax(1, keepdim=True)
        own = torch.cat([peak, (logits - peak).exp_().sum(1, keepdim=True), logits.gather(1, column).where(here, 0)], 1)
        peaks, sums, target_logits = self._tp.gather(own.view(-1)).view(self._tp.axis.size, *own.shape).unbind(2)
        highest = peaks.amax(0)
        logsumexp = (sums * (peaks - highest).exp()).sum(0).log().add_(highest)
        counts = targets != IGNORE
        share = (logits - logsumexp.unsqueeze(1)).exp_()
        share.scatter_add_(1, column, -here.to(share.dtype))
        return (target_logits.sum(0) - logsumexp).where(counts, 0), share.mul_(counts.unsqueeze(1) * SLOPE_SCALE)
