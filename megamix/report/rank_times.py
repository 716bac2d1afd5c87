"""Each rank's own time in a log interval, told to the first rank beside the steps; that rank names slow ones."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megamix.comm.collectives import Collectives, Pending
from megamix.comm.host import gather_json
from megamix.comm.topology import Topology
from megamix.report.metrics import RANKS
from megamix.report.slow_ranks import KEPT, KINDS, RankPlace, Slow, SlowRanks
from megamix.supervise.console import folded

_WORK = {"data": "data", "forward_backward": "forward and backward", "update": "the update"}  # by KINDS
_GPU = {"clock_mhz": "MHz", "power_w": "W", "temperature_c": "C"}  # a GPU's readings, with their units


class Told(NamedTuple):
    """What the first rank has learned of an earlier log interval."""

    tags: dict[str, float]
    row: dict[str, Any]  # of every rank, for ranks.jsonl
    lines: list[str]  # of parties that have become slow


class RankTimes:
    """Tells this rank's times and learns those of the others. Every rank has one; its calls are collective.

    The ranks' rows travel while the next interval is trained, so no step waits for them.
    """

    def __init__(self, topology: Topology, side: Collectives, device: torch.device):
        """Learn the places of all ranks. `side`: collectives on the host, which no step uses."""
        self._side, self._device = side, device
        place = RankPlace(socket.gethostname(), topology.pp.rank, topology.data.rank)
        self._places = [RankPlace(*found) for found in gather_json(side, place, torch.device("cpu"))]
        self._rule = SlowRanks(self._places)
        self._slow = set[str]()
        self._under_way: tuple[int, Tensor, Pending] | None = None
        self._work_s = 0.0  # processor time of this object so far

    def exchange(self, step: int, span_s: Mapping[str, float]) -> Told | None:
        """Send this rank's times of the interval that ends with `step`, and return what the last call has sent.

        `span_s`: the seconds of an attempt by span. Return None on all but the first rank, at the first call, and if
        no ranks have equal work.
        """
        if not self._rule.compares:
            return None
        start_s = time.thread_time()
        before, told = self._under_way, None
        own = [*(span_s.get(kind, 0.0) for kind in KINDS), *_readings(self._device)]
        self._under_way = step, *self._side.start_table(torch.tensor(own, dtype=torch.float64))
        if before is not None:
            before[2].wait()  # these rows were sent a log interval ago
            told = self._told(before[0], before[1].numpy()) if self._side.axis.rank == 0 else None
        self._work_s += time.thread_time() - start_s
        return told

    def _told(self, step: int, table: np.ndarray) -> Told:
        times, readings = table[:, : len(KINDS)], table[:, len(KINDS) :]
        slow = self._rule.judge(times)
        rank, ratio = self._rule.slowest()
        row: dict[str, Any] = {"step": step, "slow": [one.ranks for one in slow], "work_s": round(self._work_s, 6)}
        row |= {f"{kind}_s": [float(f"{it:.4g}") for it in column] for kind, column in zip(KINDS, times.T, strict=True)}
        if not np.isnan(readings).any():
            row |= {name: column.tolist() for name, column in zip(_GPU, readings.T, strict=True)}
        lines = [_line(one, readings) for one in slow if one.words not in self._slow]
        self._slow = {one.words for one in slow}
        return Told({RANKS + "slowest_rank": rank, RANKS + "slowest_ratio": round(ratio, 4)}, row, lines)


def _readings(device: torch.device) -> list[float]:
    """Return a GPU's clock in MHz, power in W and temperature in degrees Celsius; NaN where nothing tells them."""
    if device.type == "cuda":  # pragma: CUDA only
        try:  # torch reads them by nvidia-ml-py, which not every machine has
            return [torch.cuda.clock_rate(device), torch.cuda.power_draw(device) / 1e3, torch.cuda.temperature(device)]
        except (ImportError, RuntimeError):
            pass
    return [math.nan] * len(_GPU)


def _line(slow: Slow, readings: np.ndarray) -> str:
    line = (
        f"in {slow.intervals} of the last {KEPT} log intervals; most in {_WORK[slow.kind]}, {slow.own_s:.4g} s an "
        f"attempt against {slow.others_s:.4g}"
    )
    if not np.isnan(readings).any():
        here = np.zeros(len(readings), bool)
        here[slow.ranks] = True
        mine, others = (
            ", ".join(f"{value:.0f} {unit}" for value, unit in zip(of.mean(0), _GPU.values(), strict=True))
            for of in (readings[here], readings[~here])
        )
        line += f"; GPU at {mine}, the others at {others}"
    return f"ranks | {slow.words} is slow: {slow.ratio:.2f} times the others' own time\n{folded(line)}"
