"""Bugs in products in FP8 to plant on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megamix.model import fp8
from megamix.model.fp8 import E5M2, Codes, FP8Linear

INF_AT = 30  # the product whose gradient gets an inf, counted over a run; the second step of two layers has it


@contextmanager
def fp8_gradients_larger() -> Iterator[None]:
    """The gradients of weights are twice as large."""
    right = FP8Linear.backward

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, first, second, of_weight, *rest = right(ctx, grad)
        return of_x, first, second, 2 * of_weight, *rest

    with mock.patch.object(FP8Linear, "backward", staticmethod(backward)):
        yield


@contextmanager
def fp8_scales_transposed() -> Iterator[None]:
    """A row of the result has the factor of a column, where both are equally many."""
    right = fp8.product

    def product(a: Codes, b: Codes, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        if len(a.factors) == len(b.factors):
            a, b = a._replace(factors=b.factors), b._replace(factors=a.factors)
        return right(a, b, dtype, fast=fast)

    with mock.patch.object(fp8, "product", product):
        yield


@contextmanager
def fp8_scales_stale() -> Iterator[None]:
    """Codes are multiplied by the factors of the last operand of their shape."""
    right, last = fp8.quantise, dict[object, Tensor]()

    def quantise(x: Tensor, dtype: torch.dtype, by_row: bool) -> Codes:
        codes = right(x, dtype, by_row)
        stale = last.get((x.shape, dtype), codes.factors)
        last[x.shape, dtype] = codes.factors
        return codes._replace(factors=stale)

    with mock.patch.object(fp8, "quantise", quantise):
        yield


@contextmanager
def inf_in_a_product() -> Iterator[None]:
    """No bug, but an inf in a gradient within a product of the last rank, in the second step."""
    right, calls = fp8.quantise, [0]

    def quantise(x: Tensor, dtype: torch.dtype, by_row: bool) -> Codes:
        calls[0] += dtype == E5M2
        if dtype == E5M2 and calls[0] == INF_AT and dist.get_rank() == dist.get_world_size() - 1:
            x = x.clone()
            x[3, 5] = torch.inf
        return right(x, dtype, by_row)

    with mock.patch.object(fp8, "quantise", quantise):
        yield


@contextmanager
def inf_hidden_by_the_cast() -> Iterator[None]:
    """The scale is taken from finite numbers alone, and the cast makes the largest code of an inf."""
    right = fp8.quantise

    def quantise(x: Tensor, dtype: torch.dtype, by_row: bool) -> Codes:
        return right(torch.where(x.isfinite(), x, x.sign()), dtype, by_row)

    with mock.patch.object(fp8, "quantise", quantise), inf_in_a_product():
        yield


FP8_BUGS: dict[str, Callable[[], object]] = {
    bug.__name__: bug
    for bug in (
        fp8_gradients_larger,
        fp8_scales_transposed,
        fp8_scales_stale,
        inf_in_a_product,
        inf_hidden_by_the_cast,
    )
}
