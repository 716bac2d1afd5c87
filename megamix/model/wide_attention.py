"""Causal attention and rotary positions, computed wide and stored narrow (see wide.py)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamix.model.wide import apply

aten = torch.ops.aten

# Private operators, the same in torch 2.11 to 2.13. They hand out the logsumexp; the public function keeps it to
# itself, and with it FP32 copies of query, key, value and output until backward.
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention of half tensors; a torch without the private operators keeps FP32 copies until backward."""
    if mask is None and hasattr(aten, FLASH) and hasattr(aten, f"{FLASH}_backward"):
        return apply(Attention, query, key, value)
    key32, value32 = (widen_heads(x, query.shape[1]) for x in (key, value))
    out32 = F.scaled_dot_product_attention(query.float(), key32, value32, mask, is_causal=mask is None)
    return out32.to(query.dtype)


class Attention(torch.autograd.Function):
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
    """FP32 copy of half (B, kv_heads, T, D), each head repeated for its group of queries -> (B, num_heads, T, D)."""
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
