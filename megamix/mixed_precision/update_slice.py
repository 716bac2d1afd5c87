"""An update's arguments: a slice of a bucket's shard, what its parameters share, and what the step has decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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


@dataclass(slots=True, eq=False)
class UpdateSlice:
    """Neighbouring elements of one group, which an update changes in place: (n,) each, n a multiple of 64."""

    group: int
    grad: Tensor  # half or FP32: the sum over ranks and micro-batches, with the loss scale in it
    master: Tensor  # FP32
    states: States  # in their own dtypes
    half: Tensor  # takes the cast of the new master


Kernel = Callable[[UpdateSlice, StepScalars], None]
