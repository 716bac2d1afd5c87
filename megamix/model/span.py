"""The positions of a sequence that one of several ranks computes, and the keys that they see.

A sequence is cut into two chunks for each rank. Rank r has the r-th chunk from the front and the r-th from the back, so
every rank computes as many pairs of query and key of one causal sequence (zigzag; Zhu 2023, ring-flash-attention).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from megamix.model.context import most_borders
from megamix.model.ops import Segments, has_values


@dataclass(frozen=True, slots=True)
class AttentionPiece:
    """Queries and keys of one sequence or of all, between which nothing is masked, or only what comes later.

    `rows`: the queries among a rank's own positions. `columns`: the keys among all positions. `causal`: each query sees
    the keys up to its own place, and there are as many of both.
    """

    sequences: slice
    rows: slice
    columns: slice
    causal: bool


class Chunks:
    """One rank's positions of sequences of `num_positions`, in a forward."""

    def __init__(self, num_ranks: int, rank: int, num_positions: int):
        self.num_positions, self.chunk = num_positions, num_positions // (2 * num_ranks)
        self._order = [chunk for r in range(num_ranks) for chunk in (r, 2 * num_ranks - 1 - r)]  # in rank order
        self._firsts = [chunk * self.chunk for chunk in self._order[2 * rank : 2 * rank + 2]]
        self.pieces: list[AttentionPiece] = []
        self.segments: list[Segments] = []  # of each chunk's queries and the keys that they see

    @cached_property
    def _places(self) -> list[int]:
        """Return for each chunk its place in rank order."""
        return [self._order.index(chunk) for chunk in range(len(self._order))]

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's positions of a tensor whose `dim` has an entry for each."""
        return torch.cat([x.narrow(dim, first, self.chunk) for first in self._firsts], dim)

    def whole(self, parts: Tensor) -> Tensor:
        """Put the ranks' positions in order. Shapes: (ranks, ..., T / ranks, heads, D) -> (..., T, heads, D)."""
        chunks = [chunk for part in parts.unbind() for chunk in torch.split(part, self.chunk, -3)]
        return torch.cat([chunks[place] for place in self._places], -3)

    def by_rank(self, x: Tensor) -> Tensor:
        """Return each rank's positions. Shapes: (..., T, heads, D) -> (ranks, ..., T / ranks, heads, D)."""
        chunks = torch.split(x, self.chunk, -3)
        pairs = zip(self._order[::2], self._order[1::2], strict=True)
        return torch.stack([torch.cat([chunks[one], chunks[other]], -3) for one, other in pairs])

    def see(self, positions: Tensor | None, num_documents: int, like: Tensor, *, by_borders: bool) -> None:
        """Find what this rank's queries see. `positions`: those of all, INT64 (B, T); None for one document each.
        `num_documents`: upper bound of their number, or 0. `like`: hidden states. `by_borders`: as borders for a GPU's
        kernels, without reading the device; otherwise as pieces.
        """
        if by_borders:
            if positions is None:
                positions = torch.arange(self.num_positions, device=like.device).expand(len(like), -1)
                most = len(positions)
            else:  # of two sizes, so that their number seldom changes a shape
                most = most_borders(positions)
                most = most if 0 < num_documents <= most else len(positions) * self.chunk
            self.segments = [*self._find_segments(positions, most)]
        elif not like.is_cpu:
            raise ValueError(
                f"parallelism.cp_size: on a {like.device.type} device needs FP16 or BF16 and heads of a multiple of 8 "
                f"elements up to 256, got {like.dtype}; choose those, or cp_size = 1"
            )
        elif positions is None or not has_values(positions):  # planned as one document each
            self.pieces = self._find_pieces(slice(None), [0])
        else:
            begins = [[0, *(row[1:] == 0).nonzero().flatten().add(1).tolist()] for row in positions.cpu()]
            self.pieces = [
                piece
                for number, row in enumerate(begins)
                for piece in self._find_pieces(slice(number, number + 1), row)
            ]

    def _find_pieces(self, sequences: slice, begins: list[int]) -> list[AttentionPiece]:
        """Cut each document of a chunk in two: the keys before the chunk, and those in it. `begins`: of documents."""
        pieces = []
        for number, first in enumerate(self._firsts):
            shift = number * self.chunk - first
            for start, stop in zip(begins, [*begins[1:], self.num_positions], strict=True):
                begin, end = max(start, first), min(stop, first + self.chunk)
                if begin < end:
                    rows = slice(begin + shift, end + shift)
                    pieces.append(AttentionPiece(sequences, rows, slice(begin, end), causal=True))
                    if start < begin:
                        pieces.append(AttentionPiece(sequences, rows, slice(start, begin), causal=False))
        return pieces

    def _find_segments(self, positions: Tensor, most: int) -> Iterator[Segments]:
        """Yield the segments of each chunk: its documents, and before each sequence's and behind the last one's a
        segment without queries, so that every key is in a segment. The host does not wait for the device. `most`: upper
        bound of the number of documents.
        """
        batch, chunk, num_positions = len(positions), self.chunk, self.num_positions
        sequence = torch.arange(batch, device=positions.device)[:, None]
        query = torch.arange(chunk, device=positions.device)[None]
        for first in self._firsts:
            # Each query's place in its document, which may have begun in the sequence before.
            within = torch.minimum(positions[:, first : first + chunk], first + query)
            begins = pad(within == 0, (1, 0), value=True)
            begins[:, 1] = True  # the rest of a document that began before the chunk
            # The segment in front of a sequence begins where the chunk of the sequence before ends.
            in_front = (sequence - 1) * num_positions + first + chunk
            queries = torch.cat((sequence * chunk, sequence * chunk + query), 1)
            keys = torch.cat((in_front.clamp(min=0), sequence * num_positions + first + query - within), 1)
            # Behind the last sequence another such segment begins where its chunk ends.
            queries = pad(queries.flatten(), (0, 1), value=batch * chunk)
            keys = pad(keys.flatten(), (0, 1), value=(batch - 1) * num_positions + first + chunk)
            at = torch.nonzero_static(begins.flatten(), size=most + batch + 1, fill_value=begins.numel()).flatten()
            # The last border is the end of all.
            queries = pad(queries[at], (0, 1), value=batch * chunk)
            keys = pad(keys[at], (0, 1), value=batch * num_positions)
            yield Segments(queries.int(), keys.int())


class Span:
    """The place of a rank among those that divide the positions of each sequence."""

    def __init__(self, num_ranks: int, rank: int):
        self.num_ranks, self.rank = num_ranks, rank
        self.part: Chunks | None = None  # of the latest forward; None: it had all positions

    def begin(self, targets: Tensor | None) -> Chunks | None:
        """Return this rank's part of a forward; None for one without targets, which every rank computes whole.

        Raises: ValueError for a number of positions that the ranks cannot divide.
        """
        self.part = None
        if targets is not None:
            if (num_positions := targets.shape[1]) % (2 * self.num_ranks):
                raise ValueError(
                    f"targets has {num_positions} positions, which {self.num_ranks} context-parallel ranks cannot "
                    f"divide into two chunks each; pass a multiple of {2 * self.num_ranks}"
                )
            self.part = Chunks(self.num_ranks, self.rank, num_positions)
        return self.part
