"""The positions of a sequence that one of several ranks computes, and the keys that they see.

A sequence is cut into two chunks for each rank. Rank r has the r-th chunk from the front and the r-th from the back, so
every rank computes as many pairs of query and key of one causal sequence (zigzag; Zhu 2023, ring-flash-attention).
Packed documents are less regular: the loader deals more and smaller chunks, each sequence by its own documents.
Ranks that divide the heads in attention have one chunk each, since they then see all positions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megamix.base.values import has_values
from megamix.model.context import Documents, most_borders
from megamix.model.ops import Segments


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
    """One rank's positions in a forward. `deal`: the chunks of each rank, INT64 (B, ranks, chunks). `by_heads`: in
    attention the rank sees all positions, with some of the heads.
    """

    def __init__(self, deal: Tensor, rank: int, num_positions: int, *, by_heads: bool = False):
        self.num_positions, self.chunk = num_positions, num_positions // deal[0].numel()
        self.by_heads, self._deal, self._rank = by_heads, deal, rank
        self._firsts = deal[:, rank] * self.chunk  # each chunk's first position: (B, chunks)
        within = torch.arange(self.chunk, device=deal.device)
        self.places = (self._firsts[..., None] + within).flatten(1)  # this rank's positions, INT64 (B, T / ranks)
        self._order = deal.flatten(1).argsort(1)  # each chunk's place in rank order: (B, ranks * chunks)
        self.pieces = list[AttentionPiece]()
        self.segments = list[Segments]()  # for each chunk's queries, the keys that they see
        self._positions: Tensor | None = None  # places in documents, (B, T); None for one document each
        self.documents: Documents | None = None  # if the rank sees all positions

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's positions. Shapes: (B, T, ...) -> (B, T / ranks, ...)."""
        return x[_numbers(x)[:, None], self.places]

    def whole(self, parts: Tensor) -> Tensor:
        """Put the ranks' positions in order. Shapes: (ranks, K, B, T / ranks, heads, D) -> (K, B, T, heads, D)."""
        kinds, num_chunks = parts.shape[1], self._deal.shape[2]
        kind, sequence = _numbers(parts[0])[:, None, None], _numbers(self._deal)[:, None]
        holder, place = self._order // num_chunks, self._order % num_chunks
        chunk = ((holder * kinds + kind) * len(self._deal) + sequence) * num_chunks + place
        return self._chunks(parts, chunk).flatten(2, 3)

    def by_rank(self, x: Tensor) -> Tensor:
        """Return each rank's positions. Shapes: (K, B, T, heads, D) -> (ranks, K, B, T / ranks, heads, D)."""
        kind, sequence = _numbers(x)[:, None, None], _numbers(self._deal)[:, None]
        chunk = (kind * len(self._deal) + sequence) * self._order.shape[1] + self._deal.transpose(0, 1)[:, None]
        return self._chunks(x, chunk).flatten(3, 4)

    def _chunks(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return chunks by number, contiguous. Shapes: (..., positions, heads, D) -> (*numbers, chunk, heads, D)."""
        chunks = x.reshape(-1, self.chunk, *x.shape[-2:]).index_select(0, numbers.flatten())
        return chunks.view(*numbers.shape, *chunks.shape[1:])

    def see(self, positions: Tensor | None, num_documents: int, like: Tensor, *, by_borders: bool) -> None:
        """Find what this rank's queries see. `positions`: those of all, INT64 (B, T); None for one document each.
        `num_documents`: upper bound of their number, or 0. `like`: hidden states. `by_borders`: as borders for a GPU's
        kernels, without reading the device; otherwise as pieces.

        Raises: ValueError on a GPU that has no kernel for these hidden states.
        """
        self._positions = positions
        if by_borders:
            if positions is None:
                positions = torch.arange(self.num_positions, device=like.device).expand(len(like), -1)
                most = len(positions)
            else:  # one of two numbers, so that it seldom changes a shape
                most = most_borders(positions)
                most = most if 0 < num_documents <= most else len(positions) * self.chunk
            self.segments = [*self._find_segments(positions, most)]
        elif not like.is_cpu:
            raise ValueError(
                f"parallelism.context: on a {like.device.type} device needs FP16 or BF16 and heads of a multiple of 8 "
                f"elements up to 256, got {like.dtype}; choose those, or parallelism.context = false"
            )
        else:
            self.pieces = [*self._find_pieces(positions)]

    def seen(self, window: int) -> Tensor:
        """Return which keys this rank's queries see in a window: BOOL (B, 1, T / ranks, T)."""
        place = self.places[..., None]
        first = place - window + 1
        if self._positions is not None:  # a document may have begun in the sequence before
            first = torch.maximum(first, place - self.own(self._positions)[..., None])
        key = torch.arange(self.num_positions, device=place.device)
        return ((first <= key) & (key <= place)).unsqueeze(1)

    def _find_pieces(self, positions: Tensor | None) -> Iterator[AttentionPiece]:
        if not has_values(self._firsts):  # planned: one document each, and the first rank's chunks
            yield from self._pieces_of(slice(None), [0, self.num_positions - self.chunk], [0])
        elif positions is None:
            yield from self._pieces_of(slice(None), self._firsts[0].tolist(), [0])
        else:
            for number, (row, firsts) in enumerate(zip(positions, self._firsts.tolist(), strict=True)):
                begins = [0, *(row[1:] == 0).nonzero().flatten().add(1).tolist()]
                yield from self._pieces_of(slice(number, number + 1), firsts, begins)

    def _pieces_of(self, sequences: slice, firsts: Sequence[int], begins: Sequence[int]) -> Iterator[AttentionPiece]:
        """Cut each document of a chunk in two: the keys before the chunk, and those in it. `begins`: of documents."""
        for number, first in enumerate(firsts):
            shift = number * self.chunk - first
            for start, stop in zip(begins, [*begins[1:], self.num_positions], strict=True):
                begin, end = max(start, first), min(stop, first + self.chunk)
                if begin < end:
                    rows = slice(begin + shift, end + shift)
                    yield AttentionPiece(sequences, rows, slice(begin, end), causal=True)
                    if start < begin:
                        yield AttentionPiece(sequences, rows, slice(start, begin), causal=False)

    def _find_segments(self, positions: Tensor, most: int) -> Iterator[Segments]:
        """Yield the segments of each chunk: its documents, and before each sequence's and behind the last one's a
        segment without queries, so that every key is in a segment. The host does not wait for the device. `most`: upper
        bound of the number of documents.
        """
        batch, chunk, num_positions = len(positions), self.chunk, self.num_positions
        sequence = torch.arange(batch, device=positions.device)[:, None]
        query = torch.arange(chunk, device=positions.device)[None]
        own = torch.split(self.own(positions), chunk, 1)
        for first, within in zip(torch.split(self._firsts, 1, 1), own, strict=True):
            # Each query's place in its document, which may have begun in the sequence before.
            within = torch.minimum(within, first + query)
            begins = pad(within == 0, (1, 0), value=True)
            begins[:, 1] = True  # the rest of a document that began before the chunk
            # The segment in front of a sequence begins where the chunk of the sequence before ends.
            ends = sequence * num_positions + first + chunk
            in_front = pad(ends[:-1], (0, 0, 1, 0))
            queries = torch.cat((sequence * chunk, sequence * chunk + query), 1)
            keys = torch.cat((in_front, sequence * num_positions + first + query - within), 1)
            # Behind the last sequence another such segment begins where its chunk ends.
            queries = pad(queries.flatten(), (0, 1), value=batch * chunk)
            keys = torch.cat((keys.flatten(), ends[-1]))
            at = torch.nonzero_static(begins.flatten(), size=most + batch + 1, fill_value=begins.numel()).flatten()
            # The last border is the end of all.
            queries = pad(queries[at], (0, 1), value=batch * chunk)
            keys = pad(keys[at], (0, 1), value=batch * num_positions)
            yield Segments(queries.int(), keys.int())


def _numbers(x: Tensor) -> Tensor:
    """Return 0 to len(x) - 1, on x's device."""
    return torch.arange(len(x), device=x.device)


class Span:
    """The place of a rank among those that divide the positions of each sequence.

    `by_heads`: in attention ranks divide the heads instead, and each sees all positions.
    """

    def __init__(self, num_ranks: int, rank: int, *, by_heads: bool = False):
        self.num_ranks, self.rank, self.by_heads = num_ranks, rank, by_heads
        # A weak reference, because the forward and what it keeps for backward hold the part.
        self._part: weakref.ref[Chunks] | None = None

    @property
    def part(self) -> Chunks | None:
        """Return the part of the forward that runs, or runs again in backward; None if it has all positions."""
        return None if self._part is None else self._part()

    def enter(self, part: object) -> None:
        """Note the part of the forward that runs from here on. Anything that is no part stands for all positions."""
        self._part = weakref.ref(part) if isinstance(part, Chunks) else None

    def begin(self, targets: Tensor | None, deal: Tensor | None = None) -> Chunks | None:
        """Return this rank's part of a forward; None for one without targets, which every rank computes whole. `deal`:
        the chunks of packed sequences, INT64 (B, ranks, chunks).

        Raises: ValueError for a number of positions that the ranks cannot divide.
        """
        part = None
        if targets is not None:
            deal = self._even_deal(targets.device) if deal is None else deal
            if (num_positions := targets.shape[1]) % (least := deal[0].numel()):
                raise ValueError(
                    f"targets has {num_positions} positions, which {self.num_ranks} context-parallel ranks cannot "
                    f"divide into {deal.shape[2]} equal chunks each; pass a multiple of {least}"
                )
            part = Chunks(deal.expand(len(targets), -1, -1), self.rank, num_positions, by_heads=self.by_heads)
        self.enter(part)
        return part

    def _even_deal(self, device: torch.device) -> Tensor:
        """Return the deal of a sequence that is one document: INT64 (1, ranks, chunks)."""
        front = torch.arange(self.num_ranks, device=device)[:, None]
        return (front if self.by_heads else torch.cat((front, 2 * self.num_ranks - 1 - front), 1))[None]
