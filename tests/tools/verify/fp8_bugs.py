"""Bugs in products in FP8 to plant on ranks."""

from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from megamix.model import fp8
from megamix.model.fp8 import E5M2, FP8Linear

INF_AT = 30  # the product whose gradient gets an inf, counted over a run; the second step of two layers has it


@contextmanager
def fp8_gradients_larger():
    """The gradients of weights are twice as large."""
    right = FP8Linear.backward

    def backward(ctx, grad):
        of_x, first, second, of_weight, *rest = right(ctx, grad)
        return of_x, first, second, 2 * of_weight, *rest

    with mock.patch.object(FP8Linear, "backward", staticmethod(backward)):
        yield


@contextmanager
def fp8_scales_transposed():
    """A row of the result has the factor of a column, where both are equally many."""
    right = fp8.product

    def product(a, b, dtype, *, fast=False):
        if len(a.factors) == len(b.factors):
            a, b = a._replace(factors=b.factors), b._replace(factors=a.factors)
        return right(a, b, dtype, fast=fast)

    with mock.patch.object(fp8, "product", product):
        yield


@contextmanager
def fp8_scales_stale():
    """Codes are multiplied by the factors of the last operand of their shape."""
    right, last = fp8.quantise, {}

    def quantise(x, dtype, by_row):
        codes = right(x, dtype, by_row)
        stale = last.get((x.shape, dtype), codes.factors)
        last[x.shape, dtype] = codes.factors
        return codes._replace(factors=stale)

    with mock.patch.object(fp8, "quantise", quantise):
        yield


@contextmanager
def inf_in_a_product():
    """No bug, but an inf in a gradient within a product of the last rank, in the second step."""
    right, calls = fp8.quantise, [0]

    def quantise(x, dtype, by_row):
        calls[0] += dtype == E5M2
        if dtype == E5M2 and calls[0] == INF_AT and dist.get_rank() == dist.get_world_size() - 1:
            x = x.clone()
            x[3, 5] = torch.inf
        return right(x, dtype, by_row)

    with mock.patch.object(fp8, "quantise", quantise):
        yield


@contextmanager
def inf_hidden_by_the_cast():
    """The scale is taken from finite numbers alone, and the cast makes the largest code of an inf."""
    right = fp8.quantise

    def quantise(x, dtype, by_row):
        return right(torch.where(x.isfinite(), x, x.sign()), dtype, by_row)

    with mock.patch.object(fp8, "quantise", quantise), inf_in_a_product():
        yield


FP8_BUGS = {
    bug.__name__: bug
    for bug in (fp8_gradients_larger, fp8_scales_transposed, fp8_scales_stale, inf_in_a_product, inf_hidden_by_the_cast)
}
