"""From the values of single steps to what a log interval reports."""

import math
import resource
import time
from dataclasses import dataclass, field

import torch

from megamix.clock import Clock
from megamix.train.metrics import StepMetrics
from megamix.train.readout import Outcome


def peak_memory_gib(device: torch.device) -> float:
    """Peak of this rank: allocated on its GPU, or resident on the host where it computes there."""
    if device.type == "cuda":  # pragma: CUDA only
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


@dataclass(frozen=True, slots=True)
class _Rates:
    """One attempt of the last interval, on average."""

    step_s: float = math.inf
    span_s: dict[str, float] = field(default_factory=dict)

    def share(self, name: str) -> float:
        return self.span_s.get(name, 0.0) / self.step_s


class IntervalReport:
    """Turns the wall time and the spans between two log lines into rates and shares."""

    def __init__(self, clock: Clock, tokens_per_step: int, updates: int, mfu_per_token_rate: float | None):
        """`mfu_per_token_rate`: operations per token / peak of all ranks' devices; None where no peak is known."""
        self._clock, self._tokens_per_step, self._updates = clock, tokens_per_step, updates
        self._mfu_per_token_rate = mfu_per_token_rate
        clock.enabled = True
        self._start_s, self._done = time.perf_counter(), 0
        self._rates = _Rates()
        self._losses: list[float] = []

    @property
    def losses(self) -> list[float]:
        """Of the interval so far."""
        return [*self._losses]

    def go_on_from(self, attempts: int, losses: list[float]) -> None:
        """Take up a run that has launched `attempts` and, since its last line, has had these losses."""
        self._done, self._losses = attempts, [*losses]

    def add(self, loss: float) -> None:
        """Take an applied update's loss into the interval's mean."""
        self._losses.append(loss)

    def metrics(
        self, update: int, attempts: int, outcome: Outcome, skipped: int, *, scaled: bool, device: torch.device
    ) -> StepMetrics:
        """The interval that ends with `update`, whose outcome is given. `attempts`: launched by now, some of them
        after it; `skipped`: overflowed so far; `scaled`: there is a loss scale.
        """
        if attempts > self._done:  # else, at the end of the run, two lines are due at once: the rates are the same
            self._measure(attempts)
        losses, self._losses = self._losses, []
        rates = self._rates
        tokens_per_s = self._tokens_per_step / rates.step_s
        return StepMetrics(
            loss=math.fsum(losses) / len(losses),
            lr=outcome.lr,
            grad_norm=outcome.grad_norm,
            loss_scale=outcome.loss_scale if scaled else None,
            skipped_steps=skipped,
            tokens_per_s=tokens_per_s,
            mfu=None if self._mfu_per_token_rate is None else self._mfu_per_token_rate * tokens_per_s,
            memory_gib=peak_memory_gib(device),
            data_share=rates.share("data"),
            forward_backward_share=rates.share("forward_backward"),
            reduce_scatter_share=rates.share("exposed_reduce_scatter"),
            update_share=rates.share("update"),
            all_gather_share=rates.share("exposed_all_gather"),
            eta_s=(self._updates - update) * rates.step_s,
        )

    def pause(self) -> None:
        """Leave out of the interval what happens from now on (a validation), until `resume`."""
        self._paused_s = time.perf_counter()
        self._clock.enabled = False

    def resume(self) -> None:
        self._start_s += time.perf_counter() - self._paused_s
        self._clock.enabled = True

    def _measure(self, attempts: int) -> None:
        now_s = time.perf_counter()
        steps = attempts - self._done
        seconds = {name: span_s / steps for name, span_s in self._clock.read().items()}
        self._rates = _Rates((now_s - self._start_s) / steps, seconds)
        self._start_s, self._done = now_s, attempts
