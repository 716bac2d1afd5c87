"""The rule by which a rank, or a node, counts as slow: by the time of its own work, against ranks with equal work."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megamix.launch.liveness import names

# A rank's own work: the clock's spans, each in words.
KINDS = {"data": "data", "forward_backward": "forward and backward", "update": "the update"}
_SHARE = 1.15  # of the others' mean: the least own time that counts as slow
_SPREADS = 3.0  # spreads of the own values by which it must lie above the others
_SPREAD_OF = 20  # log intervals that tell the spread: of five values it is often too small by chance
KEPT, _ENOUGH = 5, 3  # log intervals that are looked at, and those of them in which a slow rank is slow


class RankPlace(NamedTuple):
    """A rank's place. Ranks of one stage have equal work. Ranks of one stage and unit divide a layer or a sample, so
    they wait for each other within a forward.
    """

    host: str
    stage: int
    unit: int


class Slow(NamedTuple):
    """A slow rank, several that wait for each other, or a node."""

    words: str  # such as "rank 3 on n2", or "node n2, ranks 8 to 15,"
    ranks: list[int]
    ratio: float  # own time over the mean of the others
    intervals: int  # of the last log intervals, those in which it was slow
    kind: str  # of KINDS: the one that takes the most time beyond the others'
    own_s: float  # seconds of an attempt in this kind
    others_s: float


class SlowRanks:
    """Judges one log interval after another. A party is a node of several ranks, or the ranks of one unit."""

    def __init__(self, places: Sequence[RankPlace]):
        self._places, self._stages = places, np.array([place.stage for place in places])
        hosts, units = dict[object, list[int]](), dict[object, list[int]]()
        for rank, place in enumerate(places):
            hosts.setdefault(place.host, []).append(rank)
            units.setdefault((place.stage, place.unit), []).append(rank)
        # Nodes come first: a rank of a slow node is not named by itself.
        nodes = [ranks for ranks in hosts.values() if len(ranks) > 1]
        self._sizes = np.bincount(self._stages)  # ranks of each stage
        self._parties = [
            (ranks, ranks in nodes, deque[float](maxlen=_SPREAD_OF))
            for ranks in [*nodes, *(ranks for ranks in units.values() if ranks not in nodes)]
            if all(self._sizes[stage] > number for stage, number in Counter(self._stages[ranks].tolist()).items())
        ]

    @property
    def compares(self) -> bool:
        """Return whether any ranks have equal work and do not wait for each other within a forward."""
        return bool(self._parties)

    def judge(self, times: np.ndarray) -> list[Slow]:
        """Return what is slow now. `times`: FP64 (ranks, KINDS), the seconds of an attempt in each kind of work."""
        found = list[Slow]()
        totals = np.zeros((len(self._sizes), len(KINDS)))
        np.add.at(totals, self._stages, times)
        for ranks, is_node, ratios in self._parties:
            own, others = times[ranks], self._others(totals, times, ranks)
            ratios.append(float(own.sum() / max(others.sum(), 1e-9)))
            # From one interval to the next: a level that has changed adds nothing to the spread.
            changes = [abs(ratio - before) for before, ratio in pairwise(ratios)]
            least = max(_SHARE, 1 + _SPREADS * statistics.median(changes or [0.0]) / math.sqrt(2))
            intervals = sum(ratio > least for ratio in [*ratios][-KEPT:])
            all_are = (own.sum(1) > _SHARE * others.sum(1)).all()
            # The spread of fewer values than KEPT is too small by chance.
            is_slow = len(ratios) >= KEPT and intervals >= _ENOUGH and all_are
            if is_slow and not any({*ranks} <= {*slow.ranks} for slow in found):
                kind = int((own - others).mean(0).argmax())
                host = self._places[ranks[0]].host
                words = f"node {host}, {names(ranks)}," if is_node else f"{names(ranks)} on {host}"
                means = float(own[:, kind].mean()), float(others[:, kind].mean())
                found.append(Slow(words, ranks, ratios[-1], intervals, [*KINDS][kind], *means))
        return found

    def slowest(self) -> tuple[int, float]:
        """Return the first rank of the slowest unit in the last interval, and its own time over the others'."""
        return max(((ranks[0], ratios[-1]) for ranks, _, ratios in self._parties), key=lambda found: found[1])

    def _others(self, totals: np.ndarray, times: np.ndarray, ranks: list[int]) -> np.ndarray:
        """Return for each rank of a party the mean of the ranks of its stage outside the party: (party, KINDS).
        `totals`: (stages, KINDS).
        """
        stages = self._stages[ranks]
        sums, counts = totals.copy(), self._sizes - np.bincount(stages, minlength=len(self._sizes))
        np.subtract.at(sums, stages, times[ranks])
        return np.asarray(sums[stages] / counts[stages, None])
