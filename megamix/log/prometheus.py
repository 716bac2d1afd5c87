"""Prometheus: the newest values of a run in a file that the node exporter's textfile collector reads."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megamix.base.durable import written_aside
from megamix.log.metrics import TAGS, set_tag
from megamix.log.trackers import Tracker

_SHARE = "time_share/"


class _Metric(NamedTuple):
    """A metric's name behind `megamix_`, which ends in its unit as Prometheus asks, with type and help."""

    name: str
    kind: str
    help: str
    factor: float = 1.0  # from our unit to the metric's


_RUNNING = _Metric("running", "gauge", "1 while the run trains, 0 when it has ended by itself.")
_ROW = _Metric("last_row_timestamp_seconds", "gauge", "Time of the run's last row of values.")
_UPDATES = _Metric("updates_total", "counter", "Updates so far.")
_OTHER = _Metric("value", "gauge", "A value that has no metric of its own, by its tag in metrics.jsonl.")
_NAMED = {
    "loss": _Metric("loss_nats", "gauge", "Training loss a token."),
    "valid_loss": _Metric("valid_loss_nats", "gauge", "Validation loss a token; set: that of one set."),
    "tokens": _Metric("tokens_total", "counter", "Tokens of all updates so far."),
    "lr": _Metric("learning_rate", "gauge", "Learning rate."),
    "grad_norm": _Metric("gradient_norm", "gauge", "Norm of the gradient before clipping."),
    "loss_scale": _Metric("loss_scale", "gauge", "Loss scale."),
    "skipped_steps": _Metric("overflows_total", "counter", "Attempts that overflowed."),
    "tokens_per_s": _Metric("tokens_per_second", "gauge", "Tokens of all ranks a second."),
    "mfu": _Metric("flops_used_ratio", "gauge", "Model FLOPs over the devices' peak."),
    "memory_gib": _Metric("memory_peak_bytes", "gauge", "Peak of the first rank's memory.", 2.0**30),
    "eta_s": _Metric("remaining_seconds", "gauge", "Estimated time to the end."),
}
_METRICS = {TAGS[name]: metric for name, metric in _NAMED.items()}
_SHARES = _Metric("time_share_ratio", "gauge", "Share of the wall time, by part.")


class PrometheusTracker(Tracker):
    """Tracker that replaces a file with each row."""

    def __init__(self, *, file: str, folder: Path, config: Mapping[str, Any]):
        self._path, self._run = Path(file), _escaped(str(folder))
        self._values = dict[_Metric, dict[str, float]]()  # by metric and label
        self._set(_RUNNING, 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            if tag in _METRICS:
                self._set(_METRICS[tag], value)
            elif tag.startswith(_SHARE):
                self._set(_SHARES, value, "part", tag.removeprefix(_SHARE))
            elif tag.startswith(set_tag("")):
                self._set(_NAMED["valid_loss"], value, "set", tag.removeprefix(set_tag("")))
            else:
                self._set(_OTHER, value, "tag", tag)
        if TAGS["loss"] in values:  # the row of an overflow has the number of the update that it did not make
            self._set(_UPDATES, step)
        self._set(_ROW, time.time())
        self._write()

    def close(self) -> None:
        self._set(_RUNNING, 0)
        self._write()

    def _set(self, metric: _Metric, value: float, label: str = "", of: str = "") -> None:
        labels = f',{label}="{_escaped(of)}"' if label else ""
        self._values.setdefault(metric, {})[labels] = value * metric.factor

    def _write(self) -> None:
        with written_aside(self._path, sync=False) as file:
            for metric, values in self._values.items():
                name = f"megamix_{metric.name}"
                lines = [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
                lines += [f'{name}{{run="{self._run}"{labels}}} {float(it)!r}' for labels, it in values.items()]
                file.write("".join(f"{line}\n" for line in lines).encode())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
