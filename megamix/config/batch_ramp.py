"""The sizes of a run's global batches, one or a ramp's, and the tokens that its updates take."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamix.config.sections import Config, TrainingConfig


def sizes_by_key(training: TrainingConfig) -> Iterator[tuple[str, int]]:
    """Yield the key of each size, and the size in sequences."""
    yield "global_batch_size", training.global_batch_size
    for place, (_, size) in enumerate(training.batch_ramp[:-1]):
        yield f"batch_ramp[{place}][1]", size


def batch_size(training: TrainingConfig, applied: int) -> int:
    """Return the sequences of the next update's batch, after so many updates."""
    return [size for first, size in _sizes(training) if first <= applied][-1]


def tokens_of(config: Config, updates: int) -> int:
    """Return the tokens of a run's first updates."""
    borders = pairwise([*_sizes(config.training), (updates, 0)])
    samples = sum(size * max(0, min(stop, updates) - first) for (first, size), (stop, _) in borders)
    return samples * config.model.seq_len


def _sizes(training: TrainingConfig) -> list[tuple[int, int]]:
    """Return pairs of a number of updates and the size of the batches from there on."""
    return [*training.batch_ramp] or [(0, training.global_batch_size)]
