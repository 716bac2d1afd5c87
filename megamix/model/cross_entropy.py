"""Cross entropy on FP32 logits, holding the logits in their own dtype and nothing else of their size."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamix.model.wide import apply, row_slices

# Logits widened at a time. On a CPU 2 MB of FP32 stay in cache (half as fast when all are widened at once); a GPU needs
# more of them to be busy.
CPU_CHUNK = 2**19
GPU_CHUNK = 2**26

IGNORE = -100  # a target that is in no loss; torch's own sign


class CrossEntropy(torch.autograd.Function):
    """logits (N, vocab) in any dtype, targets INT64 (N,) -> FP32 (), the sum over the targets that count, over N.

    Backward computes the softmax a second time: keeping it would take an FP32 tensor of the logits' size from forward
    to backward, and torch's own form makes two more of them.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        log_likelihood = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        for rows in chunks(logits):
            chunk = logits[rows].float().log_softmax(1)
            log_likelihood[rows] = chunk.gather(1, _countable(targets[rows])).squeeze(1)
        return -log_likelihood.masked_fill_(targets == IGNORE, 0).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        grad_logits, grad_row = torch.empty_like(logits), grad / len(targets)
        for rows in chunks(logits):
            chunk, target = logits[rows].float().softmax(1), _countable(targets[rows])
            chunk.scatter_(1, target, chunk.gather(1, target).sub_(1)).mul_(grad_row)
            # The one rounding; `grad` carries the loss scale.
            grad_logits[rows] = chunk.masked_fill_((targets[rows] == IGNORE).unsqueeze(1), 0)
        return grad_logits, None


def _countable(targets: Tensor) -> Tensor:
    """As a column that may index, with any class in place of IGNORE."""
    return targets.masked_fill(targets == IGNORE, 0).unsqueeze(1)


def chunks(logits: Tensor) -> Iterator[slice]:
    """Rows to widen at a time, of logits (N, columns)."""
    num_rows, vocab_size = logits.shape
    return row_slices(num_rows, vocab_size, CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods of all targets but IGNORE, over the number of all: the mean if none is.

    Shapes: logits (..., vocab), targets INT64 (...) -> FP32 ().
    """
    return apply(CrossEntropy, logits.flatten(0, -2), targets.flatten())


def plain_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The same for torch.compile, which fuses it; run eagerly it makes three FP32 copies of the logits."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum") / targets.numel()
