"""Metrics of a run: a line on the console, a JSON object in metrics.jsonl, a point per scalar in TensorBoard."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megamix.base.log_file import LogFile, parsed
from megamix.launch.run_folder import LOGS
from megamix.log.event_file import EventFile
from megamix.log.interval_report import AHEAD, EACH, SHARES, VALUES, StepMetrics

if TYPE_CHECKING:  # drawing a run's history needs no torch
    from megamix.log.trackers import TrackerThread

# Bins of an exponent histogram: bin e holds 2^e <= |gradient| < 2^(e + 1). The first also holds all smaller elements,
# the last all larger ones.
FIRST_EXPONENT, LAST_EXPONENT = -41, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrecision:
    """Numbers of one layer in an examined step: its gradient, summed over ranks and micro-batches, and its update.

    Shares are of the layer's elements. The thresholds are FP16's, whatever the dtype: subnormal is 0 < |g| < 2^-14,
    below is 0 < |g| < 2^-24. Shares are of the gradient as the buffer holds it; `unscaled` ones are of the gradient at
    a loss scale of 1.
    """

    zero_share: float
    subnormal_share: float
    below_share: float
    unscaled_subnormal_share: float
    unscaled_below_share: float
    headroom: float  # octaves, log2(65504 / max abs), scale included; -inf after an overflow, inf for zeros
    hidden_update_share: float | None  # share of changed masters with an unchanged half copy; None: none changed
    exponents: tuple[int, ...]  # number of finite nonzero elements by exponent, unscaled


TRANSFERS = "communication/"  # prefix of the tags of a bucket's transfers in a profiled attempt
OVERFLOWED = "overflowed/"  # prefix of the tags of values that an overflowed attempt recorded
RANKS = "ranks/"  # prefix of the tags of the ranks' own times
LOAD = "load/"  # prefix of the tags of what a step has counted, such as the tokens of experts


def precision_tag(name: str, layer: str) -> str:
    """Return the tag of one of LayerPrecision's fields in metrics.jsonl and TensorBoard."""
    return f"precision/{name}/{layer}"


# This table alone maps names in the code to tags in metrics.jsonl and TensorBoard.
TAGS = {
    "valid_loss": "valid/loss",
    "average_loss": "valid/average_loss",
    "tokens": "train/tokens",
    "time": "time/unix_s",
    "resumed": "run/resumed",
}
TAGS |= {known.name: str(known.metadata["tag"]) for known in fields(StepMetrics)}


def set_tag(name: str, of: str = "valid_loss") -> str:
    """Return the tag of the loss of a validation set that has a name. `of`: the loss of all sets in TAGS."""
    return f"{TAGS[of]}/{name}"


SETS = (set_tag(""), set_tag("", "average_loss"))  # prefixes of the tags of validation sets


def recorded_tags(recorded: Mapping[str, float], *, overflowed: bool) -> dict[str, float]:
    """Return the values that an attempt recorded, by tag.

    Raises: ValueError for a name that is one of the run's own tags.
    """
    for name in recorded:
        if name in ("step", *TAGS.values()) or name.startswith(("precision/", RANKS, LOAD, *SETS, OVERFLOWED)):
            raise ValueError(f"record({name!r}): that is a tag of the run's own metrics; record it by another name")
    return {OVERFLOWED + name if overflowed else name: value for name, value in recorded.items()}


def load_tag(name: str, layer: str) -> str:
    """Return the tag of a layer's load: "max", "min", "entropy", or the "counts" themselves."""
    return f"{LOAD}{name}/{layer}"


def over_mean(counts: Sequence[float]) -> list[float]:
    """Return counts over their mean; NaN where nothing was counted."""
    mean = statistics.fmean(counts) or math.nan
    return [count / mean for count in counts]


