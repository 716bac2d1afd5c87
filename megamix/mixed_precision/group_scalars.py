"""The scalars of each group's equation, once a step: the group's settings at this update, on the device, and what the
optimizer makes of them.

All of it is a pure function of the number of the update, so nothing has to be saved, and a skipped step advances none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from megamix.mixed_precision.optim.optimizer import Optimizer
from megamix.mixed_precision.step import entry, put_table
from megamix.mixed_precision.update_slice import StepScalars, Table, Tensors, UpdateGroup, UpdateScalars


class GroupScalars:
    """Makes the scalars of all groups, when the first part of a step asks for them."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[UpdateGroup], device: torch.device):
        self._optimizer, self._groups = optimizer, groups
        self._lr_factors = [torch.tensor(group.lr_factor, device=device) for group in groups]
        tables = {table for group in groups for table in group.tables}
        self._tables = {table: _OnDevice(table, device) for table in tables}
        self._of: tuple[Tensor, Tensor] | None = None  # lr and number of the step for which they were made
        self._made = list[UpdateScalars]()

    def of(self, step: StepScalars) -> list[UpdateScalars]:
        """Return each group's scalars."""
        if self._of is None or self._of[0] is not step.lr or self._of[1] is not step.update:
            self._of = step.lr, step.update
            number = step.update.double()
            known = dict[object, Tensors]()  # most groups differ in lr and weight decay alone
            self._made = [
                self._scalars(group, step.lr * factor, number, known)
                for group, factor in zip(self._groups, self._lr_factors, strict=True)
            ]
        return self._made

    def _scalars(self, group: UpdateGroup, lr: Tensor, update: Tensor, known: dict[object, Tensors]) -> UpdateScalars:
        key = group.betas, group.settings
        if key not in known:
            tables = self._tables
            values = group.values(lambda table: tables[table].at(update), lambda table: tables[table].product(update))
            known[key] = self._optimizer.coefficients(update, values)
        return UpdateScalars(lr, self._tables[group.weight_decay].at(update).float(), known[key])


class _OnDevice:
    """A table of numbers, FP64 (updates,)."""

    def __init__(self, table: Table, device: torch.device):
        self._values = put_table(table, device, torch.float64)
        self._before = put_table([*accumulate(table[:-1], mul, initial=1.0)], device, torch.float64)

    def at(self, update: Tensor) -> Tensor:
        """Return the number at an update, FP64 (). Shapes: update FP64 (), 1 for the first."""
        return entry(self._values, update) if len(self._values) > 1 else self._values.view(())

    def product(self, update: Tensor) -> Tensor:
        """Return the product of the numbers of all updates until this one, FP64 (). Shapes: as in `at`."""
        last = self._values[-1]
        if len(self._values) == 1:
            return last**update
        return entry(self._before, update + 1) * last ** (update - len(self._values) + 1).clamp(min=0.0)
