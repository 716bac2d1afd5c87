"""History of a run: what its folder says, but for its events. This module imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megamix.base.log_file import parsed
from megamix.config import axis_key, saved_tree
from megamix.config.unread import is_set, setting
from megamix.launch.run_folder import CONFIG, METRICS, SAMPLE
from megamix.log.metrics import TAGS, TRANSFERS, is_overflow, load_tag, over_mean, precision_tag, set_tag

DRAWN = ("unscaled_below_share", "headroom", "hidden_update_share")  # LayerPrecision's numbers that are drawn

# The settings by which people tell runs apart.
_MAIN = (
    *("model.family", "model.num_layers", "model.hidden_size", "model.num_heads", "model.vocab_size", "model.seq_len"),
    *("optimizer.name", "optimizer.lr", "optimizer.weight_decay", "precision.dtype"),
    *("training.steps", "training.micro_batch_size", "training.global_batch_size", "training.seed"),
    *(f"parallelism.{axis_key(axis)}" for axis in ("tp", "pp", "cp", "ep")),
)
_SET = re.compile(re.escape(set_tag("")) + r"[A-Za-z0-9_-]+")  # tag of a validation set
_COUNTS = load_tag("counts", "")  # tag of a layer's counts; its name follows


def main_settings(config: str) -> dict[str, Any]:
    """Return the main settings in a TOML configuration, by names such as `optimizer.lr`."""
    tree = saved_tree(config)
    return {key: setting(tree, key) for key in _MAIN if is_set(tree, key)}


class Series(NamedTuple):
    """Values by step; rows with null are left out."""

    steps: list[int]
    values: list[float]


class HeatMap(NamedTuple):
    """Numbers by layer and column: one of LayerPrecision's by examined step, or loads by expert."""

    layers: list[str]  # in the order of the model
    columns: list[int]
    values: list[list[float]]  # by layer, then column; NaN for null, and where a layer has fewer columns


class RunHistory(NamedTuple):
    """Holds what a run did, to be told and drawn."""

    name: str
    config: str  # TOML; empty if there is none, as is the sample
    sample: str
    loss: Series
    valid_loss: Series
    average_loss: Series  # validation loss of the average of the weights
    valid_sets: dict[str, Series]  # losses of validation sets by name
    lr: Series
    grad_norm: Series
    tokens_per_s: Series
    tokens: Series  # sum over all updates so far
    loss_scale: Series  # empty in a run without one
    overflows: Series  # loss scale of each overflow
    transfers: list[dict[str, Any]]  # rows of a profiled attempt, by bucket; empty if none was profiled
    resumed: Series  # steps from which the run went on
    precision: dict[str, HeatMap]  # by DRAWN; empty if no step was examined
    loads: dict[int, HeatMap]  # of the last update whose counts were written, by its step; empty if there is none


def read_history(folder: Path) -> RunHistory:
    """Return the history of the run in a folder. What is not there is empty, and lines of metrics.jsonl that no run has
    written whole are left out.
    """
    rows = [*_rows(folder / METRICS)]
    # Even without a loss scale, an overflow's row has a scale of 1; a log line's scale is null then.
    unscaled = any(TAGS["loss"] in row and row.get(TAGS["loss_scale"]) is None for row in rows)
    of_sets = dict.fromkeys(tag for row in rows for tag in row if _SET.fullmatch(tag))
    curves = ("loss", "valid_loss", "average_loss", "lr", "grad_norm", "tokens_per_s", "tokens", "resumed")
    return RunHistory(
        name=folder.resolve().name,
        config=_text(folder / CONFIG),
        sample=_text(folder / SAMPLE).rstrip(),
        **{name: _series(rows, TAGS[name]) for name in curves},
        valid_sets={tag.removeprefix(set_tag("")): _series(rows, tag) for tag in of_sets},
        loss_scale=Series([], []) if unscaled else _series(rows, TAGS["loss_scale"]),
        overflows=_series([row for row in rows if is_overflow(row)], TAGS["loss_scale"]),
        transfers=_transfers(rows),
        precision=_precision(rows),
        loads=_loads(rows),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    lines = file.read_bytes().splitlines() if file.is_file() else []
    return (row for line in lines if "step" in (row := parsed(line)))


def _series(rows: Sequence[dict[str, Any]], tag: str) -> Series:
    known = [row for row in rows if row.get(tag) is not None]
    return Series([row["step"] for row in known], [row[tag] for row in known])


def _transfers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the last profiled attempt but one, if there are two, else of the only one.

    The last one's gathers have no forward beside them.
    """
    attempt = TRANSFERS + "attempt"
    attempts = sorted({row[attempt] for row in rows if attempt in row})
    return [row for row in rows if row.get(attempt) in attempts[-2:][:1]]


def _precision(rows: Sequence[dict[str, Any]]) -> dict[str, HeatMap]:
    first = precision_tag("headroom", "")
    examined = [row for row in rows if any(tag.startswith(first) for tag in row)]
    layers = [tag.removeprefix(first) for row in examined[:1] for tag in row if tag.startswith(first)]
    steps = [row["step"] for row in examined]
    maps = dict[str, HeatMap]()
    for name in DRAWN if layers else ():
        values = [[row.get(precision_tag(name, layer)) for row in examined] for layer in layers]
        maps[name] = HeatMap(layers, steps, [[math.nan if it is None else it for it in own] for own in values])
    return maps


def _loads(rows: Sequence[dict[str, Any]]) -> dict[int, HeatMap]:
    for row in reversed(rows):
        if found := {tag.removeprefix(_COUNTS): over_mean(each) for tag, each in row.items() if _COUNTS in tag}:
            width = max(map(len, found.values()))
            values = [loads + [math.nan] * (width - len(loads)) for loads in found.values()]
            return {row["step"]: HeatMap([*found], [*range(width)], values)}
    return {}
