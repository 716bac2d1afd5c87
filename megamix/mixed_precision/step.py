"""What is under way of a step on this rank, and what a step tells when it is over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Examination:
    """The tables of one examined step on one rank. Device tensors; nothing here waits for the device."""

    param_names: tuple[str, ...]  # in registration order, which is that of `local`
    layers: tuple[str, ...]  # in the order of their first parameters
    # FP64 (micro-batches, parameters, 3): of this rank's own gradient of each micro-batch, before it is added to any
    # other, the scale in it: how many elements are inf, how many NaN, and max abs (NaN where there is one).
    local: Tensor
    # INT64 (layers, 256): of the gradient that the step reads (summed over ranks and micro-batches, the scale in it)
    # how many elements have each biased exponent of FP32. Bin e: 2^(e - 127) <= |g| < 2^(e - 126); bin 0: zero and
    # FP32's subnormals; bin 255: inf and NaN. Every element that this rank owns is in one bin, padding in none.
    exponents: Tensor
    zeros: Tensor  # INT64 (layers,): exact zeros among them
    # INT64 (layers, 2): master elements that the update changed, and of these the ones whose half copy it did not.
    updates: Tensor


Reduce = Literal["mean", "sum", "max", "min"]


class Rule(NamedTuple):
    """How the values of a name become one."""

    nothing: float  # the value before the first
    add: Callable[[Tensor, Tensor], Tensor]  # of what is there so far and one more
    combine: Callable[[Tensor], Tensor]  # of what the ranks have


RULES = {
    "mean": Rule(0.0, torch.add, torch.sum),  # divided at last
    "sum": Rule(0.0, torch.add, torch.sum),
    "max": Rule(-torch.inf, torch.maximum, torch.amax),
    "min": Rule(torch.inf, torch.minimum, torch.amin),
}


class Recorded(NamedTuple):
    """What one rank has recorded in a step. A name that has no values is of an earlier one."""

    names: tuple[tuple[str, Reduce], ...]
    table: Tensor  # FP32 (2, names): of each name's values the sum, the largest or the smallest, and their number
    num_values: Tensor  # FP64 (): of all names; in a `StepResult` of all ranks

    def values(self) -> dict[str, Tensor]:
        """Return this rank's own, FP32 () each, without waiting for the device. The mean of none is NaN."""
        columns = zip(self.names, *self.table, strict=True)
        return {name: so_far / count if reduce == "mean" else so_far for (name, reduce), so_far, count in columns}


class StepResult(NamedTuple):
    """Device tensors; reading one waits for the device, so keep them until the value is needed."""

    loss: Tensor  # FP32 (): the mean over ranks and micro-batches, by weight, without the scale
    found_inf: Tensor  # bool (): nothing was changed
    grad_norm: Tensor  # FP32 (): of the averaged, unscaled gradient, before clipping
    max_abs: Tensor  # FP32 (): of the summed, scaled gradient; of a half sum its distance to 65504 is the headroom
    loss_scale: Tensor  # FP32 (): the one this step's backward used
    lr: Tensor  # FP32 ()
    stop_requested: Tensor  # FP64 (): the largest of the ranks' `engine.stop_request`; 0: none asks
    by_piece: Tensor  # FP64 (2, pieces): sum of squares and max abs of each of this rank's `engine.piece_stats.pieces`
    recorded: Recorded  # what `megamix.record` was given
    examination: Examination | None = None  # of a step after `engine.examine_next_step()`


class Entry(NamedTuple):
    """The values of a name so far."""

    reduce: Reduce
    so_far: Tensor  # FP32 ()
    seen: Tensor  # FP32 (): how many values; a Python number would be baked into compiled code, anew for each value


