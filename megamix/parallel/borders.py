"""The collectives at the beginning and end of a divided layer. They are awaited at once; every rank gets the same bits.

Between two borders a rank computes with plain tensors. So the modules and operations of `megamix/model` are those of
one process, and none of them meets a distributed tensor.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives
from megamix.model.wide import Crossing, apply

SEQUENCE = -2  # the dim of positions in activations (B, T, hidden)


class Border:
    """The collectives around each divided layer of one model.

    `sequence`: between divided layers every rank has a part of the positions; otherwise each has all positions. Both
    ways move the same bytes, since an all-reduce is a reduce-scatter and an all-gather.
    """

    def __init__(self, tp: Collectives, *, sequence: bool):
        self.tp, self.sequence = tp, sequence
        self._divides = sequence
        # A compiled block is cut into several graphs at its borders, because the compiler can trace only some
        # collectives of some backends. `disable` is called here and not at import, because it imports the compiler,
        # which takes 2 s.
        self._cross: Callable[..., Tensor] = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]  # untyped in torch

    def begin(self, num_positions: int) -> None:
        """Begin a forward. Positions are divided only if gradients are on, because `generate` takes prompts of any
        length.

        Raises: ValueError if positions must be divided and `num_positions` does not divide by the ranks.
        """
        self.sequence = self._divides and torch.is_grad_enabled()
        if self.sequence and num_positions % self.tp.axis.size:
            raise ValueError(
                f"tokens has {num_positions} positions, which {self.tp.axis.size} tensor-parallel ranks cannot divide; "
                "train on a length that they do, or build the model with sequence_parallel=False"
            )

    def enter(self, x: Tensor) -> Tensor:
        """Return all positions on every rank. Shapes: (B, T or T / tp_size, hidden) -> (B, T, hidden)."""
        if self.sequence:
            return self._cross(Crossing, x, self._gather, self._sum_positions)
        return self._cross(Crossing, x, _same, self._sum)

    def leave(self, x: Tensor) -> Tensor:
        """Sum over the ranks. Shapes: (B, T, hidden) -> (B, T or T / tp_size, hidden)."""
        if self.sequence:
            return self._cross(Crossing, x, self._sum_positions, self._gather)
        return self._cross(Crossing, x, self._sum, _same)

    def join_columns(self, x: Tensor) -> Tensor:
        """Put every rank's columns side by side. Shapes: (..., n) -> (..., n * tp_size)."""
        # Every rank computes the same from all columns, so all ranks have the same gradient. Each takes its own columns
        # of this gradient.
        return self._cross(Crossing, x, partial(self._gather, dim=-1), lambda grad: self._own(grad, -1))

    def own_positions(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's positions of `x`, whose `dim` has an entry for every position: its chunk with `sequence`,
        else all of `x`.
        """
        return self._own(x, dim) if self.sequence else x

    def _own(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.tp.axis.size, dim)[self.tp.axis.rank]

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, of any shape. If the backend lets us choose, it is computed in FP32, in rank
        order, and rounded once.
        """
        return self.tp.sum_whole(x.reshape(-1)).view(x.shape)

    def _sum_positions(self, x: Tensor) -> Tensor:
        parts = torch.stack(x.chunk(self.tp.axis.size, SEQUENCE))
        return self.tp.sum_parts(parts.view(self.tp.axis.size, -1)).view(parts.shape[1:])

    def _gather(self, x: Tensor, dim: int = SEQUENCE) -> Tensor:
        parts = self.tp.gather(x.reshape(-1)).view(self.tp.axis.size, *x.shape)
        return torch.cat(parts.unbind(), dim)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
