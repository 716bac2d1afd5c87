"""Experts that ranks divide: each rank sends its rows to the ranks that hold their experts, and gets the outputs back.

A rank holds a run of neighbouring experts. An expert sees the rows of all ranks in the order of the ranks, so its
products have the bits of one process with these rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamix.comm.collectives import Collectives
from megamix.model.decoder import Decoder
from megamix.model.experts import Experts
from megamix.model.ops import Compute, Ops, host_counts
from megamix.model.wide import Crossing, apply


def divide_experts(model: Decoder, ep: Collectives) -> None:
    """Make experts whose stacks are this rank's blocks compute for all ranks of `ep`. Their calls are collective then,
    in evaluation, too.
    """
    exchange = _Exchange(ep)
    for module in model.modules():
        if isinstance(module, Experts):
            module.ops = replace(module.ops, at_experts=exchange)
    model.around_recompute = exchange.around_recompute


class _Exchange:
    """Computes each row at its expert's rank. The host waits for the device once, for the numbers of rows; not again
    where backward repeats a forward.
    """

    def __init__(self, ep: Collectives):
        self._ep = ep
        self._next_way: Callable[[Tensor, int], _Way] = self._new_way
        # As in borders.py: the compiler can trace only some collectives of some backends.
        self._away: Callable[..., Tensor] = torch.compiler.disable(self._compute_away)  # type: ignore[no-untyped-call]  # untyped in torch

    def __call__(self, ops: Ops, rows: Tensor, weights: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        return self._away(rows, weights, counts, compute)

    def _new_way(self, counts: Tensor, num_rows: int) -> _Way:
        return _Way.between(self._ep, counts, num_rows)

    def around_recompute(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a block's forward, in which ways are kept, and of its repetition, which takes them."""
        ways = deque[_Way]()

        def keep(counts: Tensor, num_rows: int) -> _Way:
            ways.append(self._new_way(counts, num_rows))
            return ways[-1]

        return self._finding_ways(keep), self._finding_ways(lambda counts, num_rows: ways.popleft())

    @contextmanager
    def _finding_ways(self, next_way: Callable[[Tensor, int], _Way]) -> Iterator[None]:
        before, self._next_way = self._next_way, next_way
        try:
            yield
        finally:
            self._next_way = before

    def _compute_away(self, rows: Tensor, weights: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        way = self._next_way(counts, len(rows))
        arrived = apply(Crossing, rows, way.there, way.back)
        arrived_weights = apply(Crossing, weights, way.there, way.back)
        out = compute(arrived, arrived_weights, way.counts)
        return apply(Crossing, out, way.back, way.there)


@dataclass(frozen=True, slots=True)
class _Way:
    """The way of this rank's rows, sorted by expert, to the experts' ranks. There, rows of an expert follow each other,
    those of the first rank first.
    """

    ep: Collectives
    to: list[int]  # rows to each rank
    of: list[int]  # rows from each rank
    order: Tensor  # INT64 (rows here,): places among the arrived rows, which are sorted by rank and then by expert
    counts: Tensor  # INT64 (experts here,): rows of each expert

    @staticmethod
    def between(ep: Collectives, counts: Tensor, num_rows: int) -> _Way:
        """Return the way of `num_rows` rows. Every rank must call it. Shapes: counts INT64 (experts,)."""
        size, rank = ep.axis.size, ep.axis.rank
        by_rank = ep.gather(counts).view(size, size, -1)  # rows of each rank for each rank's experts
        arriving = by_rank[:, rank]
        both = host_counts(torch.cat((by_rank[rank].sum(1), arriving.sum(1))), 2 * num_rows)
        # Runs of arriving rows, sorted by rank and then by expert; each row's run is the first that ends behind it.
        ends = arriving.flatten().cumsum(0)
        runs = torch.searchsorted(ends, torch.arange(sum(both[size:]), device=ends.device), right=True)
        order = (runs % arriving.shape[1]).argsort(stable=True)
        return _Way(ep, both[:size], both[size:], order, arriving.sum(0))

    def there(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's experts. Shapes: (rows, ...) -> (rows here, ...)."""
        return self._exchanged(rows, self.to, self.of)[self.order]

    def back(self, rows: Tensor) -> Tensor:
        """Return the rows that this rank has sent. Shapes: (rows here, ...) -> (rows, ...)."""
        arrived = torch.empty_like(rows).index_copy_(0, self.order, rows)
        return self._exchanged(arrived, self.of, self.to)

    def _exchanged(self, rows: Tensor, to: list[int], of: list[int]) -> Tensor:
        arrived = rows.new_empty(sum(of), *rows.shape[1:])
        size = math.prod(rows.shape[1:])
        sent, into = rows.contiguous().view(-1), arrived.view(-1)
        self.ep.exchange(sent, into, [size * number for number in to], [size * number for number in of]).wait()
        return arrived