class Records:
    """One engine's, of the step under way. Entries stay from step to step: compiled code holds on to them."""

    latest: ClassVar[Callable[[], Records | None]] = type(None)  # of the engine that was built or called last

    def __init__(self, module: nn.Module, device: torch.device):
        self.module, self.device = module, device
        self.entries: dict[str, Entry] = {}
        self.is_muted = False
        self._empty = torch.zeros(2, 0, dtype=torch.float32, device=device)
        self.claim()

    def claim(self) -> None:
        """Let `record` mean this engine from now on."""
        Records.latest = weakref.ref(self)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Around a backward, which may compute again what a forward has recorded."""
        self.is_muted = True
        try:
            yield
        finally:
            self.is_muted = False

    def recorded(self) -> Recorded:
        """Return a copy of what this step has so far."""
        entries = self.entries.values()
        cells = [entry.so_far for entry in entries] + [entry.seen for entry in entries]
        table = torch.stack(cells).view(2, -1) if cells else self._empty
        names = tuple((name, entry.reduce) for name, entry in self.entries.items())
        return Recorded(names, table, table[1].sum().double())

    def reset(self) -> None:
        for entry in self.entries.values():
            entry.so_far.fill_(RULES[entry.reduce].nothing)
            entry.seen.zero_()


class StepUnderWay:
    """The one place that knows how far this rank's step is, from its first micro-batch to `engine.step()`.

    `scale_used` FP32 (): the loss scale of this step's backward. `loss_sum` FP32 () and `weight_sum` FP64 (): of the
    losses so far that this rank counts, without the scale. `micro_batches`: how many are in.
    """

    def __init__(self, module: nn.Module, grad_accum_steps: int, device: torch.device):
        self.grad_accum_steps = grad_accum_steps
        self.micro_batches, self._ended = 0, False
        self.examination: Examination | None = None  # of this step, if it was asked for
        self.scale_used = torch.ones((), dtype=torch.float32, device=device)
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=device)
        self.weight_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.records = Records(module, device)

    def require_complete(self, call: str) -> None:
        if not self._ended and self.micro_batches < self.grad_accum_steps:
            raise RuntimeError(
                f"{call} needs {self.grad_accum_steps} backward() calls (grad_accum_steps), got {self.micro_batches}; "
                "to end a step with fewer, call backward(loss, last=True)"
            )

    def require_empty(self, call: str, when: str) -> None:
        if self.micro_batches:
            raise RuntimeError(f"{call} after {self.micro_batches} backward() calls of a step; call it {when}")

    def require_room(self, micro_batches: int) -> None:
        """Raises: RuntimeError if the step has no room for so many more."""
        if self._ended or self.micro_batches + micro_batches > self.grad_accum_steps:
            given = f"{self.micro_batches} times already" + (", with last=True" if self._ended else "")
            raise RuntimeError(
                f"backward() was called {given}, {micro_batches} more is too many for "
                f"grad_accum_steps {self.grad_accum_steps}; call step() now, or discard_step() to begin it anew"
            )

    def begin(self, scale: Tensor) -> None:
        """Begin the sums of a step whose losses are multiplied by `scale`, FP32 ()."""
        self.scale_used.copy_(scale)
        self.loss_sum.zero_()
        self.weight_sum.zero_()

    def scaled(self, loss: Tensor, weight: float, *, counts: bool) -> Tensor:
        """Return what is to be back-propagated of a micro-batch's loss. `counts`: it goes into the step's loss; of the
        ranks that compute one loss together, one counts it.
        """
        if counts:
            self.loss_sum += loss.detach().view(())
            self.weight_sum += weight
        return loss.float() * self.scale_used

    def add(self, micro_batches: int, last: bool) -> bool:
        """Note that so many more are in; return whether all are. `last`: the step ends with these, however few came
        before.
        """
        self.micro_batches += micro_batches
        self._ended = last
        return self._ended or self.micro_batches == self.grad_accum_steps

    def reset(self) -> None:
        """Let the next micro-batch be a step's first."""
        self.records.reset()
        self.micro_batches, self._ended = 0, False
