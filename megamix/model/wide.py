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
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # no types
    return result


class WideLinear(torch.autograd.Function):
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


class WideEmbedding(torch.autograd.Function):
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


class WideRMSNorm(torch.autograd.Function):
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


class WideLayerNorm(torch.autograd.Function):
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
        grad_gate = grad_wide * up
        aten.silu_backward(grad_gate, gate, grad_input=grad_gate)  # in place: a block's backward often peaks here
        return grad_gate.to(grad.dtype), grad_up, None


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
        grad_x = grad.float()
        aten.gelu_backward(grad_x, x.float(), approximate=ctx.approximate, grad_input=grad_x)
        return grad_x.to(x.dtype), None


# Private operators, the same in torch 2.11 to 2.13. They hand out the logsumexp; the public function keeps it to
# itself, and with it FP32 copies of query, key, value and output until backward.
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention of half tensors; a torch without the private operators keeps FP32 copies until backward."""
    if mask is None and hasattr(aten, FLASH) and hasattr(aten, f"{FLASH}_backward"):
        return apply(WideAttention, query, key, value)
    key32, value32 = (widen_heads(x, query.shape[1]) for x in (key, value))
    out32 = F.scaled_dot_product_attention(query.float(), key32, value32, mask, is_causal=mask is None)
    return out32.to(query.dtype)


class WideAttention(torch.autograd.Function):
    """query (B, heads, T, head_dim), key and value (B, kv_heads, T, head_dim) -> like query, causal.

    Keeps the half inputs and output and the FP32 logsumexp (B, heads, T), as flash attention does on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key32, value32 = (widen_heads(x, query.shape[1]) for x in (key, value))
        out32, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(query.float(), key32, value32, 0.0, True)
        out: Tensor = out32.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        key32, value32 = (widen_heads(x, query.shape[1]) for x in (key, value))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.float(), query.float(), key32, value32, out.float(), logsumexp, 0.0, True
        )
        return tuple(narrow_heads(g, x) for g, x in zip(grads, (query, key, value), strict=True))


def widen_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return an FP32 copy of half (B, kv_heads, T, D), each head repeated for its group of queries -> (B, num_heads, T,
    D).
    """
    if x.shape[1] == num_heads:
        return x.float()
    return x.float().repeat_interleave(num_heads // x.shape[1], dim=1)


def narrow_heads(grad: Tensor, like: Tensor) -> Tensor:
    """Undo widen_heads in a gradient: sum over each group in FP32, round once to the dtype and heads of `like`."""
    if grad.shape[1] != like.shape[1]:
        batch, num_heads, *rest = grad.shape
        kv_heads = like.shape[1]
        grad = grad.reshape(batch, kv_heads, num_heads // kv_heads, *rest).sum(2)
    return grad.to(like.dtype)


class Rotary(torch.autograd.Function):
    """x (B, T, heads, head_dim), cos and sin FP32 ([B,] T, head_dim / 2) -> x rotated; keeps the tables alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # In one FP32 buffer: the plain form's halves and their concatenation are FP32 tensors of their own.
    x32, sin = x.float(), sin.unsqueeze(-2)
    out = x32 * torch.cat((cos, cos), -1).unsqueeze(-2)
    (first, second), (out_first, out_second) = x32.chunk(2, -1), out.chunk(2, -1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return out.to(x.dtype)
