"""The one place where the training loop reads the device: values of a step, a fixed number of steps later."""

from typing import NamedTuple

import torch
from torch import Tensor

# Steps between writing a slot and reading it. A constant, never "if it is ready": every rank must act on a step's
# outcome at the same place of its loop. Two, so that the device always has a whole step queued while the host waits
# for an older one.
LAG = 2


class StepValues(NamedTuple):
    """One step, on the host."""

    loss: float  # nats per token; of a logged step the mean over ranks and interval, else of no meaning
    grad_norm: float
    loss_scale: float
    lr: float
    found_inf: bool
    skipped_steps: int  # since the start of the run


class Readout:
    """Slots of host memory of their own (pinned on a GPU), written without waiting and read LAG steps later.

    A `.to("cpu")` would not do: on a CPU it is the live tensor, which the next step overwrites.
    """

    def __init__(self, device: torch.device):
        pinned = device.type == "cuda"
        self._slots = [
            torch.empty(len(StepValues._fields), dtype=torch.float64, pin_memory=pinned) for _ in range(LAG + 1)
        ]
        self._events = [torch.cuda.Event() for _ in self._slots] if pinned else []  # type: ignore[no-untyped-call]

    def write(self, step: int, *values: Tensor) -> None:
        """Start copying a step's device scalars, in the order of StepValues."""
        slot = step % len(self._slots)
        self._slots[slot].copy_(torch.stack([value.double() for value in values]), non_blocking=True)
        if self._events:  # pragma: CUDA only
            self._events[slot].record()

    def read(self, step: int) -> StepValues:
        """The values of a step written at most LAG steps ago; waits until that step has ended on the device."""
        slot = step % len(self._slots)
        if self._events:  # pragma: CUDA only
            self._events[slot].synchronize()
        loss, grad_norm, loss_scale, lr, found_inf, skipped_steps = self._slots[slot].tolist()
        return StepValues(loss, grad_norm, loss_scale, lr, bool(found_inf), int(skipped_steps))
