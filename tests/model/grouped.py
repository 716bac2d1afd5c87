"""A stand-in for a GPU's kernel of grouped products: it demands what the kernel demands, and computes each group."""

from contextlib import contextmanager
from unittest import mock

import torch

from megamix.model.wide import GroupedLinear


def _grouped_mm(x, weight, *, offs):
    """Check what ATen's native/cuda/GroupedBlas.cpp checks, and what it takes for granted."""
    assert x.dtype == weight.dtype == torch.bfloat16
    assert x.dim() == 2
    assert weight.dim() == 3
    assert x.shape[1] == weight.shape[1]
    assert x.is_contiguous()
    assert weight.mT.is_contiguous()
    assert all(size % 8 == 0 for size in weight.shape[1:])  # rows begin at multiples of 16 bytes
    assert offs.dtype == torch.int32
    assert offs.shape == weight.shape[:1]
    ends = offs.tolist()
    assert ends == sorted(ends)
    assert ends[-1] <= len(x)  # rows behind are left unset
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return GroupedLinear.apply(x, weight.mT, counts, torch.float32)


@contextmanager
def grouped_products():
    with mock.patch.object(torch, "_grouped_mm", _grouped_mm):
        yield
