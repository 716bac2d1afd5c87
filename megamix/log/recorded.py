"""The values that all ranks have recorded in a step, by name."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from megamix.base.records import JOIN, Reduce
from megamix.comm.collectives import Collectives, gather_json
from megamix.comm.topology import Topology
from megamix.mixed_precision.step import Recorded


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
    found = dict[tuple[str, Reduce], list[tuple[float, float]]]()
    of_stage = dict[int, tuple[int, set[tuple[str, Reduce]]]]()  # a stage's first rank, and the names it recorded
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
        value = functools.reduce(JOIN[reduce], [*so_fars])
        values[name] = float(value / counts.sum() if reduce == "mean" else value)
    return values


def _listed(names: set[tuple[str, Reduce]]) -> str:
    return ", ".join(f"{name!r} ({reduce})" for name, reduce in sorted(names)) or "nothing"
