"""The sizes of a run's global batches, one or a ramp's, and the tokens that its updates take."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

# The sections are typed Any, since `sections` imports this module.


def sizes_by_key(training: Any) -> Iterator[tuple[str, int]]:
    """Yield the key of each size, and the size in sequences."""
    yield "global_batch_size", training.global_batch_size
    for place, (_, size) in enumerate(training.batch_ramp[:-1]):
        yield f"batch_ramp[{place}][1]", size


def batch_size(training: Any, applied: int) -> int:
    """Return the sequences of the next update's batch, after so many updates."""
    return [size for first, size in _sizes(training) if first <= applied][-1]


def tokens_of(config: Any, updates: int) -> int:
    """Return the tokens of a run's first updates."""
    seq_len: int = config.model.seq_len
    return seq_len * _sequences(_sizes(config.training), updates)


def with_steps(tables: Any) -> Any:
    """Return a configuration's tables; of a run that is as long as training.tokens, with the number of its updates."""
    training = tables.get("training") if isinstance(tables, Mapping) else None
    if not isinstance(training, Mapping) or not training.get("tokens"):
        return tables
    steps = 1  # stands in where another value is unusable, which is reported
    with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        sizes, seq_len = _sizes(SimpleNamespace(**{"batch_ramp": (), **training})), tables["model"]["seq_len"]
        steps += bisect_left(range(1, 2**48), training["tokens"], key=lambda n: seq_len * _sequences(sizes, n))
    return {**tables, "training": {**training, "steps": steps}}


def _sizes(training: Any) -> list[tuple[int, int]]:
    """Return pairs of a number of updates and the size of the batches from there on."""
    return [*training.batch_ramp] or [(0, training.global_batch_size)]


def _sequences(sizes: list[tuple[int, int]], updates: int) -> int:
    """Return the sequences in the batches of the first updates."""
    borders = pairwise([*sizes, (updates, 0)])
    return sum(size * max(0, min(stop, updates) - first) for (first, size), (stop, _) in borders)
