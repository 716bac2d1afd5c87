"""Experts that ranks divide: a rank sends its rows to the ranks that hold their experts, and gets the outputs back. Or
each rank gets all tokens, and computes those of its experts.

A rank holds a run of neighbouring experts. An expert sees the rows of all ranks in the order of the ranks, so its
products have the bits of one process with these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megamix.base.values import has_values
from megamix.comm.collectives import Collectives
from megamix.model.decoder import Decoder
from megamix.model.experts import AtExperts, Compute, Experts, Routes, SortedRows, at_own_experts
from megamix.model.ops import host_counts
from megamix.model.wide import Crossing, apply

FindWay = Callable[[Tensor, int], "_Way"]


def divide_experts(model: Decoder, ep: Collectives, *, gathers: bool = False) -> None:
    """Make experts whose stacks are this rank's blocks compute for all ranks of `ep`. Their calls are collective then,
    in evaluation, too. `gathers`: each rank gets all tokens, and the host waits for nothing.
    """
    if gathers:
        way: AtExperts = torch.compiler.disable(partial(_at_gathered, ep))  # type: ignore[no-untyped-call]  # untyped in torch
    else:
        way = exchange = _Exchange(ep)
        model.around_recompute = exchange.around_recompute
    for module in model.modules():
        if isinstance(module, Experts):
            module.at_experts = way


class _Exchange:
    """Computes each row at its expert's rank. The host waits for the device once, for the numbers of rows; not again
    where backward repeats a forward.
    """

    def __init__(self, ep: Collectives):
        self._new_way: FindWay = partial(_Way.between, ep)
        self.find_way: FindWay = self._new_way
        # As in borders.py: the compiler can trace only some collectives of some backends.
        self._away: Callable[..., Tensor] = torch.compiler.disable(self._compute_away)  # type: ignore[no-untyped-call]  # untyped in torch

    def __call__(self, x: Tensor, routes: Routes, compute: Compute) -> Tensor:
        return at_own_experts(x, routes, partial(self._away, compute))

    def around_recompute(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a block's forward, in which ways are kept, and of its repetition, which takes them."""
        ways = list[_Way]()

        def keeping(counts: Tensor, num_rows: int) -> _Way:
            ways.append(self._new_way(counts, num_rows))
            return ways[-1]

        def taking() -> FindWay:
            kept = iter(ways)
            return lambda counts, num_rows: next(kept)

        return _FindingWays(self, lambda: keeping), _FindingWays(self, taking)

    def _compute_away(self, compute: Compute, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        way = self.find_way(counts, len(rows))
        arrived = apply(Crossing, rows, way.there, way.back)
        arrived_weights = apply(Crossing, weights, way.there, way.back)
        out = compute(arrived, arrived_weights, way.counts)
        return apply(Crossing, out, way.back, way.there)


class _FindingWays(AbstractContextManager[None]):
    """Lets an exchange find ways otherwise inside a block. A backward in two halves enters it twice."""

    def __init__(self, exchange: _Exchange, begin: Callable[[], FindWay]):
        self._exchange, self._begin = exchange, begin

    def __enter__(self) -> None:
        self._before, self._exchange.find_way = self._exchange.find_way, self._begin()

    def __exit__(self, *error: object) -> None:
        self._exchange.find_way = self._before


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
        to, of = rows_of_ranks(by_rank[rank].sum(1), arriving.sum(1), num_rows)
        # Runs of arriving rows, sorted by rank and then by expert; each row's run is the first that ends behind it.
        ends = arriving.flatten().cumsum(0)
        runs = torch.searchsorted(ends, torch.arange(sum(of), device=ends.device), right=True)
        order = (runs % arriving.shape[1]).argsort(stable=True)
        return _Way(ep, to, of, order, arriving.sum(0))

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


def rows_of_ranks(to: Tensor, of: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Return the rows to each rank, `num_rows` in all, and those from each. On a GPU the host waits for both at once.
    Without values, as in a memory plan, ranks get equal parts, and as many rows arrive. Shapes: INT64 (ranks,).
    """
    if not has_values(to):
        even = host_counts(to, num_rows)
        return even, even
    both: list[int] = torch.cat((to, of)).tolist()
    return both[: len(to)], both[len(to) :]


def _at_gathered(ep: Collectives, x: Tensor, routes: Routes, compute: Compute) -> Tensor:
    """Compute the tokens of all ranks at each rank's own experts, and sum the ranks' outputs. There is room for as many
    rows as could come, so the host waits for nothing. Each rank's sum of a token is rounded once more than an exchange
    does.
    """

    def gathered(x: Tensor) -> Tensor:
        """Return the tokens of all ranks, in their order."""
        return ep.gather(x.reshape(-1)).view(-1, *x.shape[1:])

    def summed(x: Tensor) -> Tensor:
        """Return this rank's tokens of the ranks' sum."""
        return ep.sum_parts(x.reshape(ep.axis.size, -1)).view(-1, *x.shape[1:])

    all_x, all_weights = (apply(Crossing, own, gathered, summed) for own in (x, routes.weights))
    num_here = len(routes.counts) // ep.axis.size
    rows = _RowsHere.among(gathered(routes.experts) - ep.axis.rank * num_here, num_here)
    weights = all_weights.flatten()[rows.order].masked_fill(rows.is_foreign, 0)
    out = compute(apply(Crossing, all_x, rows.spread, rows.join), weights, rows.counts)
    return apply(Crossing, apply(Crossing, out, rows.join, rows.spread), summed, gathered)


@dataclass(frozen=True, slots=True)
class _RowsHere(SortedRows):
    """The rows of the copies whose experts are here, and behind them foreign ones, whose values are unset. `row_of` has
    any row for a foreign copy.
    """

    elsewhere: Tensor  # BOOL (tokens, top_k): copies whose experts are not here
    is_foreign: Tensor  # BOOL (rows,)
    counts: Tensor  # INT64 (experts here,)

    @staticmethod
    def among(experts: Tensor, num_here: int) -> _RowsHere:
        """Return the rows of tokens with these experts, INT64 (tokens, top_k); those here are 0 to num_here - 1."""
        elsewhere = (experts < 0) | (experts >= num_here)
        experts = experts.masked_fill(elsewhere, num_here)
        counts = experts.new_zeros(num_here + 1).scatter_add_(0, experts.flatten(), torch.ones_like(experts).flatten())
        rows, most = SortedRows.sorted_by(experts), len(experts) * min(experts.shape[1], num_here)
        order = rows.order[:most]
        is_foreign = elsewhere.flatten()[order]
        return _RowsHere(order, rows.row_of.clamp(max=most - 1), elsewhere, is_foreign, counts[:-1])

    def join(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows here, added in FP32 and rounded once."""
        total = torch.zeros(1, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
        for places, elsewhere in zip(self.row_of.unbind(1), self.elsewhere.unbind(1), strict=True):
            total = total + rows.index_select(0, places).masked_fill(elsewhere.unsqueeze(1), 0)
        return total.to(rows.dtype)
