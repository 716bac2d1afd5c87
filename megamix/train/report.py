"""From the values of single steps to what a log interval reports."""

import math
import resource
import time
from dataclasses import dataclass, field

import torch

from megamix.clock import Clock
from megamix.train.metrics import StepMetrics
from megamix.train.readout import StepValues


def peak_memory_gib(device: torch.device) -> float:
    """Peak of this rank: allocated on its GPU, or resident on the host where it computes there."""
    if device.type == "cuda":  # pragma: CUDA only
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


@dataclass(frozen=True, slots=True)
class _Rates:
    """One step of the last interval, on average."""

    step_s: float = math.inf
    span_s: dict[str, float] = field(default_factory=dict)

    def share(self, name: str) -> float:
        return self.span_s.get(name, 0.0) / self.step_s


class IntervalReport:
    """Turns the wall time and the spans between two log lines into rates and shares."""

    def __init__(self, clock: Clock, tokens_per_step: int, steps: int, mfu_per_token_rate: float | None):
        """`mfu_per_token_rate`: operations per token / peak of all ranks' devices; None where no peak is known."""
        self._clock, self._tokens_per_step, self._steps = clock, tokens_per_step, steps
        self._mfu_per_token_rate = mfu_per_token_rate
        clock.enabled = True
        self._start_s, self._done = time.perf_counter(), 0
        self._rates = _Rates()

    def metrics(self, done: int, values: StepValues, *, scaled: bool, device: torch.device) -> StepMetrics:
        """`done`: steps ended by now, some more than the step that `values` are of; `scaled`: there is a loss scale."""
        if done > self._done:  # else, at the end of the run, two lines are due at once: the rates are the same
            self._measure(done)
        rates = self._rates
        tokens_per_s = self._tokens_per_step / rates.step_s
        return StepMetrics(
            loss=values.loss,
            lr=values.lr,
            grad_norm=values.grad_norm,
            loss_scale=values.loss_scale if scaled else None,
            skipped_steps=values.skipped_steps,
            tokens_per_s=tokens_per_s,
            mfu=None if self._mfu_per_token_rate is None else self._mfu_per_token_rate * tokens_per_s,
            memory_gib=peak_memory_gib(device),
            data_share=rates.share("data"),
            forward_backward_share=rates.share("forward_backward"),
            reduce_scatter_share=rates.share("exposed_reduce_scatter"),
            update_share=rates.share("update"),
            all_gather_share=rates.share("exposed_all_gather"),
            eta_s=(self._steps - done) * rates.step_s,
        )

    def pause(self) -> None:
        """Leave out of the interval what happens from now on (a validation), until `resume`."""
        self._paused_s = time.perf_counter()
        self._clock.enabled = False

    def resume(self) -> None:
        self._start_s += time.perf_counter() - self._paused_s
        self._clock.enabled = True

    def _measure(self, done: int) -> None:
        now_s = time.perf_counter()
        steps = done - self._done
        seconds = {name: span_s / steps for name, span_s in self._clock.read().items()}
        self._rates = _Rates((now_s - self._start_s) / steps, seconds)
        self._start_s, self._done = now_s, done
