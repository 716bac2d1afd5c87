"""A few runs in place of a whole matrix: every value of every axis at least twice, and as many pairs as fit."""

import itertools
import random
from collections import Counter


def covering_runs(axes, allowed, most):
    """Return runs chosen greedily: each shows the most pairs of values not shown yet.

    Values not shown twice count as much as many pairs. There are fewer than `most` runs if nothing is left to show.
    """
    matrix = whole_matrix(axes, allowed)
    random.Random(0).shuffle(matrix)
    shown, counts = set(), Counter()

    def gain(run):
        pairs = sum(pair not in shown for pair in itertools.combinations(run.items(), 2))
        return pairs + 100 * sum(counts[item] < 2 for item in run.items())

    runs = []
    while len(runs) < most:
        best = max(matrix, key=gain)
        if gain(best) == 0:
            break
        runs.append(best)
        matrix.remove(best)
        shown.update(itertools.combinations(best.items(), 2))
        counts.update(best.items())
    return runs


def whole_matrix(axes, allowed):
    runs = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [run for run in runs if allowed(run)]
