"""The metrics of every run: StepMetrics declares each, with its tag and its words in the log; IntervalReport computes
them from a log interval. This module imports no torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from megamix.base.console import format_scale

if TYPE_CHECKING:
    from megamix.base.clock import Clock
    from megamix.log.outcome import Outcome

# Where a metric stands in the log: in each line; in a detailed line's second line, ahead of the others or among them;
# in its third line, of shares of the time.
EACH, AHEAD, VALUES, SHARES = range(4)


def _metric(
    tag: str, place: int | None = None, words: Callable[[Any], str] = str, absent: str = "", *, of_scale: bool = False
) -> Any:
    """Declare a metric. `tag`: in metrics.jsonl and TensorBoard. `place`: None is in no line; those of one place stand
    in the order of their declaration. `absent`: the words for None. `of_scale`: a run without a loss scale tells it
    only once it is not 0.
    """
    return field(metadata={"tag": tag, "place": place, "words": words, "absent": absent, "of_scale": of_scale})


def _scale(loss_scale: float) -> str:
    return f"scale {format_scale(loss_scale)}"


def _eta(seconds: float) -> str:
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"eta {hours}:{minutes:02}:{whole_seconds:02}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one log interval, as of its last update."""

    loss: float = _metric("train/loss", EACH, "loss {:.4f}".format)  # nats per token
    lr: float = _metric("optim/lr", EACH, "lr {:.2e}".format)
    # Before clipping, without the loss scale.
    grad_norm: float = _metric("optim/grad_norm", EACH, "grad_norm {:.3f}".format)
    # None: the run has no loss scale.
    loss_scale: float | None = _metric("optim/loss_scale", EACH, _scale)
    # Attempts that overflowed, since the start of the run.
    skipped_steps: int = _metric("optim/skipped_steps", VALUES, "overflows {}".format, of_scale=True)
    tokens_per_s: float = _metric("throughput/tokens_per_s", EACH, "{:,.0f} tokens/s".format)  # tokens of all ranks
    # 0 to 1. None: the device's peak is not known.
    mfu: float | None = _metric("throughput/mfu", VALUES, "mfu {:.1%}".format, "mfu n/a")
    memory_gib: float = _metric("memory/peak_gib", VALUES, "memory {:.2f} GiB".format)  # peak of this rank
    # Shares of wall time, 0 to 1. A transfer's is the time for which the step waited, without what ran beside compute.
    data_share: float = _metric("time_share/data", SHARES, "data {:.0%}".format)
    forward_backward_share: float = _metric("time_share/forward_backward", SHARES, "fwd+bwd {:.0%}".format)
    reduce_scatter_share: float = _metric("time_share/exposed_reduce_scatter", SHARES, "reduce-scatter {:.0%}".format)
    update_share: float = _metric("time_share/update", SHARES, "update {:.0%}".format)
    all_gather_share: float = _metric("time_share/exposed_all_gather", SHARES, "all-gather {:.0%}".format)
    eta_s: float = _metric("time/eta_s", AHEAD, _eta)

    def words(self, place: int) -> list[str]:
        """Return what the log tells at a place."""
        told = list[str]()
        for known in fields(self):
            how, value = known.metadata, getattr(self, known.name)
            left_out = how["of_scale"] and self.loss_scale is None and not value
            if how["place"] == place and not left_out:
                told.append(how["absent"] if value is None else how["words"](value))
        return [words for words in told if words]


class IntervalReport:
    """Computes the metrics of a log interval, from what is measured between two log lines."""

    def __init__(self, clock: Clock, tokens_left: Callable[[int], int], mfu_per_token_rate: float | None):
        """Start the first interval.

        `tokens_left`: the tokens of all updates after the first n. `mfu_per_token_rate`: operations per token / peak of
        all ranks' devices; None if no peak is known.
        """
        self._clock, self._tokens_left = clock, tokens_left
        self._mfu_per_token_rate = mfu_per_token_rate
        clock.enabled = True
        self._start_s = time.perf_counter()
        self._attempts = self._attempted = 0  # attempts of the interval so far, and their tokens
        # The last interval had so many tokens a second; an attempt took so many seconds on average, and each span.
        self._tokens_per_s, self._step_s, self.span_s = 0.0, math.inf, dict[str, float]()
        self.losses = list[float]()  # losses of the interval so far
        self.tokens = 0  # tokens of all updates so far

    def launched(self, tokens: int) -> None:
        """Take an attempt into the interval's rates."""
        self._attempts += 1
        self._attempted += tokens

    def add(self, loss: float, tokens: int) -> None:
        """Take an applied update's loss into the interval's mean. `tokens`: those of the update."""
        self.losses.append(loss)
        self.tokens += tokens

    def metrics(self, update: int, outcome: Outcome, skipped: int, *, scaled: bool, memory_gib: float) -> StepMetrics:
        """Return the metrics of the interval that ends with `update`, whose outcome is given.

        `skipped`: overflowed so far. `scaled`: there is a loss scale.
        """
        if self._attempts:  # at the end of a run two lines may be due at once; the second repeats the rates
            now_s = time.perf_counter()
            took_s = now_s - self._start_s
            self._tokens_per_s, self._step_s = self._attempted / took_s, took_s / self._attempts
            self.span_s = {name: span_s / self._attempts for name, span_s in self._clock.read().items()}
            self._start_s, self._attempts, self._attempted = now_s, 0, 0
        losses, self.losses = self.losses, []
        tokens_per_s = self._tokens_per_s
        return StepMetrics(
            loss=math.fsum(losses) / len(losses),
            lr=outcome.lr,
            grad_norm=outcome.grad_norm,
            loss_scale=outcome.loss_scale if scaled else None,
            skipped_steps=skipped,
            tokens_per_s=tokens_per_s,
            mfu=None if self._mfu_per_token_rate is None else self._mfu_per_token_rate * tokens_per_s,
            memory_gib=memory_gib,
            data_share=self._share("data"),
            forward_backward_share=self._share("forward_backward"),
            reduce_scatter_share=self._share("exposed_reduce_scatter"),
            update_share=self._share("update") + self._share("exposed_agreement"),
            all_gather_share=self._share("exposed_all_gather"),
            eta_s=self._tokens_left(update) / tokens_per_s,
        )

    def pause(self) -> None:
        """Leave the time from now until `resume` out of the interval: a validation, for example."""
        self._paused_s = time.perf_counter()
        self._clock.enabled = False

    def resume(self) -> None:
        self._start_s += time.perf_counter() - self._paused_s
        self._clock.enabled = True

    def _share(self, span: str) -> float:
        return self.span_s.get(span, 0.0) / self._step_s
