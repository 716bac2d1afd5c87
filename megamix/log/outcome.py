"""The outcome of a step, read on the host some attempts later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.mixed_precision.step import HostNumbers, Recorded, StepResult


class Outcome(NamedTuple):
    """Outcome of one attempt, on the host."""

    loss: float  # nats per token, mean over the global batch
    found_inf: bool
    grad_norm: float
    loss_scale: float  # loss scale that the attempt used; 1.0 without one
    lr: float
    stop_requested: int  # reason for which a rank wants to leave; 0: none does
    by_piece: Tensor  # FP64 (2, pieces), as in StepResult
    peak_rows: Tensor  # FP64 (2, pieces of experts), as in StepResult
    recorded: Recorded  # as in StepResult
    tallied: Mapping[str, Tensor]  # as in StepResult, FP64


_SCALARS = Outcome._fields[:-4]  # fields of a step's result in front of by_piece


def _tables(result: StepResult) -> list[Tensor]:
    recorded = result.recorded
    return [result.by_piece, result.peak_rows, recorded.table, recorded.num_values, *result.tallied.values()]


class Readout:
    """Copies of steps' results in host memory, written without waiting."""

    def __init__(self, device: torch.device):
        self._device = device
        self._written = dict[int, tuple[StepResult, HostNumbers]]()  # by attempt, until it is read

    def write(self, attempt: int, result: StepResult) -> None:
        """Start copying the values that a step has returned."""
        scalars = torch.stack([getattr(result, name).double() for name in _SCALARS])
        values = torch.cat([scalars, *(table.double().flatten() for table in _tables(result))])
        numbers = HostNumbers(values.shape, self._device)
        numbers.write(values)
        self._written[attempt] = result, numbers

    def read(self, attempt: int) -> Outcome:
        """Return the outcome of an attempt. Waits until its step has ended on the device."""
        result, numbers = self._written.pop(attempt)
        values = torch.from_numpy(numbers.read())
        tables = _tables(result)
        scalars, *parts = torch.split(values, [len(_SCALARS), *(table.numel() for table in tables)])
        shaped = [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]
        by_piece, peak_rows, table, num_values, *counts = shaped
        recorded = Recorded(result.recorded.names, table, num_values)
        tallied = dict(zip(result.tallied, counts, strict=True))
        told = dict(zip(_SCALARS, scalars.tolist(), strict=True))
        told |= {"found_inf": bool(told["found_inf"]), "stop_requested": int(told["stop_requested"])}
        return Outcome(**told, by_piece=by_piece, peak_rows=peak_rows, recorded=recorded, tallied=tallied)
