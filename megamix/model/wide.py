"""Compute wide, store narrow: the operations of a block on half tensors of a CPU.

Every tensor that outlives an operation is half; inside, everything is FP32, and the result is rounded once. What FP16
cannot hold becomes inf in that rounding, as on a GPU. Each operation is its own autograd.Function because otherwise
autograd would keep the FP32 copies of inputs and weights until backward: twice the bytes of the tensors themselves.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten

# FP32 elements of a product alive at a time (4 MB): the logits, widened at once, would be the peak of the whole step.
MAX_WIDE_ELEMENTS = 2**20


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """function.apply with a type."""
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


class Linear(torch.autograd.Function):
    """x (..., in), weight (out, in), bias (out,) or None -> (..., out); keeps x and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        bias32 = None if bias is None else bias.float()
        return _linear_by_rows(x.flatten(0, -2), weight.float(), bias32).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad2d = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _linear_by_rows(grad2d, weight.float().t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _linear_by_rows(grad2d.t(), x.flatten(0, -2).float().t())
        if ctx.needs_input_grad[2]:
            grad_bias = grad2d.sum(0, dtype=torch.float32).to(weight.dtype)
        return grad_x, grad_weight, grad_bias


def _linear_by_rows(x: Tensor, weight32: Tensor, bias32: Tensor | None = None) -> Tensor:
    """F.linear of half x (rows, in) with FP32 weight32 (out, in), rounded to x's dtype; no sum is cut."""
    out = x.new_empty(x.shape[0], weight32.shape[0])
    for rows in row_slices(x.shape[0], max(weight32.shape)):
        out[rows] = F.linear(x[rows].float(), weight32, bias32)
    return out


def row_slices(num_rows: int, row_size: int, max_elements: int = MAX_WIDE_ELEMENTS) -> Iterator[slice]:
    """Cut num_rows into slices of at most max_elements elements (at least one row)."""
    step = max(1, max_elements // row_size)
    return (slice(start, start + step) for start in range(0, num_rows, step))


class Embedding(torch.autograd.Function):
    """tokens INT64 (...), weight (vocab, hidden) -> (..., hidden); the gradient's rows are summed in FP32."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        # A frequent token adds hundreds of rows; in half each addition would round, and small ones would be lost.
        grad_weight = torch.zeros(ctx.weight_shape, dtype=torch.float32, device=grad.device)
        grad_weight.index_add_(0, tokens.flatten(), grad.float().flatten(0, -2))
        return None, grad_weight.to(ctx.weight_dtype)


class RMSNorm(torch.autograd.Function):
    """x (..., hidden), weight (hidden,) -> x / rms(x) * weight; keeps x and FP32 1/rms (..., 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        rstd = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # FP32 (..., 1)
        ctx.save_for_backward(x, weight, rstd)
        return x32.mul_(rstd).mul_(weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        grad32, normed = grad.float(), x.float().mul_(rstd)
        grad_weight = (grad32 * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad32.mul_(weight.float())
        along = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = grad_normed.addcmul_(normed, along, value=-1).mul_(rstd).to(x.dtype)
        return grad_x, grad_weight, None


class LayerNorm(torch.autograd.Function):
    """x (..., hidden), weight (hidden,), bias (hidden,) or None; keeps x and FP32 mean and 1/std (..., 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        bias32 = None if bias is None else bias.float()
        out32, mean, rstd = aten.native_layer_norm(x.float(), weight.shape, weight.float(), bias32, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        out: Tensor = out32.to(x.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        bias32 = None if bias is None else bias.float()
        grad_x, grad_weight, grad_bias = aten.native_layer_norm_backward(
            grad.float(), x.float(), weight.shape, mean, rstd, weight.float(), bias32, [True, True, bias is not None]
        )
        grad_bias = None if bias is None else grad_bias.to(bias.dtype)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias, None


class SwiGLU(torch.autograd.Function):
    """gate, up (..., ffn) -> silu(gate) * up, computed in compute_dtype; keeps gate and up, where torch's own
    operations would keep silu(gate) as well."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, compute_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.compute_dtype = compute_dtype
        return F.silu(gate.to(compute_dtype)).mul_(up.to(compute_dtype)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up, grad_wide = (x.to(ctx.compute_dtype) for x in (*ctx.saved_tensors, grad))
        grad_up = F.silu(gate).mul_(grad_wide).to(grad.dtype)
        grad_gate = aten.silu_backward(grad_wide * up, gate).to(grad.dtype)
        return grad_gate, grad_up, None


class GELU(torch.autograd.Function):
    """x (..., ffn) -> gelu(x), exact ("none") or with tanh ("tanh"); keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return F.gelu(x.float(), approximate=approximate).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        grad_x: Tensor = aten.gelu_backward(grad.float(), x.float(), approximate=ctx.approximate).to(x.dtype)
        return grad_x, None
