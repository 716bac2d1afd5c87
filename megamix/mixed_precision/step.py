"""The step under way on one rank, and its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamix.base.records import Listener, Reduce


def put_table(table: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers by update on the device, (updates,), or (), without waiting for them."""
    if len(table) == 1:
        return torch.full((), table[0], dtype=dtype, device=device)  # a kernel; a copy would wait
    host = torch.tensor(table, dtype=dtype, device="cpu")
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def entry(table: Tensor, update: Tensor) -> Tensor:
    """Return the number of an update; updates past the table's end get its last one.

    Shapes: table (updates,) or (), update (), a whole number, 1 for the first -> ().
    """
    if not table.dim():
        return table
    place = (update - 1).clamp(max=table.numel() - 1).long()
    return table.index_select(0, place.view(1)).view(())


@dataclass(frozen=True, slots=True, eq=False)
class Examination:
    """The tables of one examined step on one rank, as device tensors."""

    param_names: tuple[str, ...]  # in registration order, the order of `local`
    layers: tuple[str, ...]  # in the order of their first parameters
    # FP64 (micro-batches, parameters, 3): this rank's own gradient of each micro-batch, before it is added to any
    # other, loss scale included. Columns: number of inf elements, number of NaN elements, max abs (NaN if an element
    # is NaN).
    local: Tensor
    # INT64 (layers, 256): the gradient that the step reads (summed over ranks and micro-batches, loss scale included),
    # counted by biased exponent of FP32. Bin e: 2^(e - 127) <= |g| < 2^(e - 126); bin 0: zero and FP32's subnormals;
    # bin 255: inf and NaN. Every element that this rank owns is in one bin, padding in none.
    exponents: Tensor
    zeros: Tensor  # INT64 (layers,): exact zeros of that gradient
    # INT64 (layers, 2): number of master elements that the update changed, and how many of them left the half copy as
    # it was.
    updates: Tensor


class Recorded(NamedTuple):
    """Holds the values that one rank has recorded in a step. A name without values was recorded in an earlier step."""

    names: tuple[tuple[str, Reduce], ...]
    table: Tensor  # FP32 (names, 2): sum, maximum or minimum of each name's values, and their number
    num_values: Tensor  # FP64 (): number of values of all names; in a `StepResult` those of all ranks

    def values(self) -> dict[str, Tensor]:
        """Return this rank's own values, FP32 () each, without waiting for the device; NaN or 0 for a name without
        values.
        """
        rows = zip(self.names, self.table, strict=True)
        return {name: row[0] / row[1] if reduce == "mean" else row[0] for (name, reduce), row in rows}


class StepResult(NamedTuple):
    """Holds a step's results as device tensors. Reading one waits for the device, so keep them until the value is
    needed.
    """

    loss: Tensor  # FP32 (): the mean over ranks and micro-batches, by weight, without the loss scale
    found_inf: Tensor  # bool (): True: nothing was changed
    grad_norm: Tensor  # FP32 (): norm of the averaged, unscaled gradient, before clipping
    max_abs: Tensor  # FP32 (): of the summed, scaled gradient; a half sum's headroom is its distance to 65504
    loss_scale: Tensor  # FP32 (): the loss scale of this step's backward
    lr: Tensor  # FP32 ()
    stop_requested: Tensor  # FP64 (): the largest of all ranks' `engine.stop_request`; 0: no rank asks to stop
    by_piece: Tensor  # FP64 (2, pieces): sum of squares and max abs of each of this rank's `engine.plan.pieces`
    peak_rows: Tensor  # INT64 (2, pieces of experts): the first and last rows of max abs in each of these pieces
    recorded: Recorded  # values given to `megamix.record`
    tallied: Mapping[str, Tensor]  # counts of all ranks by the name of their `Counts` or `Tally`, FP32 (size,)
    examination: Examination | None = None  # set after `engine.examine_next_step()`

    def __repr__(self) -> str:
        """Return the numbers of the step in a line; waits for the device. Tables stay out."""
        names = ("loss", "grad_norm", "max_abs", "loss_scale", "lr")
        numbers = [f"{name}={float(getattr(self, name)):.6g}" for name in names]
        return f"StepResult({', '.join(numbers)}, found_inf={bool(self.found_inf)})"


