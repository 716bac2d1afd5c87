"""Counts of a step, which may move a vector outside the gradient, such as the biases that balance experts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from megamix.base.records import Listener


class Counts(nn.Module):
    """Counts of a step's forwards, by place. They move no vector.

    The engine that trains the module sums the counts over the global batch, for `StepResult.tallied`; without one
    nothing is counted.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._step: weakref.ref[Listener] | None = None  # the engine's; a strong reference would keep its memory
        self._counts: Tensor | None = None  # FP32 (size,): this rank's in the step under way

    def add(self, counts: Tensor) -> None:
        """Count in a forward, from any number of places. The host does not wait.

        Counts in evaluation, without gradients, and in a backward that repeats a forward do not count. The sum over
        ranks is one of FP32, which is exact for whole numbers up to 2^24. Shapes: counts (size,), of any dtype.
        Raises: ValueError for another shape.
        """
        if counts.shape != (self.size,):
            raise ValueError(
                f"{type(self).__name__}.add: counts must be of shape {(self.size,)}, got {tuple(counts.shape)}; pass "
                "one number for each place"
            )
        step = None if self._step is None else self._step()
        if step is not None and self._counts is not None and torch.is_grad_enabled() and step.listens():
            self._counts += counts.detach()

    def connect(self, counts: Tensor, step: Listener) -> None:
        """Count into `counts`, FP32 (size,), while `step` listens."""
        self._counts, self._step = counts, weakref.ref(step)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: it belongs to no engine."""
        return vars(self) | {"_step": None, "_counts": None}


class Tally(Counts):
    """A vector outside the gradient. Each applied step moves it by what the step's whole global batch has counted.

    `value`: FP32 (size,), a buffer that begins at 0, is saved by its name, and is the same on every rank of a pipeline
    stage. `rule(value, counts)` returns its next value; all are FP32 (size,). A skipped step leaves every bit as it
    was. The engine that trains the module calls the rule; without one nothing is counted.
    """

    value: Tensor

    def __init__(self, size: int, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(size)
        self.rule = rule
        self.register_buffer("value", torch.zeros(size, dtype=torch.float32))

    def moved(self, value: Tensor, counts: Tensor) -> Tensor:
        """Return the value after `value`. The rule gets copies, which it may write: a skipped step must leave `value`.
        Shapes: FP32 (size,).
        """
        return self.rule(value.clone(), counts.clone())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # half() would round the values, and to_empty() would lose them.
        before = self.value
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        device = self.value.device
        self.value = torch.zeros_like(before, device=device) if before.is_meta else before.to(device)
        return self
