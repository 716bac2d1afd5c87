"""Losses that are added to a step's own where they arise: `megamix.add_loss`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return x, whose backward adds the gradient of `loss` to that of the step's own loss.

    Call it on hidden states on the way to the step's loss. So an added loss is right on each stage of a pipeline, and
    in a block that backward runs again. It gets the own loss's scale and divisor, and is no part of the loss that is
    reported; `megamix.record` reports it apart. Without an engine its factor is 1.
    Shapes: loss (), FP32 or FP64, a mean over this micro-batch's tokens.
    """
    added: Tensor = _AddedLoss.apply(x, loss)  # type: ignore[no-untyped-call]  # untyped in torch
    return added


class _AddedLoss(torch.autograd.Function):
    factor: ClassVar[Tensor | float] = 1.0  # the own loss's in the backward under way

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=ctx.device) * _AddedLoss.factor


@contextmanager
def added_losses_times(factor: Tensor | float) -> Iterator[None]:
    """Multiply added losses by a number, or FP32 (), in the backward passes inside the block."""
    before = _AddedLoss.factor
    _AddedLoss.factor = factor
    try:
        yield
    finally:
        _AddedLoss.factor = before
