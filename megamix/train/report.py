"""From the values of single steps to what a log interval reports."""

import resource
import time

import torch

from megamix.clock import Clock
from megamix.train.metrics import StepMetrics
from megamix.train.readout import StepValues


def peak_memory_gib(device: torch.device) -> float:
    """Peak of this rank: allocated on its GPU, or resident on the host where it computes there."""
    if device.type == "cuda":  # pragma: CUDA only
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


class IntervalReport:
    """Turns the wall time and the spans between two log lines into rates and shares."""

    def __init__(self, clock: Clock, tokens_per_step: int, steps: int, mfu_per_token_rate: float | None):
        """`mfu_per_token_rate`: operations per token / peak of all ranks' devices; None where no peak is known."""
        self._clock, self._tokens_per_step, self._steps = clock, tokens_per_step, steps
        self._mfu_per_token_rate = mfu_per_token_rate
        clock.enabled = True
        self._start_s, self._done = time.perf_counter(), 0

    def metrics(self, done: int, values: StepValues, *, scaled: bool, device: torch.device) -> StepMetrics:
        """`done`: steps ended by now (a few more than the step that `values` are of); `scaled`: there is a loss
        scale.
        """
        now_s = time.perf_counter()
        seconds, steps = now_s - self._start_s, done - self._done
        spans = self._clock.read()
        tokens_per_s = steps * self._tokens_per_step / seconds
        self._start_s, self._done = now_s, done
        return StepMetrics(
            loss=values.loss,
            lr=values.lr,
            grad_norm=values.grad_norm,
            loss_scale=values.loss_scale if scaled else None,
            skipped_steps=values.skipped_steps,
            tokens_per_s=tokens_per_s,
            mfu=None if self._mfu_per_token_rate is None else self._mfu_per_token_rate * tokens_per_s,
            memory_gib=peak_memory_gib(device),
            data_share=spans.get("data", 0.0) / seconds,
            forward_backward_share=spans.get("forward_backward", 0.0) / seconds,
            reduce_scatter_share=spans.get("exposed_reduce_scatter", 0.0) / seconds,
            update_share=spans.get("update", 0.0) / seconds,
            all_gather_share=spans.get("exposed_all_gather", 0.0) / seconds,
            eta_s=(self._steps - done) * seconds / steps,
        )

    def pause(self) -> None:
        """Do not count what happened since the last line's end up to now (a validation)."""
        self._paused_s = time.perf_counter()

    def resume(self) -> None:
        self._start_s += time.perf_counter() - self._paused_s
