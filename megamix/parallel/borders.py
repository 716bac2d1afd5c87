"""What travels where a divided layer begins and ends. Awaited at once; every rank gets the same bits.

Between such borders a rank computes with plain tensors, so the modules and operations of `megamix/model` are those of
one process: what computes half tensors wide on a CPU never meets a distributed tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamix.comm.collectives import Collectives
from megamix.model.wide import apply

SEQUENCE = -2  # the dim of positions, of activations (B, T, hidden)
_COLUMNS = -1

# A compiled block is cut in pieces at its borders: the compiler can trace some collectives of some backends.
_apply: Callable[..., Tensor] = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]


class Border:
    """Around each divided layer of one model.

    `sequence`: between divided layers every rank has a part of the positions; else each has them all. The same traffic
    either way: a sum that every rank needs whole is a sum by parts and a gather.
    """

    def __init__(self, tp: Collectives, *, sequence: bool):
        self.tp, self.sequence = tp, sequence
        self._divides = sequence

    def begin(self, num_positions: int) -> None:
        """Of each forward. Positions are divided where activations are kept for backward; a prompt has any length.

        Raises: ValueError if they must be and cannot.
        """
        self.sequence = self._divides and torch.is_grad_enabled()
        if self.sequence and num_positions % self.tp.axis.size:
            raise ValueError(
                f"tokens has {num_positions} positions, which {self.tp.axis.size} tensor-parallel ranks cannot divide; "
                "train on a length that they do, or build the model with sequence_parallel=False"
            )

    def enter(self, x: Tensor) -> Tensor:
        """Give every rank all positions. Shapes: (B, T or T / tp_size, hidden) -> (B, T, hidden)."""
        return _apply(_GatherPositions if self.sequence else _Enter, x, self.tp)

    def leave(self, x: Tensor) -> Tensor:
        """Sum over the ranks. Shapes: (B, T, hidden) -> (B, T or T / tp_size, hidden)."""
        return _apply(_SumPositions if self.sequence else _Leave, x, self.tp)

    def join_columns(self, x: Tensor) -> Tensor:
        """Every rank's columns side by side. Shapes: (..., n) -> (..., n * tp_size)."""
        return _apply(_JoinColumns, x, self.tp)

    def own_positions(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of what has an entry for every position."""
        return x.chunk(self.tp.axis.size, dim)[self.tp.axis.rank] if self.sequence else x


def sum_over(tp: Collectives, x: Tensor) -> Tensor:
    """The ranks' sum, in FP32 in rank order and rounded once where the backend lets us choose. Any shape."""
    flat = x.reshape(-1)
    short = -flat.numel() % tp.axis.size
    parts = torch.nn.functional.pad(flat, (0, short)).view(tp.axis.size, -1)
    return tp.gather(tp.sum_parts(parts)).view(-1)[: flat.numel()].view(x.shape)


def sum_parts(tp: Collectives, x: Tensor, dim: int) -> Tensor:
    """This rank's part of the ranks' sum, cut in `dim`."""
    parts = torch.stack(x.chunk(tp.axis.size, dim))
    return tp.sum_parts(parts.view(tp.axis.size, -1)).view(parts.shape[1:])


def gather(tp: Collectives, x: Tensor, dim: int) -> Tensor:
    """The ranks' tensors one behind the other in `dim`."""
    parts = tp.gather(x.reshape(-1)).view(tp.axis.size, *x.shape)
    return torch.cat(parts.unbind(), dim)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Collectives) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over(ctx.tp, grad), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Collectives) -> Tensor:
        return sum_over(tp, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Collectives) -> Tensor:
        ctx.tp = tp
        return gather(tp, x, SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_parts(ctx.tp, grad, SEQUENCE), None


class _SumPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Collectives) -> Tensor:
        ctx.tp = tp
        return sum_parts(tp, x, SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather(ctx.tp, grad, SEQUENCE), None


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Collectives) -> Tensor:
        ctx.tp = tp
        return gather(tp, x, _COLUMNS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # What is computed of all columns, every rank computes alike.
        return grad.chunk(ctx.tp.axis.size, _COLUMNS)[ctx.tp.axis.rank], None
