"""Where matrices lie in the shards, and which rank computes with each: pure arithmetic, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megamix import tuned
from megamix.mixed_precision.flat_layout import BucketPlan, FlatLayout, ParamSpec


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows [first, first + rows) of a full parameter that is seen as rows of its last dim."""

    spec: ParamSpec
    first: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Return the multiplications of a turn of Newton and Schulz's iteration."""
        small, large = sorted((self.rows, self.columns))
        return small * small * (2 * large + small)


@dataclass(frozen=True, slots=True)
class Place:
    """Of a rank: which shard of a bucket is its own, and which of the equal blocks that divide parameters it trains;
    None: the same as this rank.
    """

    shard: int
    block: int | None = None


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """What one rank owns of a matrix: elements [start, end) of its shard, which are some of a block of the matrix:
    `rows` and `columns` of it, of which `first` is the number of the first one.
    """

    matrix: int
    start: int
    end: int
    rows: slice
    columns: slice
    first: int

    @property
    def numel(self) -> int:
        return self.end - self.start


def is_cut(spec: ParamSpec) -> bool:
    """Return whether any matrix of a parameter that has some lies in several of the blocks that divide it: one answer
    for all of their ranks, though a rank's own block may hold whole ones.
    """
    own, _ = _block(spec, None)
    starts = range(0, sum(spec.matrices), own.stop - own.start)
    is_inside = {*accumulate(spec.matrices, initial=0)}.issuperset(starts) and spec.shape[-1] == spec.full_shape[-1]
    return not is_inside


def matrices_of(bucket: BucketPlan) -> list[Matrix]:
    """Return the matrices of a bucket, in the order of its parameters: those of a block, if they are whole there."""
    found = []
    for spec in (slot.spec for slot in bucket.slots if slot.spec.matrices):
        own, _ = _block(spec, None)
        for first, last in pairwise(accumulate(spec.matrices, initial=0)):
            if is_cut(spec) or (own.start <= first and last <= own.stop):
                found.append(Matrix(spec, first, last - first, spec.full_shape[-1]))
    return found


def pieces_of(bucket: BucketPlan, matrices: Sequence[Matrix], place: Place) -> Iterator[MatrixPiece]:
    """Yield what the rank at a place owns of each matrix, if anything."""
    pieces = {piece.spec.name: piece for piece in bucket.shard_pieces(place.shard)}
    for number, matrix in enumerate(matrices):
        if (piece := pieces.get(matrix.spec.name)) is None:
            continue
        rows, columns = _block(matrix.spec, place.block)
        first, last = max(matrix.first, rows.start), min(matrix.first + matrix.rows, rows.stop)
        width = columns.stop - columns.start
        # In the block, flattened: where the matrix begins and ends, and of it what the piece has.
        begin, end = (first - rows.start) * width, (last - rows.start) * width
        start, stop = max(begin, piece.first), min(end, piece.first + piece.numel)
        if start < stop:
            at = piece.start - piece.first
            within = slice(first - matrix.first, last - matrix.first)
            yield MatrixPiece(number, at + start, at + stop, within, columns, start - begin)


@dataclass(frozen=True, slots=True)
class BucketMatrices:
    """One bucket's matrices, what each of the ranks that hold any owns of them, and which one computes with each."""

    number: int  # the bucket's
    matrices: list[Matrix]
    parts: list[list[MatrixPiece]]  # by rank
    homes: list[int]

    @property
    def sent(self) -> list[MatrixPiece]:
        """Return what goes to another rank than its owner."""
        return [part for rank, own in enumerate(self.parts) for part in own if self.homes[part.matrix] != rank]


def buckets_with_matrices(layout: FlatLayout) -> dict[int | None, list[int]]:
    """Return the buckets that hold any, by the axis whose ranks divide them; None: with matrices cut over blocks, which
    the ranks of other axes hold, too.
    """
    found: dict[int | None, list[int]] = {}
    for number, bucket in enumerate(layout.buckets):
        if matrices := matrices_of(bucket):
            axis = None if any(is_cut(matrix.spec) for matrix in matrices) else bucket.axis
            found.setdefault(axis, []).append(number)
    return found


def find_homes(layout: FlatLayout, buckets: Sequence[int], places: Sequence[Place]) -> list[BucketMatrices]:
    """Return those of buckets whose matrices the ranks at these places hold.

    Raises: ValueError naming a matrix of which they do not have all.
    """
    found, costs, held = [], list[int](), list[list[int]]()
    for number in buckets:
        matrices = matrices_of(layout.buckets[number])
        parts = [[*pieces_of(layout.buckets[number], matrices, place)] for place in places]
        shares = [[0] * len(places) for _ in matrices]
        for rank, own in enumerate(parts):
            for part in own:
                shares[part.matrix][rank] += part.numel
        for matrix, share in zip(matrices, shares, strict=True):
            if sum(share) != matrix.numel:
                raise ValueError(
                    f"Muon takes {matrix.spec.name} for matrices, but the ranks that hold it have {sum(share)} "
                    f"of {matrix.numel} elements; let AdamW move it: adamw=[{matrix.spec.name!r}]"
                )
        costs += [matrix.cost for matrix in matrices]
        held += shares
        found.append(BucketMatrices(number, matrices, parts, []))
    homes = iter(choose_homes(costs, held, len(places)))
    for bucket in found:
        bucket.homes.extend(next(homes) for _ in bucket.matrices)
    return found


def _block(spec: ParamSpec, block: int | None) -> tuple[slice, slice]:
    """Return the rows and columns of one of a parameter's equal blocks, seen as rows of its last dim.

    Raises: ValueError if its blocks are no such rows and columns.
    """
    divided = [dim for dim, size in enumerate(spec.shape) if size != spec.full_shape[dim]]
    if any(0 < dim < len(spec.shape) - 1 for dim in divided) or len(divided) > 1:
        raise ValueError(
            f"Muon takes {spec.name} for matrices, but ranks divide its {[*spec.full_shape]} into blocks of "
            f"{[*spec.shape]}, which it cannot put together; let AdamW move it: adamw=[{spec.name!r}]"
        )
    starts = list(spec.offset)
    if block is not None:
        for dim in divided:
            starts[dim] = block * spec.shape[dim]
    per_row = math.prod(spec.shape[1:-1])
    first = starts[0] * per_row
    return slice(first, first + math.prod(spec.shape[:-1])), slice(starts[-1], starts[-1] + spec.shape[-1])


def choose_homes(costs: Sequence[int], held: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return which rank computes with each matrix: its owner, if no matrix is divided; else the one that owns most of
    it, as long as none has much more to do than it must, and then the one that does least. `held`: elements of each
    matrix by rank.
    """
    if all(sum(map(bool, own)) == 1 for own in held):
        return [own.index(max(own)) for own in held]
    order = sorted(range(len(costs)), key=lambda number: -costs[number])
    evenly = [0] * num_ranks  # the largest first, each to the rank that does least: nearly the best (Graham 1969)
    for number in order:
        evenly[evenly.index(min(evenly))] += costs[number]
    most = (1 + tuned.MOST_EXTRA_WORK) * max(evenly)
    loads, homes = [0] * num_ranks, [0] * len(costs)
    for number in order:
        fits = [rank for rank in range(num_ranks) if loads[rank] + costs[number] <= most]
        homes[number] = max(fits, key=held[number].__getitem__) if fits else loads.index(min(loads))
        loads[homes[number]] += costs[number]
    return homes
