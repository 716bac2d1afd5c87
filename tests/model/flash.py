"""A stand-in for FlashAttention's kernels for documents, which torch has for a GPU alone: it demands what they demand,
and computes each document in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

calls = {"forward": 0, "backward": 0}


def _demand(query: Tensor, key: Tensor, value: Tensor, begins: Tensor, longest: int) -> list[tuple[int, int]]:
    """Check what torch's flash_api.cpp (`mha_varlen_fwd`) checks, and what it takes for granted; the documents."""
    total, heads, head_dim = query.shape
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert key.dtype == value.dtype == query.dtype
    assert key.shape == value.shape == (total, key.shape[1], head_dim)
    assert heads % key.shape[1] == 0
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert begins.dtype == torch.int32
    assert begins.dim() == 1
    assert begins.is_contiguous()
    borders = [*pairwise(begins.tolist())]
    assert borders[0][0] == 0
    assert borders[-1][1] == total
    assert all(0 <= end - begin <= longest for begin, end in borders)
    return borders


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """FP32 (heads, T, T) of one document, -inf for later tokens."""
    scores = query.float().transpose(0, 1) @ key.float().permute(1, 2, 0) / math.sqrt(query.shape[-1])
    return scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, begins_k: Tensor, longest: int, longest_k: int,
    dropout: float, is_causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    calls["forward"] += 1
    assert (dropout, is_causal, debug, scale, window_size_left, window_size_right) == (0.0, True, False, None, -1, 0)
    assert torch.equal(begins, begins_k)
    assert longest == longest_k
    assert all(other is None for other in others.values())
    out, group = torch.full_like(query, math.nan), query.shape[1] // key.shape[1]
    statistic = torch.full((query.shape[1], query.shape[0]), math.nan)
    for begin, end in _demand(query, key, value, begins, longest):
        part = slice(begin, end)
        keys, values = (x[part].repeat_interleave(group, dim=1) for x in (key, value))
        scores = _scores(query[part], keys)
        out[part] = (scores.softmax(-1) @ values.float().transpose(0, 1)).transpose(0, 1).to(query.dtype)
        statistic[:, part] = scores.logsumexp(-1)
    return out, statistic, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, statistic: Tensor, begins: Tensor,
    begins_k: Tensor, longest: int, longest_k: int, dropout: float, is_causal: bool, *others: Any,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    calls["backward"] += 1
    assert (dropout, is_causal, scale, window_size_left, window_size_right) == (0.0, True, None, -1, 0)
    assert grad.shape == out.shape == query.shape
    assert statistic.shape == (query.shape[1], query.shape[0])
    grads, group = [torch.full_like(x, math.nan) for x in (query, key, value)], query.shape[1] // key.shape[1]
    for begin, end in _demand(query, key, value, begins, longest):
        part = slice(begin, end)
        q, k, v, o, d = (
            x[part].float().repeat_interleave(query.shape[1] // x.shape[1], dim=1).transpose(0, 1)
            for x in (query, key, value, out, grad)
        )
        weights = (_scores(query[part], key[part].repeat_interleave(group, dim=1)) - statistic[:, part, None]).exp()
        slopes = weights * (d @ v.transpose(1, 2) - (d * o).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        for into, found in zip(grads, (slopes @ k, slopes.mT @ q, weights.mT @ d), strict=True):
            shared = found.transpose(0, 1).unflatten(1, (into.shape[1], -1)).sum(2)  # by those of one group
            into[part] = shared.to(into.dtype)
    return grads[0], grads[1], grads[2]


@contextmanager
def stand_in() -> Iterator[dict[str, int]]:
    """Until the end of the block the CPU has these kernels, and so a simulated GPU; gives how often they are called."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    calls.update(forward=0, backward=0)
    try:
        yield calls
    finally:
        library._destroy()
