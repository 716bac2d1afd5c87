"""Overflows in words: gradients that were not finite, their origin and the remedy; and when a run should stop."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from megamix.base.console import format_scale
from megamix.config import PrecisionConfig
from megamix.launch.exit_status import EXIT_STATUS, EndedEarlyError, State
from megamix.log.culprits import Origins, ParamPeak, broken_masters, gather_origins, gather_peaks, headroom
from megamix.log.outcome import Outcome
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.examination import layers_of
from megamix.mixed_precision.step import Examination

_MOST_IN_LINE = 2  # parameters in a line of the log
_MOST_NAMES = 4  # parameters whose origin is reported
_MOST_LINES = 12  # lines of a report


def culprits(peaks: Sequence[ParamPeak]) -> list[ParamPeak]:
    """Return the parameters that made the step overflow, in about the order of backward, in which a fault spreads."""
    return [peak for peak in reversed(peaks) if peak.fault]


def overflow_words(loss: float, peaks: Sequence[ParamPeak]) -> str:
    """Return one line about one overflowed attempt: parameters, faults, and how near to an overflow the others were.

    `loss`: the attempt's mean over the global batch. `peaks`: all parameters, see `gather_peaks`.
    """
    found = culprits(peaks)
    if len(found) == len(peaks) and len({peak.fault for peak in found}) == 1:
        names = f"all {len(found)} parameters ({found[0].fault})"
    else:
        names = ", ".join(f"{peak.place} ({peak.fault})" for peak in found[:_MOST_IN_LINE])
        if len(found) > _MOST_IN_LINE:
            names += f" and {len(found) - _MOST_IN_LINE} more of {len(peaks)} parameters"
    words = names if math.isfinite(loss) else f"the loss is {loss}: {names}"
    rest = [peak for peak in peaks if not peak.fault]
    return f"{words}; {_nearest(rest)}" if rest else words


def _nearest(rest: Sequence[ParamPeak]) -> str:
    nearest = max(rest, key=lambda peak: peak.max_abs)
    octaves = headroom(nearest.max_abs)
    away = f", {octaves:.1f} octaves below 65504" if octaves >= 0 else ""
    return f"the largest of the others is {nearest.name} at {nearest.max_abs:.4g}{away}"


def cause(loss: float, peaks: Sequence[ParamPeak]) -> str:
    """Return the kind of the overflow and its remedy."""
    faults = {peak.fault for peak in culprits(peaks)}
    if not math.isfinite(loss):
        return (
            f"the loss itself is {loss}: the forward pass is at fault, and no loss scale cures that; lower the "
            'learning rate, look at the batch, or write precision.dtype = "bf16"'
        )
    if "NaN" in faults:
        return (
            "the loss is finite, but a gradient is NaN: inf - inf or 0 * inf in backward; where a lower loss scale "
            "does not help, look at the operations after the first parameter named"
        )
    if "inf" in faults:
        return (
            "the loss is finite, but a gradient went beyond its dtype's range: a lower loss scale helps until it is at "
            'its floor; then lower the learning rate, or write precision.dtype = "bf16"'
        )
    return (
        "loss and gradients are finite, but a gradient's square is beyond FP32: the run has diverged, or the loss "
        "scale is far too high for this dtype; lower the learning rate or the scale"
    )


def origin_lines(peaks: Sequence[ParamPeak], origins: Origins) -> list[str]:
    """Return a line with rank and micro-batch for each parameter that overflowed in an examined attempt."""
    found = culprits(peaks)
    lines = [f"{peak.place}: {_where(peak, origins)}" for peak in found[:_MOST_NAMES]]
    if len(found) > _MOST_NAMES:
        lines.append(f"and {len(found) - _MOST_NAMES} more parameters")
    return lines


def _where(peak: ParamPeak, origins: Origins) -> str:
    own = [origin for origin in origins.found if origin.param == peak.name]
    if not own and origins.left_out:
        return f"{peak.fault}, among the {origins.left_out} places that are not listed"
    if not own:
        return f"{peak.fault} only in the sum over micro-batches and ranks, in no gradient by itself"
    places = dict[tuple[str, int], list[str]]()
    for origin in own:
        places.setdefault((origin.fault, origin.rank), []).append(str(origin.micro_batch))
    return "; ".join(
        f"{fault} on rank {rank}, micro-batch{'es' * (len(numbers) > 1)} {', '.join(numbers)}"
        for (fault, rank), numbers in places.items()
    )


def culprit_table(history: Sequence[Sequence[ParamPeak]]) -> list[str]:
    """Return how often each parameter and layer overflowed, the most frequent first, for a final report.

    `history`: the peaks of each overflowed attempt, oldest first.
    """
    params = Counter[tuple[str, str]]()
    layers = Counter[str]()
    for peaks in history:
        found = culprits(peaks)
        params.update((peak.name, str(peak.fault)) for peak in found)
        layers.update(layers_of([peak.name for peak in found]))
    if not params:
        return []
    lines = [
        f"{name}: {fault} in {count} of {len(history)}" for (name, fault), count in params.most_common(_MOST_LINES)
    ]
    if len(params) > _MOST_LINES:
        lines.append(f"and {len(params) - _MOST_LINES} more")
    words = ", ".join(f"{layer} ({count})" for layer, count in layers.most_common())
    return [*lines, f"layers: {words}"]


WINDOW = 1000  # attempts over which max_overflows_per_window counts


class GaveUpError(EndedEarlyError):
    """End of a run whose budget of overflows is spent; the message is the diagnosis."""

    state: State = "gave_up"
    exit_status = EXIT_STATUS["gave_up"]


_KEPT = 50  # overflows and scales that the report of a run that gives up includes


class OverflowHistory:
    """Outcomes of all attempts, in order, on every rank: what overflowed, where it began, and when to stop."""

    def __init__(self, section: PrecisionConfig, engine: ShardedEngine, count: int):
        """Start the history of a run.

        `count`: attempts that had overflowed before this process resumed the run.
        """
        self.count, self._engine = count, engine
        self._section = section
        self._in_a_row = self._at_floor = 0
        self._window = deque[bool](maxlen=WINDOW)
        self._scales = deque[tuple[float, int, int]](maxlen=_KEPT)  # loss scale, attempts with it, overflows
        self._peaks = deque[list[ParamPeak]](maxlen=_KEPT)  # peaks of the last overflows
        self.origins = list[str]()  # origins of the last examined overflow, in words

    def note(self, outcome: Outcome, examination: Examination | None) -> str:
        """Take an attempt's outcome. Return an overflow in words, else "". Every rank must call it."""
        attempts, overflows = 0, 0
        if self._scales and self._scales[-1][0] == outcome.loss_scale:
            _, attempts, overflows = self._scales.pop()
        self._scales.append((outcome.loss_scale, attempts + 1, overflows + outcome.found_inf))
        if not outcome.found_inf:
            return ""
        self.count += 1
        self._peaks.append(gather_peaks(self._engine, outcome.by_piece, outcome.peak_rows))
        if examination is not None:
            self.origins = origin_lines(self._peaks[-1], gather_origins(self._engine, examination))
        return overflow_words(outcome.loss, self._peaks[-1])

    def faults(self) -> dict[str, str | None]:
        return {peak.name: peak.fault for peak in culprits(self._peaks[-1])}

    def spend(self, outcome: Outcome, attempts: int, applied: int) -> None:
        """Count the attempt that was noted last, after `attempts` in all.

        Raises: GaveUpError once the budget is spent, on every rank at the same attempt.
        """
        if (reason := self._reason_to_stop(outcome.found_inf)) is None:
            return
        sections = {
            "cause of the last overflow": [cause(outcome.loss, self._peaks[-1])],
            f"what overflowed, in the last {len(self._peaks)} overflows": culprit_table(self._peaks),
            "where the last examined one began": self.origins,
            "loss scale: overflows of attempts": [
                f"{format_scale(scale)}: {overflows} of {tried}" for scale, tried, overflows in self._scales
            ],
        }
        lines = [f"gave up after {attempts} attempts and {applied} updates: {reason}"]
        for title, body in sections.items():
            if body:
                lines += [f"{title}:", *(f"  {line}" for line in body)]
        if broken := broken_masters(self._engine):  # the weights were broken before these overflows
            lines.append(f"weights that are not finite: {', '.join(broken[:_MOST_LINES])} ({len(broken)} parameters)")
        else:
            lines.append("the weights of the last update are saved; nothing that overflowed is in them")
        raise GaveUpError("\n".join(lines))

    def _reason_to_stop(self, found_inf: bool) -> str | None:
        """Return the limit that was reached, or None.

        Counts overflows in a row, overflows in a row at the lowest loss scale, and overflows in a window of attempts.
        """
        section, at_floor = self._section, self._scales[-1][0] <= self._engine.loss_scale.min_scale
        self._in_a_row = self._in_a_row + 1 if found_inf else 0
        self._at_floor = self._at_floor + 1 if found_inf and at_floor else 0
        self._window.append(found_inf)
        for key, count, which in (
            ("max_overflows_at_floor", self._at_floor, "attempts in a row overflowed at the lowest loss scale"),
            ("max_overflows_in_a_row", self._in_a_row, "attempts in a row overflowed"),
            ("max_overflows_per_window", sum(self._window), f"of the last {len(self._window)} attempts overflowed"),
        ):
            if count >= getattr(section, key):
                return f"{count} {which} (precision.{key})"
        return None
