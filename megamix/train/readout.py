"""The one place where the training loop reads the device: an attempt's outcome, a fixed number of attempts later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megamix.mixed_precision.settings import StepResult

_SCALARS = 6  # of a step's result, in front of by_piece


class Outcome(NamedTuple):
    """One attempt, on the host."""

    loss: float  # nats per token, mean over the global batch
    found_inf: bool
    grad_norm: float
    loss_scale: float  # the one it used
    lr: float
    stop_requested: int  # why a rank wants to leave; 0: none does
    by_piece: Tensor  # FP64 (2, pieces), as in StepResult


class Readout:
    """Slots of host memory of their own (pinned on a GPU), one per attempt in flight, written without waiting.

    A `.to("cpu")` would not do: on a CPU it is the live tensor, which the next step overwrites.
    """

    def __init__(self, device: torch.device, num_pieces: int, lag: int):
        self._pinned = device.type == "cuda"
        shape = (_SCALARS + 2 * num_pieces,)
        self._slots = [torch.empty(shape, dtype=torch.float64, pin_memory=self._pinned) for _ in range(lag)]
        self._events = [torch.cuda.Event() if self._pinned else None for _ in self._slots]  # type: ignore[no-untyped-call]

    def write(self, attempt: int, result: StepResult) -> None:
        """Start copying what a step has returned."""
        scalars = (
            result.loss, result.found_inf, result.grad_norm, result.loss_scale, result.lr, result.stop_requested,
        )  # fmt: skip
        values = torch.cat([torch.stack([scalar.double() for scalar in scalars]), result.by_piece.flatten()])
        slot = attempt % len(self._slots)
        self._slots[slot].copy_(values, non_blocking=True)
        event = self._events[slot]
        if event is not None:  # pragma: CUDA only
            event.record()

    def read(self, attempt: int) -> Outcome:
        """What was written for an attempt, of the last `lag`; waits until its step has ended on the device."""
        slot = attempt % len(self._slots)
        event = self._events[slot]
        if event is not None:  # pragma: CUDA only
            event.synchronize()
        loss, found_inf, grad_norm, loss_scale, lr, stop = self._slots[slot][:_SCALARS].tolist()
        by_piece = self._slots[slot][_SCALARS:].view(2, -1).clone()  # the slot is written again
        return Outcome(loss, bool(found_inf), grad_norm, loss_scale, lr, int(stop), by_piece)