def load_tags(counts: Mapping[str, Sequence[float]], *, detailed: bool) -> dict[str, float | list[int]]:
    """Return the loads of an update by tag: the largest and the smallest count over the mean, and the entropy of the
    shares over that of equal ones. `counts`: by layer. `detailed`: the counts, too.
    """
    tags = dict[str, float | list[int]]()
    for layer, each in counts.items():
        loads = over_mean(each)
        # The entropy of n shares p is -sum(p ln p), at most ln n; a load is n p.
        entropy = 1 - statistics.fmean(load * math.log(load or 1) for load in loads) / math.log(max(len(each), 2))
        tags |= {load_tag("max", layer): max(loads), load_tag("min", layer): min(loads)}
        tags[load_tag("entropy", layer)] = entropy
        if detailed:
            tags[load_tag("counts", layer)] = [int(count) for count in each]
    return tags


DETAILED_EVERY = 10  # log lines from one with details to the next


def format_lines(
    step: int,
    steps: int,
    metrics: StepMetrics,
    *,
    detailed: bool,
    counts: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> str:
    """Return a step's line on the console, as plain text that stays readable in a batch system's log.

    The line has at most 100 columns while a run has fewer than a million steps. `detailed`: add two lines of values
    that change little. A run without a loss scale tells none, and no overflows before the first one. `counts`: by
    layer; their largest over their mean is in these lines, as the mean of layers, and one more line tells layers whose
    router has collapsed.
    """
    here = f"step {step:>{len(str(steps))}}/{steps}"
    line = " | ".join([here, *metrics.words(EACH)])
    if not detailed:
        return line
    rest = [here, *metrics.words(AHEAD), *metrics.words(VALUES)]
    if counts:
        rest.append(f"load {statistics.fmean(max(over_mean(each)) for each in counts.values()):.2f}")
    shares = f"{here} | time: {', '.join(metrics.words(SHARES))}"
    return "\n".join([line, " | ".join(rest), shares, *_collapsed(counts)])


def _collapsed(counts: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a line for layers in which at least half of the experts get less than a hundredth of the mean."""
    idle = {layer: sum(load < 0.01 for load in over_mean(each)) for layer, each in counts.items()}
    layers = [layer for layer, number in idle.items() if 2 * number >= len(counts[layer])]
    if not layers:
        return []
    most = max(layers, key=lambda layer: idle[layer] / len(counts[layer]))
    return [
        f"  {idle[most]} of {len(counts[most])} experts get no tokens in {most}, and half in {len(layers)} layer(s):",
        "  the router collapses; raise model.experts.bias_rate or balance_loss (docs/experts.md)",
    ]


class MetricsWriter:
    """Writer of FOLDER/metrics.jsonl, set_aside.jsonl and ranks.jsonl beside it and, if asked, event files in
    FOLDER/tensorboard.

    One rank owns it. A disk that fails raises nothing: see LogFile.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        applied: int = 0,
        config: str = "",
        hparams: Mapping[str, Any] = MappingProxyType({}),
        tokens: Callable[[], int] = lambda: 0,
        trackers: Sequence[TrackerThread] = (),
    ) -> None:
        """Open the files.

        `applied`: updates that the run has behind it. Lines in the file stay, and one more says that the run goes on
        from there. TensorBoard drops its events after `applied` when they are opened again, so they are written once
        more from the lines that stayed.
        `config`: the effective configuration, and `hparams`: settings by which runs are compared, both for TensorBoard
        only. `tokens`: returns the tokens of all updates so far, which every row holds.
        """
        self._trackers, self._tokens = trackers, tokens
        self._events = EventFile(folder / "tensorboard", applied + 1) if tensorboard else None
        self._logs = [LogFile(folder / name) for name in LOGS]
        self._metrics, self._set_aside, self._ranks = self._logs
        if self._events is not None and self._metrics.path.exists():
            # Attempts that overflow on the way to the next update are written under its number.
            for line in self._metrics.path.read_bytes().splitlines():
                row = parsed(line)
                step = row.pop("step", 0)
                row.pop(TAGS["time"], None)  # an event has a time of its own
                if step > applied and TRANSFERS + "bucket" not in row:
                    scalars = {tag: value for tag, value in row.items() if isinstance(value, float | int)}
                    self._events.add(step, scalars, {})
        if applied:
            self.append(applied, {TAGS["resumed"]: 1})
        if self._events is not None and config:
            self._events.text(applied, "config", _as_code(config))
            self._events.hparams(hparams, [TAGS["valid_loss"], TAGS["loss"]])

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(
        self, step: int, values: Mapping[str, float | None], others: Mapping[str, float | list[int]] | None = None
    ) -> None:
        """Write values by their names in TAGS, and others by their tags. Lists are in metrics.jsonl alone.

        None, inf and NaN become null: JSON has no word for them.
        """
        self._write(step, {TAGS[name]: value for name, value in values.items()} | dict(others or {}))

    def write_precision(self, step: int, layers: Mapping[str, LayerPrecision]) -> None:
        """Write an examined step, layer by layer, as one row. TensorBoard gets the exponents as a histogram."""
        row = dict[str, object]()
        for layer, precision in layers.items():
            row |= {precision_tag(name, layer): value for name, value in asdict(precision).items()}
        self._write(step, row)

    def text(self, step: int, name: str, text: str) -> None:
        for tracker in self._trackers:
            tracker.tell(lambda to: to.text(name, text))
        if self._events is not None:
            self._events.text(step, name, _as_code(text))

    def write_set_aside(self, row: Mapping[str, Any]) -> None:
        """Write a batch that is set aside; it is on the disk when this returns."""
        self._set_aside.append(_line(row))
        self._set_aside.sync()

    def write_ranks(self, row: Mapping[str, Any]) -> None:
        self._ranks.append(_line({TAGS["time"]: round(time.time(), 3), **row}))

    def _write(self, step: int, row: Mapping[str, Any]) -> None:
        finite = {
            tag: None if isinstance(value, float) and not math.isfinite(value) else value for tag, value in row.items()
        }
        seen = self.append(step, finite)
        scalars = seen | {tag: value for tag, value in row.items() if isinstance(value, float | int)}
        for tracker in self._trackers:
            tracker.tell(lambda to: to.log(step, scalars))
        if self._events is not None:
            counts = {tag: _histogram(value) for tag, value in row.items() if isinstance(value, tuple)}
            self._events.add(step, scalars, counts)

    def append(self, step: int, row: Mapping[str, Any]) -> dict[str, int]:
        """Write a row to metrics.jsonl only, and return the values that every row holds."""
        seen = {TAGS["tokens"]: self._tokens()}
        self._metrics.append(_line({"step": step, TAGS["time"]: round(time.time(), 3), **seen, **row}))
        return seen

    def sync(self) -> None:
        """Return once all rows so far, but for those that the disk does not take, are on the disk. TensorBoard's events
        are not waited for.
        """
        for log in self._logs:
            log.sync()

    def close(self) -> None:
        for log in (*self._logs, self._events, *self._trackers):
            if log is not None:
                log.close()


def is_overflow(row: Mapping[str, Any]) -> bool:
    """Return whether a row of metrics.jsonl is that of an attempt that overflowed."""
    return TAGS["skipped_steps"] in row and TAGS["loss"] not in row


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _as_code(text: str) -> str:
    return "    " + text.replace("\n", "\n    ")


def _histogram(exponents: tuple[int, ...]) -> dict[str, Any]:
    limits = range(FIRST_EXPONENT + 1, LAST_EXPONENT + 2)
    bins = [(count, limit - 0.5) for count, limit in zip(exponents, limits, strict=True)]
    return {
        "min": FIRST_EXPONENT,
        "max": limits[-1],
        "num": sum(exponents),
        "sum": sum(count * middle for count, middle in bins),
        "sum_squares": sum(count * middle**2 for count, middle in bins),
        "bucket_limits": [*limits],
        "bucket_counts": list(exponents),
    }
