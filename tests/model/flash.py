"""A stand-in for FlashAttention's kernels for documents, which torch has for a GPU alone: it demands what they demand,
and computes each document, or each segment of queries and keys, in FP32.
"""

import math
from contextlib import contextmanager
from itertools import pairwise

import torch

calls = {"forward": 0, "backward": 0}


def _demand(query, key, value, begins, begins_k, longest, longest_k):
    """Check what torch's flash_api.cpp (`mha_varlen_fwd`) checks, and what it takes for granted. Return the queries and
    the keys of each segment.
    """
    heads, head_dim = query.shape[1:]
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert key.dtype == value.dtype == query.dtype
    assert key.shape == value.shape == (len(key), key.shape[1], head_dim)
    assert heads % key.shape[1] == head_dim % 8 == 0
    assert head_dim <= 256
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    segments = []
    for borders, total, most in ((begins, len(query), longest), (begins_k, len(key), longest_k)):
        assert (borders.dtype, borders.dim(), borders.is_contiguous()) == (torch.int32, 1, True)
        ends = borders.tolist()
        assert ends[0] == 0
        assert ends[-1] == total
        assert all(0 <= end - begin <= most for begin, end in pairwise(ends))
        segments.append([slice(*pair) for pair in pairwise(ends)])
    return [*zip(*segments, strict=True)]


def _scores(query, key, left):
    """FP32 (heads, queries, keys) of one segment, -inf for later keys, and for keys more than `left` before a query's
    own, if that is not -1: the last query sees the last key.
    """
    scores = query.float().transpose(0, 1) @ key.float().permute(1, 2, 0) / math.sqrt(query.shape[-1])
    before = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    seen = (before >= 0) if left == -1 else (before >= 0) & (before <= left)
    return scores.masked_fill(~seen, -math.inf)


def _forward(query, key, value, *rest, window_size_left=None, window_size_right=None, **others):
    calls["forward"] += 1
    *borders, dropout, is_causal, debug = rest
    assert (dropout, debug, window_size_right) == (0.0, False, 0)
    assert is_causal or window_size_left != -1  # with a window, none to the right is enough
    assert all(other is None for other in others.values())
    out, group = torch.full_like(query, math.nan), query.shape[1] // key.shape[1]
    statistic = torch.full((query.shape[1], query.shape[0]), math.nan)
    for part, seen in _demand(query, key, value, *borders):
        keys, values = (x[seen].repeat_interleave(group, dim=1) for x in (key, value))
        scores = _scores(query[part], keys, window_size_left)
        out[part] = (scores.softmax(-1) @ values.float().transpose(0, 1)).transpose(0, 1).to(query.dtype)
        statistic[:, part] = scores.logsumexp(-1)
    return out, statistic, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(grad, query, key, value, out, statistic, *rest, window_size_left=None, window_size_right=None, **others):
    calls["backward"] += 1
    *borders, dropout, is_causal = rest[:6]
    assert (dropout, others, window_size_right) == (0.0, {}, 0)
    assert is_causal or window_size_left != -1
    assert grad.shape == out.shape == query.shape
    assert statistic.shape == (query.shape[1], query.shape[0])
    grads, heads = [torch.full_like(x, math.nan) for x in (query, key, value)], query.shape[1]
    for part, seen in _demand(query, key, value, *borders):
        q, k, v, o, d = (
            x.float().repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)
            for x in (query[part], key[seen], value[seen], out[part], grad[part])
        )
        weights = (_scores(q.transpose(0, 1), k.transpose(0, 1), window_size_left) - statistic[:, part, None]).exp()
        slopes = weights * (d @ v.transpose(1, 2) - (d * o).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        found = (part, slopes @ k), (seen, slopes.mT @ q), (seen, weights.mT @ d)
        for into, (place, values) in zip(grads, found, strict=True):
            shared = values.transpose(0, 1).unflatten(1, (into.shape[1], -1)).sum(2)  # by those of one group
            into[place] = shared.to(into.dtype)
    return grads[0], grads[1], grads[2]


@contextmanager
def stand_in():
    """Until the end of the block the CPU has these kernels, and so a simulated GPU; gives how often they are called."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    calls.update(forward=0, backward=0)
    try:
        yield calls
    finally:
        library._destroy()
