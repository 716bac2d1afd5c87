"""`megamix.record`: values that a forward or a loss reports, or whoever calls between two steps."""

from __future__ import annotations

import json
import re

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives, gather_texts
from megamix.comm.topology import Topology
from megamix.mixed_precision.step import RULES, Entry, Recorded, Records, Reduce

_TAG = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


def record(name: str, tensor: Tensor, reduce: Reduce = "mean") -> None:
    """Report a value of this step, from anywhere in a forward or a loss, or between two steps, for the next one.

    Of all values of a name in a step, over calls, micro-batches and ranks, their mean, sum, maximum or minimum is
    reported; of tensor-parallel ranks, which hold the same value as a rule, the first one's goes into a sum. Ranks that
    compute the same part of the model must record the same names. A job writes them beside its own metrics; without one
    they are in `StepResult.recorded`. The host does not wait. What is given in a backward, while the module is in
    `eval()`, or without an engine, does not count.
    Shapes: tensor (), kept as FP32.
    Raises: ValueError for what is no scalar, a name that is no tag, or another `reduce` than the name had before.
    """
    records = Records.latest()
    if records is None or records.is_muted or not records.module.training:
        return
    if tensor.dim():
        raise ValueError(f"record({name!r}): must be of shape (), got {tuple(tensor.shape)}; pass its mean() or amax()")
    if name not in records.entries:
        records.entries[name] = _new_entry(name, reduce, records.device)
    entry = records.entries[name]
    if entry.reduce != reduce:
        raise ValueError(f"record({name!r}): reduce was {entry.reduce!r} before, got {reduce!r}; use another name")
    value = tensor.detach().to(records.device, torch.float32)
    entry.so_far.copy_(RULES[reduce].add(entry.so_far, value))
    entry.seen.add_(1)


def _new_entry(name: str, reduce: Reduce, device: torch.device) -> Entry:
    if not _TAG.fullmatch(name):
        raise ValueError(f"record({name!r}): a name is letters, digits and . _ - between slashes, such as 'moe/load'")
    if reduce not in RULES:
        raise ValueError(f"record({name!r}): reduce must be one of {', '.join(RULES)}, got {reduce!r}")
    zero = torch.zeros((), dtype=torch.float32, device=device)
    return Entry(reduce, torch.full_like(zero, RULES[reduce].nothing), zero)


def gather_recorded(recorded: Recorded, topology: Topology, collectives: Collectives) -> dict[str, float]:
    """Return the values of all ranks by name, each combined as it says. Every rank must call it; waits for the table.

    `collectives`: among all ranks of the model, where the table lies.
    Raises: ValueError on every rank if two that compute the same part of the model recorded other names.
    """
    columns = zip(recorded.names, *recorded.table.tolist(), strict=True)
    mine = sorted((*name, so_far, count) for name, so_far, count in columns if count)
    texts = gather_texts(collectives, json.dumps(mine), recorded.table.device)
    return combine([json.loads(text) for text in texts], topology.stage.size, topology.tp.size)


def combine(by_rank: list[list[tuple[str, Reduce, float, float]]], stage_size: int, tp_size: int) -> dict[str, float]:
    """Return the values of all ranks, of whose rows each is a name, its reduce, and a column of `Recorded.table`.

    Raises: ValueError, as `gather_recorded`.
    """
    found: dict[tuple[str, Reduce], list[tuple[float, float]]] = {}
    for rank, rows in enumerate(by_rank):
        first = rank - rank % stage_size
        names, others = ({(name, reduce) for name, reduce, *_ in by_rank[number]} for number in (rank, first))
        if names != others:
            raise ValueError(
                f"record: rank {first} recorded {_listed(others - names)} where rank {rank} recorded "
                f"{_listed(names - others)}; record the same names, with the same reduce, on every rank"
            )
        for name, reduce, so_far, count in rows:
            if reduce != "sum" or rank % tp_size == 0:
                found.setdefault((name, reduce), []).append((so_far, count))
    merged = {}
    for (name, reduce), columns in found.items():
        so_far, counts = torch.tensor(columns, dtype=torch.float64).T
        total = RULES[reduce].combine(so_far)
        merged[name] = float(total / counts.sum() if reduce == "mean" else total)
    return merged


def _listed(names: set[tuple[str, Reduce]]) -> str:
    return ", ".join(f"{name!r} ({reduce})" for name, reduce in sorted(names)) or "nothing"