class StepProgress(Listener):
    """Tracks how far this rank's step is, from its first micro-batch to `engine.step()`.

    `scale_used` FP32 (): the loss scale of this step's backward. `loss_sum` FP32 () and `weight_sum` FP64 (): sums over
    the losses so far that this rank counts, without the loss scale. `micro_batches`: the number of micro-batches so
    far.
    `recorded_rows`: the rows of `Recorded.table`.
    """

    def __init__(self, grad_accum_steps: int, device: torch.device, listens: Callable[[], bool], num_parts: int = 1):
        """Begin before the first step. `num_parts`: number of ranks whose losses are parts of one loss."""
        super().__init__(device, listens)
        self.grad_accum_steps, self._num_parts = grad_accum_steps, num_parts
        self.micro_batches, self._ended = 0, False
        self.examined = False  # True: this step is examined, or the next one will be
        self.shows_average = False  # True: the half parameters are casts of the average, for reads alone
        self.scale_used = torch.ones((), dtype=torch.float32, device=device)
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=device)
        self.weight_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._nothing = Recorded((), self.loss_sum.new_zeros(0, 2), torch.zeros_like(self.weight_sum))
        self._busy = threading.Lock()

    @contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """Run one call that continues the step; refuse others inside the block, by other threads or by hooks. Raises:
        RuntimeError if a call is under way already, or the average is shown.
        """
        self._refuse_average(call)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"{call} is called while a backward or step of the same engine is under way, in another thread or "
                "from a hook: call one after the other"
            )
        try:
            yield
        finally:
            self._busy.release()

    def recorded(self) -> Recorded:
        if not self.recorded_rows:
            return self._nothing
        table = torch.stack([*self.recorded_rows.values()])
        return Recorded(tuple(self.recorded_rows), table, table[:, 1].sum().double())

    def require_complete(self, call: str) -> None:
        if not self._ended and self.micro_batches < self.grad_accum_steps:
            raise RuntimeError(
                f"{call} needs {self.grad_accum_steps} backward() calls (grad_accum_steps), got {self.micro_batches}; "
                "to end a step with fewer, call backward(loss, last=True)"
            )

    def require_empty(self, call: str, when: str, *, reads: bool = False) -> None:
        """Refuse a call in the middle of a step and, unless it `reads` the parameters that are shown, one while these
        are averages. Raises: RuntimeError.
        """
        if not reads:
            self._refuse_average(call)
        if self.micro_batches:
            raise RuntimeError(f"{call} after {self.micro_batches} backward() calls of a step; call it {when}")

    def _refuse_average(self, call: str) -> None:
        if self.shows_average:
            raise RuntimeError(
                f"{call} inside WeightAverage.weights(), where weights are only read: end the block first, which "
                "brings the trained weights back"
            )

    def require_room(self, micro_batches: int) -> None:
        """Refuse micro-batches that the step has no room for. Raises: RuntimeError."""
        if self._ended or self.micro_batches + micro_batches > self.grad_accum_steps:
            given = f"{self.micro_batches} times already" + (", with last=True" if self._ended else "")
            raise RuntimeError(
                f"backward() was called {given}, {micro_batches} more is too many for "
                f"grad_accum_steps {self.grad_accum_steps}; call step() now, or discard_step() to begin the step again"
            )

    def begin(self, scale: Tensor) -> None:
        """Reset the sums for a step whose losses are multiplied by `scale`, FP32 ()."""
        self.scale_used.copy_(scale)
        self.loss_sum.zero_()
        self.weight_sum.zero_()

    def scaled(self, loss: Tensor, weight: float, *, counts: bool) -> Tensor:
        """Return the tensor to back-propagate for a micro-batch's loss. `counts`: the loss is added to the step's loss;
        among the ranks that compute one loss together, one counts it.

        The mean of a part is divided by the number of parts. So half gradients are as large as if one rank computed the
        whole loss.
        """
        part = loss.float() / self._num_parts if self._num_parts > 1 else loss.float()
        if counts:
            self.loss_sum += part.detach().view(())
            self.weight_sum += weight / self._num_parts
        return part * self.scale_used

    def factor(self) -> Tensor:
        """Return what a loss is multiplied by in this step's backward, FP32 ()."""
        return self.scale_used / self._num_parts

    def add(self, micro_batches: int, last: bool) -> bool:
        """Add to the number of micro-batches; return whether the step is complete. `last`: the step ends with these
        micro-batches, even if there are fewer than `grad_accum_steps`.
        """
        self.micro_batches += micro_batches
        self._ended = last
        return self._ended or self.micro_batches == self.grad_accum_steps

    def reset(self) -> None:
        for row in self.recorded_rows.values():
            row.zero_()
        self.micro_batches, self._ended = 0, False


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
