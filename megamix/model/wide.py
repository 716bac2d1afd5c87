"""Compute wide, store narrow: the operations of a block on half tensors of a CPU.

Every tensor that outlives an operation is half. Inside an operation everything is FP32, and the result is rounded once.
Values beyond FP16's range become inf in that rounding, as on a GPU. Each operation is an autograd.Function of its own:
otherwise autograd would keep FP32 copies of inputs and weights until backward, and these have twice the bytes of the
half tensors.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamix.base.machine import torch_version

aten = torch.ops.aten

# FP32 elements of a product that are alive at a time (4 MB). Without a limit, widened logits would make the memory peak
# of the whole step.
MAX_WIDE_ELEMENTS = 2**20

# torch 2.10 to 2.14 may give norms wrong gradients without a word (pytorch issue 193061).
COMPILE_OPTIONS = {"triton.mix_order_reduction": False} if torch_version() < (2, 15) else {}


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call function.apply, with a type for its result."""
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`, as the result of a function's forward.

    It must be no other name of a tensor within the forward, as the result of x.mul_() is, or of x.to() where nothing
    has to be cast: torch 2.11's compiler then loses all gradients without a word (pytorch issue 180642).
    """
    return x if x.dtype == dtype else x.to(dtype)


Operation = Callable[[Tensor], Tensor]


class Crossing(torch.autograd.Function):
    """An autograd function with one operation for forward, and another one for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Operation, back: Operation) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class WideLinear(torch.autograd.Function):
    """A linear layer: x (..., in), weight (out, in), bias (out,) or None -> (..., out). Keeps x and weight."""

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
    """Return F.linear of half x (rows, in) and FP32 weight32 (out, in), rounded to x's dtype. The work is cut between
    rows, so no sum is cut.
    """
    out = x.new_empty(x.shape[0], weight32.shape[0])
    for rows in row_slices(x.shape[0], max(weight32.shape)):
        out[rows] = F.linear(x[rows].float(), weight32, bias32)
    return out


def row_slices(num_rows: int, row_size: int, max_elements: int = MAX_WIDE_ELEMENTS) -> Iterator[slice]:
    """Yield slices of num_rows rows, each of at most max_elements elements but of at least one row."""
    step = max(1, max_elements // row_size)
    return (slice(start, start + step) for start in range(0, num_rows, step))


class WideScores(torch.autograd.Function):
    """Products of x (..., in) and weight (out, in), half -> FP32 (..., out), on any device. Keeps x and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2).float()
        return (grad @ weight.float()).to(x.dtype), grad_weight.to(weight.dtype)


class GroupedLinear(torch.autograd.Function):
    """A linear layer of each group: x (rows, in) sorted by group, weight (groups, out, in), numbers of the groups' rows
    -> (rows, out), computed in `compute_dtype` and rounded once. Keeps x and weight. Rows behind all groups are left
    unset, as by a GPU's kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], compute_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.compute_dtype = counts, compute_dtype
        out = x.new_empty(len(x), weight.shape[1])
        for rows, matrix, into in zip(_groups(x, counts), weight, _groups(out, counts), strict=True):
            into.copy_(F.linear(rows.to(compute_dtype), matrix.to(compute_dtype)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
        groups = (_groups(rows, ctx.counts) for rows in (x, grad, of_x))
        for number, (rows, slope, into) in enumerate(zip(*groups, strict=True)):
            slope = slope.to(ctx.compute_dtype)
            into.copy_(slope @ weight[number].to(ctx.compute_dtype))
            of_weight[number] = slope.t() @ rows.to(ctx.compute_dtype)
        return of_x, of_weight, None, None


def _groups(rows: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    return torch.split(rows[: sum(counts)], counts)


class PaddedLinear(torch.autograd.Function):
    """GroupedLinear as one product, of groups padded with zeros to `most` rows. `places`: INT64 (rows,), of the rows
    among the padded ones. Keeps x, weight and places.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, places: Tensor, most: int) -> Tensor:
        ctx.save_for_backward(x, weight, places)
        ctx.most = most
        return _padded(x, places, len(weight), most).bmm(weight.mT).flatten(0, 1).index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, places = ctx.saved_tensors
        slopes = _padded(grad, places, len(weight), ctx.most)
        of_x = slopes.bmm(weight).flatten(0, 1).index_select(0, places)
        return of_x, slopes.mT.bmm(_padded(x, places, len(weight), ctx.most)), None, None


def _padded(rows: Tensor, places: Tensor, groups: int, most: int) -> Tensor:
    return rows.new_zeros(groups * most, rows.shape[1]).index_copy_(0, places, rows).view(groups, most, -1)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of a table: tokens INT64 (...), weight (vocab, hidden) -> (..., hidden). The gradient's rows are
    summed in FP32. Keeps the tokens.
    """
    shape, dtype = weight.shape, weight.dtype

    def back(grad: Tensor) -> Tensor:
        # For a frequent token hundreds of rows are added. In half each addition would round, and small rows would be
        # lost.
        grad_weight = torch.zeros(shape, dtype=torch.float32, device=grad.device)
        return grad_weight.index_add_(0, tokens.flatten(), grad.float().flatten(0, -2)).to(dtype)

    return apply(Crossing, weight, lambda weight: F.embedding(tokens, weight), back)


class WideRMSNorm(torch.autograd.Function):
    """RMSNorm: x (..., hidden), weight (hidden,) -> x / rms(x) * weight. Keeps x and FP32 1/rms (..., 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        rstd = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()  # FP32 (..., 1)
        ctx.save_for_backward(x, weight, rstd)
        return rounded(x32.mul_(rstd).mul_(weight.float()), x.dtype)

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
    """LayerNorm: x (..., hidden), weight (hidden,), bias (hidden,) or None. Keeps x, and FP32
    mean and 1/std (..., 1).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        bias32 = None if bias is None else bias.float()
        out32, mean, rstd = aten.native_layer_norm(x.float(), weight.shape, weight.float(), bias32, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return rounded(out32, x.dtype)

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
    """SwiGLU: gate, up (..., ffn) -> silu(gate) * up, computed in compute_dtype. Keeps gate and up, whereas torch's own
    operations would also keep silu(gate).
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, compute_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.compute_dtype = compute_dtype
        return rounded(F.silu(gate.to(compute_dtype)) * up.to(compute_dtype), gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up, grad_wide = (x.to(ctx.compute_dtype) for x in (*ctx.saved_tensors, grad))
        grad_up = F.silu(gate).mul_(grad_wide).to(grad.dtype)
        grad_gate = grad_wide * up
        aten.silu_backward(grad_gate, gate, grad_input=grad_gate)  # in place: a block's backward often peaks here
        return grad_gate.to(grad.dtype), grad_up, None


class GELU(torch.autograd.Function):
    """GELU: x (..., ffn) -> gelu(x), exact ("none") or with tanh ("tanh"). Keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return rounded(F.gelu(x.float(), approximate=approximate), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        grad_x = grad.float()
        aten.gelu_backward(grad_x, x.float(), approximate=ctx.approximate, grad_input=grad_x)
        return grad_x.to(x.dtype), None


# Private operators of torch, the same in versions 2.11 to 2.13. They return the logsumexp. The public function does not
# return it, and keeps FP32 copies of query, key, value and output for its backward.
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return causal attention of half tensors. With a mask, or without the private operators, torch keeps FP32 copies
    until backward.
    """
    if mask is None and hasattr(aten, FLASH) and hasattr(aten, f"{FLASH}_backward"):
        return apply(WideAttention, query, key, value)
    key32, value32 = (widen_heads(x, query.shape[1]) for x in (key, value))
    out32 = F.scaled_dot_product_attention(query.float(), key32, value32, mask, is_causal=mask is None)
    return out32.to(query.dtype)


class WideAttention(torch.autograd.Function):
    """Causal attention: query (B, heads, T, head_dim), key and value (B, kv_heads, T, head_dim) -> like query.

    Keeps the half inputs and output, and the FP32 logsumexp (B, heads, T), as flash attention does on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key32, value32 = (widen_heads(x, query.shape[1]) for x in (key, value))
        out32, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(query.float(), key32, value32, 0.0, True)
        out = rounded(out32, query.dtype)
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
    """Return a wide copy in which each head is repeated for its group of query heads.

    Shapes: x half (B, kv_heads, T, D) -> FP32 (B, num_heads, T, D); FP64 stays.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide if x.shape[1] == num_heads else wide.repeat_interleave(num_heads // x.shape[1], dim=1)


def narrow_heads(grad: Tensor, like: Tensor) -> Tensor:
    """Reverse widen_heads in a gradient: sum over each group in FP32, then round once to the dtype of `like`."""
    if grad.shape[1] != like.shape[1]:
        batch, num_heads, *rest = grad.shape
        kv_heads = like.shape[1]
        grad = grad.reshape(batch, kv_heads, num_heads // kv_heads, *rest).sum(2)
    return grad.to(like.dtype)


# Scores of CappedAttention that are alive at a time (64 MB in FP32).
MAX_SCORES = 2**24


class CappedAttention(torch.autograd.Function):
    """Attention with capped scores (Gemma Team 2024, Gemma 2, section 2): query (B, heads, T, D), key and value
    (B, kv_heads, S, D), mask BOOL that broadcasts to (B, heads, T, S) -> like query. Keeps its inputs.

    No kernel of torch caps scores. So they are made in FP32, for some queries at a time, and again in backward.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.cap = cap
        key, value = (widen_heads(x, query.shape[1]) for x in (key, value))
        out = torch.empty_like(query)
        for rows in _score_rows(query, key):
            out[:, :, rows] = _capped_weights(query[:, :, rows], key, mask[..., rows, :], cap)[0] @ value
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, own_key, own_value, mask = ctx.saved_tensors
        key, value = (widen_heads(x, query.shape[1]) for x in (own_key, own_value))
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for rows in _score_rows(query, key):
            some, of_out = query[:, :, rows].to(key.dtype), grad[:, :, rows].to(key.dtype)
            weights, tanh = _capped_weights(some, key, mask[..., rows, :], ctx.cap)
            of_value += weights.mT @ of_out
            slope = of_out @ value.mT
            slope = weights * (slope - (slope * weights).sum(-1, keepdim=True))
            slope *= (1 - tanh.square()) / math.sqrt(query.shape[-1])
            of_query[:, :, rows] = slope @ key
            of_key += slope.mT @ some
        return of_query, narrow_heads(of_key, own_key), narrow_heads(of_value, own_value), None, None


def _score_rows(query: Tensor, key: Tensor) -> Iterator[slice]:
    return row_slices(query.shape[2], query.shape[0] * query.shape[1] * key.shape[2], MAX_SCORES)


def _capped_weights(query: Tensor, key: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return the weights of keys, and the tanh in them."""
    tanh = (query.to(key.dtype) @ key.mT).mul_(1 / (cap * math.sqrt(query.shape[-1]))).tanh_()
    return (tanh * cap).masked_fill_(~mask, -math.inf).softmax(-1), tanh


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs: x (B, T, heads, head_dim), cos and sin FP32 ([B,] T, head_dim / 2) -> like x. Keeps only the
    tables.
    """
    return apply(Crossing, x, lambda x: _rotate(x, cos, sin), lambda grad: _rotate(grad, cos, -sin))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The halves are written into one FP32 buffer. With a concatenation there would be more FP32 tensors.
    x32, sin = x.float(), sin.unsqueeze(-2)
    out = x32 * torch.cat((cos, cos), -1).unsqueeze(-2)
    (first, second), (out_first, out_second) = x32.chunk(2, -1), out.chunk(2, -1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return rounded(out, x.dtype)
