"""Products in FP8 of an audited step: their dtype, and shares of the codes that are the largest or zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megamix.model import fp8
from megamix.model.fp8 import Codes, FP8Linear
from megamix.tools.audit.facts import FP8, Facts, ParamFacts


@contextmanager
def codes_told(facts: Facts) -> Iterator[None]:
    """Count the codes that each weight's products multiply within the block, in forward and in backward. Compiled
    products are not observed.
    """
    multiply, within = fp8.product, list[ParamFacts | None]()

    def product(a: Codes, b: Codes, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        if within and (one := within[-1]):
            for values in (a.values, b.values):
                size = values.float().abs()
                largest = (size == torch.finfo(values.dtype).max).sum()
                one.count(codes=values.numel(), codes_largest=largest, codes_zero=(size == 0).sum())
        return multiply(a, b, dtype, fast=fast)

    def inside(method: Any, weight_of: Any, ctx: Any, *args: Any) -> Any:
        within.append(one := facts.get(weight_of(ctx, *args)))
        if one:
            one.dtypes["compute"] = FP8
        try:
            return method(ctx, *args)
        finally:
            within.pop()

    forward = staticmethod(partial(inside, FP8Linear.forward, lambda ctx, x, values, factors, weight, *_: weight))
    backward = staticmethod(partial(inside, FP8Linear.backward, lambda ctx, grad: ctx.saved_tensors[2]))
    with mock.patch.object(fp8, "product", product), mock.patch.multiple(FP8Linear, forward=forward, backward=backward):
        yield
