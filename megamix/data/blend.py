"""Which source a sample of a mixture comes from: a pure function of the sample's number, exact for any number of
samples, with nothing kept on the disk.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def blend_order(weights: Sequence[int]) -> NDArray[np.int32]:
    """The sources of the first sum(weights) samples; the same again ever after.

    Tijdeman's rule (The chairman assignment problem, 1980): of the sources whose share is due, the one with the
    earliest deadline. After any n samples each source has given more than weight * n / sum - 1 and fewer than
    weight * n / sum + 1, however many sources there are. Taking the largest error first instead breaks that from a
    handful of sources on.
    Shapes: weights, whole and not negative -> INT32 (sum(weights),).
    """
    period = sum(weights)
    order = np.empty(period, dtype=np.int32)
    given = [0] * len(weights)
    # (first sample at which it is due, source) and (the sample it must be given at, at the latest, source).
    waiting = [(1, source) for source, weight in enumerate(weights) if weight]
    due: list[tuple[int, int]] = []
    for sample in range(1, period + 1):
        while waiting and waiting[0][0] <= sample:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(due, (-(-(given[source] + 1) * period // weights[source]), source))
        source = heapq.heappop(due)[1]
        order[sample - 1] = source
        given[source] += 1
        heapq.heappush(waiting, (given[source] * period // weights[source] + 1, source))
    return order


@dataclass(frozen=True, slots=True)
class BlendStage:
    """From this sample on, so much of each source; of those that are not in the mixture, 0."""

    from_sample: int
    weights: tuple[int, ...]


class Blend:
    """A mixture that may change at given samples. A source goes on where the stage before left it."""

    def __init__(self, stages: Sequence[BlendStage]) -> None:
        """`stages`: the first from sample 0 on, the others later and later."""
        assert stages[0].from_sample == 0, stages
        self._starts = np.array([stage.from_sample for stage in stages], dtype=np.int64)
        self._weights = np.array([stage.weights for stage in stages], dtype=np.int64)  # (stages, sources)
        self._orders = [blend_order(stage.weights) for stage in stages]
        self._ranks = [_ranks(order) for order in self._orders]
        self._given = np.zeros_like(self._weights)  # by each source, before each stage
        for stage in range(1, len(stages)):
            length = int(self._starts[stage] - self._starts[stage - 1])
            periods, rest = divmod(length, len(self._orders[stage - 1]))
            of_rest = np.bincount(self._orders[stage - 1][:rest], minlength=self._weights.shape[1])
            self._given[stage] = self._given[stage - 1] + periods * self._weights[stage - 1] + of_rest

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each sample's source, and its number there.

        Shapes: INT64 (n,) -> INT64 (n,), INT64 (n,).
        """
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        stages = np.searchsorted(self._starts, samples, side="right") - 1
        for stage in np.unique(stages).tolist():
            here, order = stages == stage, self._orders[stage]
            periods, places = np.divmod(samples[here] - self._starts[stage], len(order))
            source = order[places]
            sources[here] = source
            numbers[here] = (
                self._given[stage, source] + periods * self._weights[stage, source] + self._ranks[stage][places]
            )
        return sources, numbers


def _ranks(order: NDArray[np.int32]) -> NDArray[np.int32]:
    """How often each place's source came before it."""
    by_source = np.argsort(order, kind="stable")
    counts = np.bincount(order)
    ranks = np.empty_like(order)
    ranks[by_source] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks
