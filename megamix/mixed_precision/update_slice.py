"""Arguments of an update: a slice of a bucket's shard, the values its group shares, and the step's decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.mixed_precision.flat_layout import ROW

MASTER = "master"  # key of the master weights among a parameter's states
AVERAGE = "average"  # likewise of their average, if one is kept

Tensors = tuple[Tensor, ...]
Table = tuple[float, ...]  # one number for each update, or a single one for all; later updates use the last
States = dict[str, Tensor]  # by name of the state
Frozen = Mapping[int, Tensor]  # bool () by number of a group that some update freezes: this update does


def table_of(numbers: float | Sequence[float]) -> Table:
    """Return a number, or the numbers of a sequence, as a table."""
    return tuple(numbers) if isinstance(numbers, Sequence) else (numbers,)


def number_at(table: Table, update: int) -> float:
    """Return the number of an update, 1 for the first."""
    return table[min(update, len(table)) - 1]


def largest(numbers: Iterable[float | Sequence[float]]) -> float:
    """Return the largest of several numbers, some of which may have one for each update."""
    return max(chain.from_iterable(map(table_of, numbers)))


class UpdateGroup(NamedTuple):
    """Holds the values that the parameters of one group share."""

    lr_factor: Table  # 0: the group is frozen in that update
    weight_decay: Table
    states: tuple[tuple[str, torch.dtype], ...]
    betas: tuple[Table, ...] = ()  # of optimizers that have them
    settings: tuple[tuple[str, Table], ...] = ()  # the others of `Optimizer.group_settings`, by name
    limits: tuple[float | None, float | None] | None = None  # the least and the largest weight, if any

    @property
    def tables(self) -> list[Table]:
        """Return the numbers of all settings but the learning rate."""
        return [self.weight_decay, *self.betas, *dict(self.settings).values()]

    @property
    def is_scheduled(self) -> bool:
        """Return whether anything but the learning rate follows a schedule."""
        return max(map(len, self.tables)) > 1

    def values(self, at: Callable[[Table], Tensor], product: Callable[[Table], Tensor]) -> GroupValues:
        """Return the settings at one update. `at`, `product`: give a table's number at this update, and the product of
        its numbers of all updates of this group until this one.
        """
        betas, decayed = (tuple(map(of, self.betas)) for of in (at, product))
        return GroupValues(betas=betas, decayed=decayed, **{name: at(table) for name, table in self.settings})

    def new_states(self, numel: int, device: torch.device) -> States:
        return {name: torch.zeros(numel, dtype=dtype, device=device) for name, dtype in self.states}

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one element's states."""
        return sum(dtype.itemsize for _, dtype in self.states)


class GroupValues(SimpleNamespace):
    """Holds a group's settings at one update, FP64 () on the device: those of `Optimizer.group_settings`, by name."""

    betas: Tensors
    decayed: Tensors  # the product of each beta over all updates until this one: beta**update where it is constant


class UpdateScalars(NamedTuple):
    """Holds the scalars of the equation: FP32 () on the device, so that no value is baked into compiled code."""

    lr: Tensor  # group's factor included
    weight_decay: Tensor | float  # a number only in uncompiled code
    coefficients: Tensors  # what the optimizer's `coefficients` returned


class StepScalars(NamedTuple):
    """Holds the step's decisions, made once for all buckets: device scalars that the host never reads."""

    multiplier: Tensor  # FP32 (): clip coefficient / (loss_scale * sum of weights)
    found_inf: Tensor  # bool (): True: nothing may change
    lr: Tensor  # FP32 (): learning rate before a group's factor
    update: Tensor  # FP32 (): the number of this update, 1 for the first
    frozen: Frozen = MappingProxyType({})

    def holds(self, group: int) -> Tensor:
        """Return whether nothing of a group may change: bool ()."""
        return self.found_inf | self.frozen[group] if group in self.frozen else self.found_inf


@dataclass(eq=False)
class UpdateSlice:
    """Neighbouring elements of one group, which an update changes in place: tensors (n,), n a multiple of ROW."""

    group: int
    grad: Tensor  # half or FP32: the sum over ranks and micro-batches, loss scale included
    master: Tensor  # FP32
    states: States  # in their own dtypes
    half: Tensor | None  # receives the cast of the new master; None: nothing is written in half

    @cached_property
    def rows(self) -> UpdateSlice:
        """Return the same slice in the shape that the compiled loop takes, made once for a slice updated in
        every step.
        """
        states = {name: as_rows(state) for name, state in self.states.items()}
        half = None if self.half is None else as_rows(self.half)
        return UpdateSlice(self.group, as_rows(self.grad), as_rows(self.master), states, half)


def as_rows(flat: Tensor, size: int = ROW // 2) -> Tensor:
    """View a span, or several of one length, as rows.

    The compiler knows no divisor of a flat span's length, so on a GPU it would load and store element by element. With
    rows, 8 elements take 7 loads and 7 stores of 128 bits. A row here is half a row of the statistics, because a span
    of a single row would be compiled separately. The view is detached: the compiler looks at the size of a view's base,
    too, and would compile again for each size of a bucket.
    Shapes: ([spans,] n) -> ([spans,] n / size, size).
    """
    rows = flat.view(*flat.shape[:-1], -1, size).detach()
    torch._dynamo.mark_static(rows, [*range(flat.dim() - 1), flat.dim()])
    return rows


Kernel = Callable[[UpdateSlice, StepScalars], None]
