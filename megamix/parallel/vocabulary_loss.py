"""Cross entropy of logits that are divided over the vocabulary: no rank ever holds them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamix.comm.collectives import Collectives
from megamix.model.cross_entropy import IGNORE, PART
from megamix.model.wide import apply, row_slices


def chunks(logits: Tensor) -> Iterator[slice]:
    """Rows to widen at a time, of logits (N, columns)."""
    return row_slices(len(logits), logits.shape[1], PART[logits.device.type])


class VocabularyLoss:
    """`cross_entropy` of all ranks' columns, the same on each. `tp`: among them; each has an equal part, in rank order.

    Three FP32 numbers of each token travel: the largest logit here, the sum of exponentials below it, and the target's
    logit on the rank that has it.
    """

    def __init__(self, tp: Collectives):
        self._tp = tp

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Shapes: logits (..., vocab_size / tp_size), targets INT64 (...) -> FP32 ()."""
        return apply(_VocabularyCrossEntropy, logits.flatten(0, -2), targets.flatten(), self._tp)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """logits (N, columns) in any dtype, targets INT64 (N,) -> FP32 (); keeps them and FP32 logsumexp (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: Collectives) -> Tensor:
        column = targets - tp.axis.rank * logits.shape[1]
        here = (column >= 0) & (column < logits.shape[1])
        column = column.masked_fill_(~here, 0).unsqueeze(1)
        own = torch.empty(3, len(targets), dtype=torch.float32, device=logits.device)  # peak, sum below it, target
        for rows in chunks(logits):
            own[0, rows] = logits[rows].amax(1)
            own[1, rows] = (logits[rows] - own[0, rows].unsqueeze(1)).exp_().sum(1)  # half - FP32 is FP32
            own[2, rows] = logits[rows].gather(1, column[rows]).squeeze(1)
        own[2].masked_fill_(~here, 0)
        peaks, sums, target_logits = tp.gather(own.view(-1)).view(tp.axis.size, *own.shape).unbind(1)
        peak = peaks.amax(0)
        logsumexp = (sums * (peaks - peak).exp()).sum(0).log().add_(peak)
        ctx.save_for_backward(logits, column, here, targets == IGNORE, logsumexp)
        return (logsumexp - target_logits.sum(0)).masked_fill_(targets == IGNORE, 0).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, column, here, ignored, logsumexp = ctx.saved_tensors
        grad_logits, grad_row = torch.empty_like(logits), grad / len(column)
        for rows in chunks(logits):
            chunk = (logits[rows] - logsumexp[rows].unsqueeze(1)).exp_()
            chunk.scatter_add_(1, column[rows], -here[rows].unsqueeze(1).float()).mul_(grad_row)
            # The one rounding; `grad` carries the loss scale.
            grad_logits[rows] = chunk.masked_fill_(ignored[rows].unsqueeze(1), 0)
        return grad_logits, None, None
