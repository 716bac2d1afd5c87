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
    in a block that backward runs again. The gradient is that of a loss given to `engine.backward` with `loss` in it:
    it gets the own loss's scale, and is divided by the weights. It is no part of the loss that is reported;
    `megamix.record` reports it apart. Without an engine its factor is 1.
    Shapes: loss (), FP32 or FP64, a mean over this micro-batch's tokens.
    Raises: ValueError for a loss of another shape or dtype.
    """
    if loss.dim():
        raise ValueError(f"add_loss: loss must be of shape (), got {tuple(loss.shape)}; pass its mean()")
    if loss.dtype not in (torch.float32, torch.float64):  # the loss scale would be beyond FP16, too
        raise ValueError(f"add_loss: loss must be FP32 or FP64, got {loss.dtype}; compute it from x.float()")
    added: Tensor = _AddedLoss.apply(x, loss)  # type: ignore[no-untyped-call]  # untyped in torch
    return added


class _AddedLoss(torch.autograd.Function):
    factor: ClassVar[Tensor | float] = 1.0  # the own loss's in the backward under way

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ops.megamix.gradient_of_added_loss(grad, loss)


def _gradient(grad: Tensor, loss: Tensor) -> Tensor:
    return torch.ones_like(loss).mul_(_AddedLoss.factor)


def _gradient_on_meta(grad: Tensor, loss: Tensor) -> Tensor:
    return torch.empty_like(loss)


# An operation of its own, because the compiler traces backward with forward, before the factor is known. It takes
# `grad`, which only backward has: without it the compiler would be free to compute the result in forward.
_LIBRARY: Any = torch.library.Library("megamix", "DEF")  # type: ignore[no-untyped-call]  # untyped in torch
_LIBRARY.define("gradient_of_added_loss(Tensor grad, Tensor loss) -> Tensor")
_LIBRARY.impl("gradient_of_added_loss", _gradient, "CompositeExplicitAutograd")
_LIBRARY.impl("gradient_of_added_loss", _gradient_on_meta, "Meta")


@contextmanager
def added_losses_times(factor: Tensor | float) -> Iterator[None]:
    """Multiply added losses by a number, or FP32 (), in all threads' backward passes inside the block."""
    before = _AddedLoss.factor
    _AddedLoss.factor = factor
    try:
        yield
    finally:
        _AddedLoss.factor = before
