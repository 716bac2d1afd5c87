"""Values of tensors: whether a tensor has any, and their way to the host."""

import sys
from typing import Any

import torch
from torch import Tensor


def has_values(x: Tensor) -> bool:
    """Return whether a tensor has values. A meta tensor and a fake one have a shape and a dtype alone."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # without it there are none; the import takes a second
    return not (x.is_meta or (fakes is not None and isinstance(x, fakes.FakeTensor)))


class HostNumbers:
    """Numbers on their way from the device into host memory (pinned on a GPU), read some steps later: no step waits."""

    def __init__(self, shape: tuple[int, ...], device: torch.device):
        """Begin with zeros."""
        self._on_gpu = device.type == "cuda"
        self._tensor = torch.zeros(shape, dtype=torch.float64, device="cpu", pin_memory=self._on_gpu)
        self._numbers = self._tensor.numpy()  # a view of the same memory
        self._arrived: torch.cuda.Event | None = None  # None: nothing is on its way

    def write(self, numbers: Tensor) -> None:
        """Start copying. Shapes: numbers FP64 (*shape)."""
        self._tensor.copy_(numbers, non_blocking=True)
        if self._on_gpu:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            self._arrived.record()

    def read(self) -> Any:
        """Return NumPy's array of the numbers. Waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._numbers
