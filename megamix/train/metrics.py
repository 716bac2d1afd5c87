"""What a run reports: a line on the console, a JSON object in metrics.jsonl, a point per scalar in TensorBoard."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from megamix.data.durable import sync_file

# The one place that maps a name in the code to the tag in metrics.jsonl and TensorBoard.
TAGS = {
    "loss": "train/loss",
    "valid_loss": "valid/loss",
    "lr": "optim/lr",
    "grad_norm": "optim/grad_norm",
    "loss_scale": "optim/loss_scale",
    "skipped_steps": "optim/skipped_steps",
    "tokens_per_s": "throughput/tokens_per_s",
    "mfu": "throughput/mfu",
    "memory_gib": "memory/peak_gib",
    "data_share": "time_share/data",
    "forward_backward_share": "time_share/forward_backward",
    "reduce_scatter_share": "time_share/exposed_reduce_scatter",
    "update_share": "time_share/update",
    "all_gather_share": "time_share/exposed_all_gather",
    "eta_s": "time/eta_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One log interval, as of its last update. Field names are keys of TAGS."""

    loss: float  # nats per token
    lr: float
    grad_norm: float  # before clipping, without the loss scale
    loss_scale: float | None  # None: this run has none
    skipped_steps: int  # attempts that overflowed, since the start of the run
    tokens_per_s: float  # of all ranks
    mfu: float | None  # 0 to 1; None: the peak of this device is not known
    memory_gib: float  # peak of this rank
    data_share: float  # shares of wall time, 0 to 1
    forward_backward_share: float
    reduce_scatter_share: float  # time that the step waited for it; what ran beside backward is not counted
    update_share: float
    all_gather_share: float  # likewise
    eta_s: float

    def values(self) -> dict[str, float | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def format_line(step: int, steps: int, metrics: StepMetrics) -> str:
    """The console line: plain text that stays readable in a batch system's log."""
    mfu = "n/a" if metrics.mfu is None else f"{metrics.mfu:.1%}"
    shares = (
        f"data {metrics.data_share:.0%} fwd+bwd {metrics.forward_backward_share:.0%} "
        f"reduce-scatter {metrics.reduce_scatter_share:.0%} update {metrics.update_share:.0%} "
        f"all-gather {metrics.all_gather_share:.0%}"
    )
    return (
        f"step {step:>{len(str(steps))}}/{steps} | loss {metrics.loss:.4f} | lr {metrics.lr:.3e} | "
        f"grad_norm {metrics.grad_norm:.3f} | loss_scale {format_scale(metrics.loss_scale)} | "
        f"skipped {metrics.skipped_steps} | {metrics.tokens_per_s:,.0f} tokens/s | mfu {mfu} | "
        f"memory {metrics.memory_gib:.2f} GiB | {shares} | eta {_format_duration(metrics.eta_s)}"
    )


class MetricsWriter:
    """Appends to FOLDER/metrics.jsonl and, if asked, to event files in FOLDER/tensorboard. One rank owns it."""

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        """Raises: ValueError if TensorBoard is asked for and not installed."""
        self._events = _summary_writer(folder / "tensorboard") if tensorboard else None
        folder.mkdir(parents=True, exist_ok=True)
        self._jsonl = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Record values by their names in TAGS. None, inf and NaN are null in the JSON, which has no word for them."""
        row: dict[str, float | None] = {"step": step}
        for name, value in values.items():
            row[TAGS[name]] = value if value is not None and math.isfinite(value) else None
            if self._events is not None and value is not None:
                self._events.add_scalar(TAGS[name], value, step)
        self._jsonl.write(json.dumps(row, allow_nan=False) + "\n")
        self._jsonl.flush()  # whoever follows the file, or reads it after a kill, sees every finished line

    def close(self) -> None:
        sync_file(self._jsonl)
        self._jsonl.close()
        if self._events is not None:
            self._events.close()


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "metrics.tensorboard = true, but the Python package 'tensorboard' is not installed; "
            "run: pip install 'megamix[tensorboard]', or set metrics.tensorboard=false"
        ) from error
    return SummaryWriter(str(folder))


def format_scale(loss_scale: float | None) -> str:
    if loss_scale is None:
        return "off"
    exponent = math.log2(loss_scale)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{loss_scale:g}"


def _format_duration(seconds: float) -> str:
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}"
