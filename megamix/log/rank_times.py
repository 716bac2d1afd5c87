"""Each rank's own time in a log interval, told to the first rank beside the steps; that rank names slow ones."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamix.base.console import Console, folded
from megamix.comm.collectives import Pending, gather_json
from megamix.comm.topology import Topology
from megamix.log.metrics import RANKS, MetricsWriter
from megamix.log.readout import RecordedRows
from megamix.log.slow_ranks import KEPT, KINDS, RankPlace, Slow, SlowRanks

_GPU = {"clock_mhz": "MHz", "power_w": "W", "temperature_c": "C"}  # a GPU's readings, with their units


class RankTimes:
    """Tells this rank's times and learns those of the others. Every rank has one; its calls are collective.

    The ranks' rows travel while the next interval is trained, so no step waits for them.
    """

    def __init__(
        self,
        topology: Topology,
        recorded: RecordedRows,
        device: torch.device,
        console: Console,
        writer: MetricsWriter | None,
    ):
        self._topology, self._recorded, self._device = topology, recorded, device
        self._console, self._writer = console, writer
        self._rule: SlowRanks | None = None
        self._slow = set[str]()
        # A step, and the rows of all ranks under way: FP64 (ranks, KINDS and a GPU's readings).
        self._under_way: tuple[int, Tensor, Pending] | None = None
        self._work_s = 0.0  # processor time of this object so far

    def exchange(self, step: int, span_s: Mapping[str, float], *, detailed: bool) -> dict[str, float]:
        """Send this rank's times of the interval that ends with `step`. On the first rank tell what the last call has
        sent, and return its tags.

        `span_s`: the seconds of an attempt by span. `detailed`: write all ranks' times even if none is slow.
        """
        if self._rule is None:  # the first interval has compiled and warmed up
            place = RankPlace(socket.gethostname(), self._topology.pp.rank, self._topology.data.rank)
            places = gather_json(self._recorded.side, place, torch.device("cpu"))
            self._rule = SlowRanks([RankPlace(*found) for found in places])
            return {}
        if not self._rule.compares:
            return {}
        start_s = time.thread_time()
        sent, tags = self._under_way, dict[str, float]()
        own = [*(span_s.get(kind, 0.0) for kind in KINDS), *_readings(self._device)]
        self._under_way = (step, *self._recorded.side.start_table(torch.tensor(own, dtype=torch.float64)))
        if sent is not None:
            sent_at, table, arrival = sent
            arrival.wait()  # these rows were sent a log interval ago
            if self._writer is not None:
                tags = self._told(self._rule, self._writer, sent_at, table.numpy(), detailed)
        self._work_s += time.thread_time() - start_s
        return tags

    def _told(
        self, rule: SlowRanks, writer: MetricsWriter, step: int, table: np.ndarray, detailed: bool
    ) -> dict[str, float]:
        """Name the slow ranks and write the ranks' row. Return the tags."""
        times, readings = table[:, : len(KINDS)], table[:, len(KINDS) :]
        slow = rule.judge(times)
        for one in slow:
            if one.words not in self._slow:
                self._console.line(_line(one, readings))
        self._slow = {one.words for one in slow}
        row: dict[str, Any] = {"step": step, "slow": [one.ranks for one in slow], "work_s": round(self._work_s, 6)}
        row |= {f"{kind}_s": [float(f"{it:.4g}") for it in column] for kind, column in zip(KINDS, times.T, strict=True)}
        if not np.isnan(readings).any():
            row |= {name: column.tolist() for name, column in zip(_GPU, readings.T, strict=True)}
        if detailed or slow:
            writer.write_ranks(row)
        rank, ratio = rule.slowest()
        return {RANKS + "slowest_rank": rank, RANKS + "slowest_ratio": round(ratio, 4)}


def _readings(device: torch.device) -> list[float]:
    """Return a GPU's clock in MHz, power in W and temperature in degrees Celsius; NaN where nothing tells them."""
    if device.type == "cuda":  # pragma: CUDA only
        with suppress(ImportError, RuntimeError):  # torch reads them by nvidia-ml-py, which not every machine has
            return [torch.cuda.clock_rate(device), torch.cuda.power_draw(device) / 1e3, torch.cuda.temperature(device)]
    return [math.nan] * len(_GPU)


def _line(slow: Slow, readings: np.ndarray) -> str:
    line = (
        f"in {slow.intervals} of the last {KEPT} log intervals; most in {KINDS[slow.kind]}, {slow.own_s:.4g} s an "
        f"attempt against {slow.others_s:.4g}"
    )
    if not np.isnan(readings).any():
        parts = readings[slow.ranks], np.delete(readings, slow.ranks, 0)
        of, others = (
            " ".join(f"{it:.0f} {unit}" for it, unit in zip(part.mean(0), _GPU.values(), strict=True)) for part in parts
        )
        line += f"; GPU at {of}, the others at {others}"
    return f"ranks | {slow.words} is slow: {slow.ratio:.2f} times the others' own time\n{folded(line)}"
