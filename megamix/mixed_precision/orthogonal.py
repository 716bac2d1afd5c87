"""Orthogonalisation by products alone: Newton and Schulz's iteration (Jordan et al. 2024)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megamix.machine import native_halves


class NewtonSchulz(Protocol):
    """How the iteration is made, as `Muon` has it."""

    @property
    def ns_coefficients(self) -> tuple[float, float, float]: ...

    @property
    def ns_steps(self) -> int: ...

    @property
    def ns_dtype(self) -> torch.dtype: ...


def orthogonalised(momentum: Tensor, how: NewtonSchulz) -> Tensor:
    """Return about U V^T of each matrix U S V^T; zeros stay zeros, and NaN or inf anywhere is NaN everywhere.

    The iteration begins with singular values of at most 1: the matrix over its Frobenius norm, which is summed in FP32
    along rows and in FP64 over them.
    Shapes: BF16 or FP32 (..., rows, columns), contiguous -> the same.
    """
    norm = momentum.float().square().sum(-1).double().sum(-1).sqrt().clamp(min=1e-7)
    return iterated((momentum * norm.reciprocal().float()[..., None, None]).to(momentum.dtype), how)


def iterated(x: Tensor, how: NewtonSchulz) -> Tensor:
    """Turn singular values to about 1 by Newton and Schulz's iteration, which is products alone. Shapes: as above."""
    a, b, c = how.ns_coefficients
    if is_tall := x.shape[-2] > x.shape[-1]:
        x = x.mT.contiguous()
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    # On a CPU without BF16 arithmetic: FP32 is as fast with AVX-512, 40 times with AVX2; each result rounds once, too.
    widens = x.is_cpu and x.dtype == torch.bfloat16 and x.dtype not in native_halves()
    dtype = torch.float32 if widens else x.dtype
    for _ in range(how.ns_steps):
        wide = x.to(dtype)
        gram = (wide @ wide.mT).to(x.dtype).to(dtype)
        turned = multiply_add(gram, gram, gram, beta=b, alpha=c).to(x.dtype)
        x = multiply_add(wide, turned.to(dtype), wide, beta=a).to(x.dtype)
    return x.mT.contiguous() if is_tall else x
