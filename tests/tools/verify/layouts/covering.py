"""A few runs in place of a whole matrix: every value of every axis at least twice, and as many pairs as fit."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Run = dict[str, object]


def covering_runs(
    axes: Mapping[str, Sequence[object]], allowed: Callable[[Run], bool], most: int, seed: int = 0
) -> list[Run]:
    """Return runs chosen greedily: each shows the most pairs of values not shown yet.

    Values not shown twice count as much as many pairs. There are fewer than `most` runs if nothing is left to show.
    """
    matrix = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    matrix = [run for run in matrix if allowed(run)]
    random.Random(seed).shuffle(matrix)
    shown: set[tuple[object, ...]] = set()
    counts: Counter[tuple[str, object]] = Counter()

    def gain(run: Run) -> int:
        pairs = sum(pair not in shown for pair in itertools.combinations(run.items(), 2))
        return pairs + 100 * sum(counts[item] < 2 for item in run.items())

    runs: list[Run] = []
    while len(runs) < most:
        best = max(matrix, key=gain)
        if gain(best) == 0:
            break
        runs.append(best)
        matrix.remove(best)
        shown.update(itertools.combinations(best.items(), 2))
        counts.update(best.items())
    return runs


def whole_matrix(axes: Mapping[str, Sequence[object]], allowed: Callable[[Run], bool]) -> list[Run]:
    runs = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [run for run in runs if allowed(run)]
