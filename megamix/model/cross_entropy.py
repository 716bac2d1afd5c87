"""Head and loss in one function: cross entropy in FP32 from hidden states, with a few rows of logits at a time.

Full logits are the largest tensor of a step by far (vocab_size / hidden_size times the residual stream), and their
gradient is as large again. This function never holds either.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamix.base import constants
from megamix.base.machine import native_halves
from megamix.data.loader import IGNORE
from megamix.model import wide
from megamix.model.wide import apply

# Slopes lie in [-1, 1]. The slopes of rare tokens are near 1 / vocab_size, where FP16 has few digits left. So slopes
# are multiplied by a power of two, which is exact and cannot overflow (2**15 < 65504), and divided by it again in FP32.
SLOPE_SCALE = 2.0**15

Slopes = Callable[..., Tensor]  # `slopes`, or a form of it that is compiled or divided over ranks


def slopes(logits: Tensor, targets: Tensor, slope: Tensor, *, z_loss: float = 0.0) -> Tensor:
    """Return the log-likelihood of each target. Into `slope` write the derivative of the loss by each logit, times
    SLOPE_SCALE. `slope` may be the same tensor as `logits`. `z_loss`: factor of logsumexp(logits)^2 in the
    loss (Chowdhery et al. 2022, PaLM, section 5).

    Shapes: logits FP32 (rows, vocab), targets INT64 (rows,), slope half or FP32 (rows, vocab) -> FP32 (rows,).
    """
    counts = (targets != IGNORE).unsqueeze(1)
    target = targets.unsqueeze(1).where(counts, 0)
    log_share = logits.log_softmax(1)
    log_likelihood = log_share.gather(1, target).where(counts, 0).squeeze(1)
    if z_loss:
        logsumexp = (logits - log_share).gather(1, target).where(counts, 0)
        log_likelihood = log_likelihood - z_loss * logsumexp.squeeze(1).square()
    share = log_share.exp_()
    if z_loss:
        share = share * (1 + 2 * z_loss * logsumexp)
    if torch.compiler.is_compiling():  # one kernel; a scatter would make three of it
        share = share - (torch.arange(share.shape[1], device=share.device) == target).float()
    else:  # a scatter saves a pass over all logits
        share.scatter_add_(1, target, torch.full_like(target, -1, dtype=share.dtype))
    slope.copy_(share.mul_(counts * SLOPE_SCALE))
    return log_likelihood


def capped_slopes(slopes: Slopes, cap: float, logits: Tensor, targets: Tensor, slope: Tensor, **more: float) -> Tensor:
    """Do what `slopes` does, for logits that become cap * tanh(logit / cap)."""
    tanh = (logits / cap).tanh_()
    of_capped = tanh * cap
    log_likelihood = slopes(of_capped, targets, of_capped, **more)
    slope.copy_(of_capped.mul_(1 - tanh.square_()))
    return log_likelihood


def compiled_slopes() -> Slopes:
    """Return `slopes`, compiled. On a GPU its sums have the same order in every process."""
    return torch.compile(slopes, dynamic=False, options={"deterministic": True, **wide.COMPILE_OPTIONS})


class LinearCrossEntropy(torch.autograd.Function):
    """Head and loss: hidden (N, H), weight (V, H), targets INT64 (N,) -> FP32 (), the sum over all targets but IGNORE,
    divided by N.

    Forward computes both gradients while it has a chunk's logits; backward would have to compute the logits a second
    time. The gradients are FP32, because forward does not know the loss scale. Backward multiplies them by the loss
    scale and rounds once.

    A CPU computes FP16 in FP32, and BF16 too if it has no BF16 arithmetic. Otherwise the factors of a product have the
    inputs' dtype; a GPU returns the product in FP32, a CPU rounds it to BF16 once per chunk.

    torch 2.13's own F.linear_cross_entropy returns a half loss (0.05 off in BF16), and rounds FP16 gradients before the
    loss scale (7 times the error here).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Slopes, with_grads: bool) -> Tensor:
        # A CPU always widens FP16: it would otherwise round logits and gradients to FP16.
        widens = hidden.is_cpu and (hidden.dtype == torch.float16 or hidden.dtype not in native_halves())
        dtype = torch.float32 if widens else hidden.dtype
        wide_weight = weight.to(dtype)
        log_likelihood = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        if with_grads:
            grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.dtype = hidden.dtype
        chunk = max(constants.LOSS_CHUNK[hidden.device.type != "cpu"], constants.LOSS_ROWS * len(weight))
        for rows in wide.row_slices(len(hidden), len(weight), chunk):
            wide_hidden = hidden[rows].to(dtype)
            logits = _product(wide_hidden, wide_weight.t())
            slope = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
            _slopes_by_parts(slopes, logits, targets[rows], slope, log_likelihood[rows])
            if with_grads:
                grad_hidden[rows] = _product(slope, wide_weight)
                _add_product(grad_weight, slope.t(), wide_hidden)
        return -log_likelihood.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad / (len(grad_hidden) * SLOPE_SCALE)  # `grad` carries the loss scale
        return *(_scaled(wide, factor, ctx.dtype) for wide in (grad_hidden, grad_weight)), None, None, None


def _parts(x: Tensor) -> Iterator[slice]:
    return wide.row_slices(len(x), x.shape[1], constants.LOSS_PART[x.device.type != "cpu"])


def _slopes_by_parts(slopes: Slopes, logits: Tensor, targets: Tensor, slope: Tensor, log_likelihood: Tensor) -> None:
    for part in _parts(logits):
        wide_logits = logits[part].float()
        # If input and output are the same tensor, pass the same view: the compiler would take two views for two
        # tensors.
        into = wide_logits if slope is logits and logits.dtype == torch.float32 else slope[part]
        log_likelihood[part] = slopes(wide_logits, targets[part], into)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Return one @ other; on a GPU the result stays in FP32."""
    if one.device.type != "cpu" and one.dtype != torch.float32:
        return torch.mm(one, other, out_dtype=torch.float32)
    return one @ other


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add one @ other to `total`, in FP32 and without a second tensor of that size."""
    if one.dtype == torch.float32:
        total.addmm_(one, other)
        return
    for rows in _parts(total):
        total[rows] += _product(one[rows], other)


def _scaled(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return FP32 wide * factor, rounded once to `dtype`. `wide` stays as it is, for a second backward."""
    out = torch.empty_like(wide, dtype=dtype)
    for rows in _parts(wide):
        out[rows] = wide[rows] * factor
    return out


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Slopes = slopes) -> Tensor:
    """Return the cross entropy of the logits hidden @ weight.T: its sum over all targets but IGNORE, divided by the
    number of all targets.

    Shapes: hidden (..., H), weight (V, H) of the same dtype, targets INT64 (...) -> FP32 ().
    `slopes`: the function `slopes`, or a form of it.
    """
    return apply(LinearCrossEntropy, hidden.flatten(0, -2), weight, targets.flatten(), slopes, torch.is_grad_enabled())
