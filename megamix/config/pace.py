"""How long a run is, and how large its batches are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

# The section [training] is typed Any, since `sections` imports this module.


class Pace:
    """The global batches of a run: their sizes, one or a ramp's, and the tokens that its updates take."""

    def __init__(self, training: Any, seq_len: int):
        self.steps: int = training.steps
        self.in_tokens = bool(training.tokens)  # whether the run is as long as training.tokens
        self.micro_batch_size: int = training.micro_batch_size
        # Pairs of a number of updates and the size of the batches from there on.
        self.sizes: list[tuple[int, int]] = [*training.batch_ramp] or [(0, training.global_batch_size)]
        self.seq_len = seq_len

    def batch_size(self, applied: int) -> int:
        """Return the sequences of the next update's batch, after so many updates."""
        return [size for first, size in self.sizes if first <= applied][-1]

    def tokens(self, updates: int) -> int:
        """Return the tokens of the first updates."""
        borders = pairwise([*self.sizes, (updates, 0)])
        return self.seq_len * sum(size * max(0, min(stop, updates) - first) for (first, size), (stop, _) in borders)

    def tokens_left(self, update: int) -> int:
        """Return the tokens of all updates after that one."""
        return self.tokens(self.steps) - self.tokens(update)

    def __str__(self) -> str:
        sizes = [f"{size} from update {first + 1} on" for first, size in self.sizes]
        batches = ", ".join(sizes) if len(sizes) > 1 else self.sizes[0][1]
        return f"{self.steps} steps of {batches} x {self.seq_len} tokens"


def sizes_by_key(training: Any) -> Iterator[tuple[str, int]]:
    """Yield the key of each size, and the size in sequences."""
    yield "global_batch_size", training.global_batch_size
    for place, (_, size) in enumerate(training.batch_ramp[:-1]):
        yield f"batch_ramp[{place}][1]", size


def with_steps(tables: Any) -> Any:
    """Return a configuration's tables; of a run that is as long as training.tokens, with the number of its updates."""
    training = tables.get("training") if isinstance(tables, Mapping) else None
    if not isinstance(training, Mapping) or not training.get("tokens"):
        return tables
    steps = 1  # stands in where another value is unusable, which is reported
    with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        told = SimpleNamespace(**{"batch_ramp": (), "micro_batch_size": 1, **training, "steps": 0})
        steps += bisect_left(range(1, 2**48), training["tokens"], key=Pace(told, tables["model"]["seq_len"]).tokens)
    return {**tables, "training": {**training, "steps": steps}}
