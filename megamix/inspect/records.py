"""`megamix.record`: values that a forward, a loss, or code between two steps reports."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives
from megamix.comm.host import gather_json
from megamix.comm.topology import Topology
from megamix.mixed_precision.step import Recorded, Reduce, StepProgress

_JOIN: dict[Reduce, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,  # divided by their number at the end
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_TAG = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


def record(name: str, tensor: Tensor, reduce: Reduce = "mean") -> None:
    """Report a value of this step from anywhere in a forward or a loss, or of the next step from between two steps.

    The mean, sum, maximum or minimum of all values of a name in a step is reported, over calls, micro-batches and
    ranks. Among tensor-parallel ranks only the first one's value enters a sum; with sequence parallelism that value
    covers only the positions of the first rank. Ranks that compute the same part of the model must record the same
    names. A job writes the values beside its own metrics; without a job they are in `StepResult.recorded`. The host
    does not wait. Values recorded in a backward, while the module is in `eval()`, or without an engine, do not count.
    Shapes: tensor (), kept as FP32.
    Raises: ValueError for a tensor that is no scalar, a name that is no tag, or another `reduce` than the name had
    before.
    """
    step = StepProgress.latest()
    if step is None or not step.counts():
        return
    if tensor.dim():
        raise ValueError(f"record({name!r}): must be of shape (), got {tuple(tensor.shape)}; pass its mean() or amax()")
    if (name, reduce) not in step.recorded_rows:
        _check(name, reduce, step.recorded_rows.keys())
        step.recorded_rows[name, reduce] = step.loss_sum.new_zeros(2)
    row = step.recorded_rows[name, reduce]
    so_far, count = row
    value = tensor.detach().to(row)
    row.copy_(torch.stack([torch.where(count > 0, _JOIN[reduce](so_far, value), value), count + 1]))


def _check(name: str, reduce: Reduce, known: Iterable[tuple[str, Reduce]]) -> None:
    if not _TAG.fullmatch(name):
        raise ValueError(f"record({name!r}): a name is letters, digits and . _ - between slashes, such as 'moe/load'")
    if reduce not in _JOIN:
        raise ValueError(f"record({name!r}): reduce must be one of {', '.join(_JOIN)}, got {reduce!r}")
    if before := dict(known).get(name):
        raise ValueError(f"record({name!r}): reduce was {before!r} before, got {reduce!r}; use another name")


def gather_recorded(recorded: Recorded, topology: Topology, collectives: Collectives) -> dict[str, float]:
    """Return all ranks' values by name, each combined by its reduce. Every rank must call it; waits for the device.

    `collectives`: among all ranks of the model, on the table's device.
    Raises: ValueError on every rank if two ranks that compute the same part of the model recorded different names.
    """
    rows = zip(recorded.names, recorded.table.tolist(), strict=True)
    mine = FromRank(topology.pp.rank, topology.counts_sums, [(*key, *row) for key, row in rows if row[1]])
    return combine([FromRank(*told) for told in gather_json(collectives, mine, recorded.table.device)])


class FromRank(NamedTuple):
    """Holds the values that one rank has recorded in a step, and the rank's place."""

    stage: int
    counts_sums: bool
    rows: list[tuple[str, Reduce, float, float]]  # name, reduce, and row of `Recorded.table`


def combine(by_rank: list[FromRank]) -> dict[str, float]:
    """Combine the values of all ranks. Raises: ValueError, as `gather_recorded`."""
    found: dict[tuple[str, Reduce], list[tuple[float, float]]] = {}
    of_stage: dict[int, tuple[int, set[tuple[str, Reduce]]]] = {}  # a stage's first rank, and the names it recorded
    for rank, mine in enumerate(by_rank):
        names = {(name, reduce) for name, reduce, *_ in mine.rows}
        first, others = of_stage.setdefault(mine.stage, (rank, names))
        if names != others:
            raise ValueError(
                f"record: rank {first} recorded {_listed(others - names)} where rank {rank} recorded "
                f"{_listed(names - others)}; record the same names, with the same reduce, on every rank"
            )
        for name, reduce, so_far, count in mine.rows:
            if reduce != "sum" or mine.counts_sums:
                found.setdefault((name, reduce), []).append((so_far, count))
    values = {}
    for (name, reduce), rows in found.items():
        so_fars, counts = torch.tensor(rows, dtype=torch.float64).T
        value = functools.reduce(_JOIN[reduce], [*so_fars])
        values[name] = float(value / counts.sum() if reduce == "mean" else value)
    return values


def _listed(names: set[tuple[str, Reduce]]) -> str:
    return ", ".join(f"{name!r} ({reduce})" for name, reduce in sorted(names)) or "nothing"
