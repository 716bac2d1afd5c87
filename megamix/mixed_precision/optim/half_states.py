"""Stochastic rounding of moments in BF16. With rounding to nearest some moments would never move; rounding by chance is
right on average.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from megamix.settings.limits import Limits

# A moment moves by (1 - beta) of itself when the gradient is zero, and half a unit of BF16 is up to 2^-8 of the moment:
# a moment that moves by less stays for ever. The limit is four times that, because a moment that moves by little more
# is far from its average, too.
_MOVES = 2.0**-6

_KEPT = -(2**16)  # mask for the upper half of FP32's bits, which is BF16


class _WideRange(Limits):
    """Annotates a dtype that must have FP32's range."""

    def require(self, value: object) -> None:
        if value not in (torch.float32, torch.bfloat16):
            raise ValueError("must be torch.float32 or torch.bfloat16")


StateDtype = Annotated[torch.dtype, _WideRange()]


def needs_chance(beta: float) -> bool:
    """Return whether rounding to nearest in BF16 would stop a moment with this decay rate."""
    return 1 - beta < _MOVES


def by_chance(moment: Tensor, master: Tensor, update: Tensor) -> Tensor:
    """Round to one of the two neighbours in BF16, to the nearer one more often, so that the average is the moment.

    The chance is a hash of the element's own moment and master and of the update's number, so it does not depend on
    ranks, buckets or chunks. Zeros, values that BF16 holds exactly, inf and NaN stay. FP64, which checks the equation,
    is not rounded.
    Shapes: moment and master FP32 (n,), update FP32 () -> FP32 (n,), values of BF16.
    """
    if moment.dtype != torch.float32:
        return moment
    bits = moment.view(torch.int32)
    # Murmur3's finalizer (Appleby), twice: each input bit changes about half of the 16 bits that are taken.
    mixed = _mixed(_mixed(bits ^ update.view(torch.int32)) ^ master.view(torch.int32))
    rounded = (bits + (mixed & 0xFFFF)) & _KEPT
    return torch.where(moment.isfinite(), rounded.view(torch.float32), moment)


def _mixed(x: Tensor) -> Tensor:
    """Return murmur3's finalizer of each number. Shifts repeat the sign bit, so its copies are masked out. Shapes:
    INT32 (n,) -> INT32 (n,).
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)
