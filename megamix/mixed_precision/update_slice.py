"""An update's arguments: a slice of a bucket's shard, what its parameters share, and what the step has decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.mixed_precision.flat_layout import ROW

MASTER = "master"  # the name of the weights themselves among a parameter's states

Tensors = tuple[Tensor, ...]
States = dict[str, Tensor]  # by name


class UpdateGroup(NamedTuple):
    """Holds what the parameters of one group share."""

    lr_factor: float
    weight_decay: float
    states: tuple[tuple[str, torch.dtype], ...]

    def new_states(self, numel: int, device: torch.device) -> States:
        return {name: torch.zeros(numel, dtype=dtype, device=device) for name, dtype in self.states}

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one element's states."""
        return sum(dtype.itemsize for _, dtype in self.states)


class UpdateScalars(NamedTuple):
    """Holds what the equation needs besides tensors: FP32 () on the device, so that no value is baked into code."""

    lr: Tensor  # with the group's factor
    weight_decay: Tensor | float  # a number only where nothing is compiled
    coefficients: Tensors  # the optimizer's own


class StepScalars(NamedTuple):
    """Holds what a step decides once for all buckets: device scalars, never read by the host."""

    multiplier: Tensor  # FP32 (): clip coefficient / (loss_scale * sum of weights)
    found_inf: Tensor  # bool (): nothing may change
    lr: Tensor  # FP32 (), before a group's factor
    update: Tensor  # FP32 (): the number of this update, 1 for the first
    coefficients: Tensors  # FP32 (): the optimizer's, e.g. its bias corrections


@dataclass(eq=False)
class UpdateSlice:
    """Neighbouring elements of one group, which an update changes in place: (n,) each, n a multiple of ROW."""

    group: int
    grad: Tensor  # half or FP32: the sum over ranks and micro-batches, with the loss scale in it
    master: Tensor  # FP32
    states: States  # in their own dtypes
    half: Tensor | None  # takes the cast of the new master; None: nothing is written in half

    @cached_property
    def rows(self) -> UpdateSlice:
        """The same as the compiled loop takes it, made once for a slice that is updated in every step."""
        states = {name: as_rows(state) for name, state in self.states.items()}
        half = None if self.half is None else as_rows(self.half)
        return UpdateSlice(self.group, as_rows(self.grad), as_rows(self.master), states, half)


def as_rows(flat: Tensor, size: int = ROW // 2) -> Tensor:
    """View a span, or several of one length, as rows. Of a flat span the compiler knows no factor of its length, and
    loads and stores element by element on a GPU: 24 + 8 accesses where 7 + 7 of 128 bits move the same 8 elements. Two
    rows for each of the statistics, as a span of a single one would be compiled apart. Detached, for a view's base has
    a size of its own: spans of buckets of other sizes would be compiled again.
    Shapes: ([spans,] n) -> ([spans,] n / size, size).
    """
    rows = flat.view(*flat.shape[:-1], -1, size).detach()
    torch._dynamo.mark_static(rows, [*range(flat.dim() - 1), flat.dim()])
    return rows


Kernel = Callable[[UpdateSlice, StepScalars], None]
