"""Counts of a step, which move a vector outside the gradient, such as the biases that balance experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


class Tally(nn.Module):
    """A vector outside the gradient. Each applied step moves it by what the step's whole global batch has counted.

    `value`: FP32 (size,), a buffer that begins at 0, is saved by its name, and is the same on every rank of a pipeline
    stage. `rule(value, counts)` returns its next value; all are FP32 (size,). A skipped step leaves every bit as it
    was. The engine that trains the module calls the rule; without one nothing is counted.
    """

    value: Tensor

    def __init__(self, size: int, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.rule = rule
        self.register_buffer("value", torch.zeros(size, dtype=torch.float32))
        self._counts: Tensor | None = None  # FP32 (size,): this rank's in the step under way, once there is an engine
        self._counting: Callable[[], bool] = bool

    def add(self, counts: Tensor) -> None:
        """Count in a forward, from any number of places. The host does not wait.

        Counts in evaluation, without gradients, and in a backward that repeats a forward do not count. The sum over
        ranks is one of FP32, which is exact for whole numbers below 2^24. Shapes: counts (size,), of any dtype.
        """
        if self._counts is not None and torch.is_grad_enabled() and self._counting():
            self._counts += counts.detach()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # half() would round the values, and to_empty() would lose them.
        before = self.value
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        device = self.value.device
        self.value = torch.zeros(before.shape, device=device) if before.is_meta else before.to(device)
        return self

    def connect(self, counts: Tensor, counting: Callable[[], bool]) -> None:
        """Count into `counts`, FP32 (size,), while `counting`."""
        self._counts, self._counting = counts, counting

    def __deepcopy__(self, memo: dict[int, Any]) -> Tally:
        """Return a copy that belongs to no engine."""
        copy = Tally(len(self.value), self.rule)
        copy.value = self.value.clone()
        return copy
