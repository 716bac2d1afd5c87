"""`megamix.record`: values that a forward, a loss, or code between two steps reports."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from megamix.base.values import has_values

Reduce = Literal["mean", "sum", "max", "min"]
JOIN: dict[Reduce, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,  # divided by their number at the end
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_TAG = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


class Listener:
    """The step to which a forward reports. `latest`: that of the engine whose forward began last, for `megamix.record`.

    `recorded_rows`: FP32 (2,) by name and reduce, a value and the number of values in it; the tensors stay from step to
    step, because compiled code refers to them. `listens()`: whether what is reported now is part of the step.
    """

    latest: ClassVar[Callable[[], Listener | None]] = lambda: None

    def __init__(self, device: torch.device, listens: Callable[[], bool]) -> None:
        self.recorded_rows: dict[tuple[str, Reduce], Tensor] = {}
        self.listens = listens
        self.device = device
        self.claim()

    def claim(self) -> None:
        """Make `megamix.record` report to this step from now on."""
        Listener.latest = weakref.ref(self)

    def follow(self, model: nn.Module) -> None:
        """Let each forward of `model` claim, also one that the engine does not call."""
        model.register_forward_pre_hook(_Claim(self))


class _Claim:
    """The hook of a module. In a copy or a pickle of the module it does nothing."""

    def __init__(self, step: Listener | None = None) -> None:
        self._step = (lambda: None) if step is None else weakref.ref(step)

    def __call__(self, module: nn.Module, args: object) -> None:
        # In a model that is compiled as a whole the hook is traced; `ShardedEngine.__call__` claims outside the graph.
        if not torch.compiler.is_compiling() and (step := self._step()) is not None:
            step.claim()

    def __reduce__(self) -> tuple[type[_Claim], tuple[()]]:
        return _Claim, ()


def record(name: str, tensor: Tensor, reduce: Reduce = "mean") -> None:
    """Report a value of this step from anywhere in a forward or a loss, or of the next step from between two steps.

    The mean, sum, maximum or minimum of all values of a name in a step is reported, over calls, micro-batches and
    ranks. Among tensor-parallel ranks only the first one's value enters a sum; with sequence parallelism that value
    covers only the positions of the first rank. Ranks that compute the same part of the model must record the same
    names. A job writes the values beside its own metrics; without a job they are in `StepResult.recorded`. The host
    does not wait. Values recorded in a backward, while the module is in `eval()`, without an engine, or in a trace,
    whose tensors have no values, do not count.
    Shapes: tensor (), kept as FP32.
    Raises: ValueError for a tensor that is no scalar, a name that is no tag, or another `reduce` than the name had
    before.
    """
    step = Listener.latest()
    traced = not torch.compiler.is_dynamo_compiling() and not has_values(tensor)  # such as a plan of the memory
    if step is None or traced or not step.listens():
        return
    if tensor.dim():
        raise ValueError(f"record({name!r}): must be of shape (), got {tuple(tensor.shape)}; pass its mean() or amax()")
    if (name, reduce) not in step.recorded_rows:
        _check(name, reduce, step.recorded_rows.keys())
        step.recorded_rows[name, reduce] = torch.zeros(2, dtype=torch.float32, device=step.device)
    row = step.recorded_rows[name, reduce]
    so_far, count = row
    value = tensor.detach().to(row)
    row.copy_(torch.stack([torch.where(count > 0, JOIN[reduce](so_far, value), value), count + 1]))


def _check(name: str, reduce: Reduce, known: Iterable[tuple[str, Reduce]]) -> None:
    if not _TAG.fullmatch(name):
        raise ValueError(f"record({name!r}): a name is letters, digits and . _ - between slashes, such as 'moe/load'")
    if reduce not in JOIN:
        raise ValueError(f"record({name!r}): reduce must be one of {', '.join(JOIN)}, got {reduce!r}")
    if before := dict(known).get(name):
        raise ValueError(f"record({name!r}): reduce was {before!r} before, got {reduce!r}; use another name")
