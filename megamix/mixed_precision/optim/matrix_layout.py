"""The places of matrices in the shards, and the rank that computes with each: pure arithmetic, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megamix.base import constants
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
        """Return the multiplications in one iteration of Newton and Schulz."""
        small, large = sorted((self.rows, self.columns))
        return small * small * (2 * large + small)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank: the number of its shard of a bucket, and the number of its block among the equal blocks that
    divide parameters. Block None: the same block as this rank's.
    """

    shard: int
    block: int | None = None


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """One rank's part of a matrix: elements [start, end) of its shard.

    The elements belong to a block of the matrix, given by `rows` and `columns`. `first`: the number of the first
    element in this block.
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
    """Return whether any matrix of the parameter lies in several of the blocks that divide the parameter. The answer is
    equal on all ranks that hold blocks of it, even if this rank's own block holds whole matrices.
    """
    own, _ = _block(spec, None)
    starts = range(0, sum(spec.matrices), own.stop - own.start)
    is_inside = {*accumulate(spec.matrices, initial=0)}.issuperset(starts) and spec.shape[-1] == spec.full_shape[-1]
    return not is_inside


def matrices_of(bucket: BucketPlan) -> list[Matrix]:
    """Return a bucket's matrices, in the order of its parameters. If blocks cut none of them, only the matrices in this
    rank's blocks count. Otherwise all do, on every rank, because the ranks that hold other blocks take part.
    """
    found = []
    specs = [slot.spec for slot in bucket.slots if slot.spec.matrices]
    are_cut = any(map(is_cut, specs))
    for spec in specs:
        own, _ = _block(spec, None)
        for first, last in pairwise(accumulate(spec.matrices, initial=0)):
            if are_cut or (own.start <= first and last <= own.stop):
                found.append(Matrix(spec, first, last - first, spec.full_shape[-1]))
    return found


def pieces_of(bucket: BucketPlan, matrices: Sequence[Matrix], place: Place) -> Iterator[MatrixPiece]:
    """Yield the part of each matrix that the rank at a place owns, if there is any."""
    pieces = {piece.spec.name: piece for piece in bucket.shard_pieces(place.shard)}
    for number, matrix in enumerate(matrices):
        if (piece := pieces.get(matrix.spec.name)) is None:
            continue
        rows, columns = _block(matrix.spec, place.block)
        first, last = max(matrix.first, rows.start), min(matrix.first + matrix.rows, rows.stop)
        width = columns.stop - columns.start
        # In the flattened block: [begin, end) is the matrix, [start, stop) the part of it in this piece.
        begin, end = (first - rows.start) * width, (last - rows.start) * width
        start, stop = max(begin, piece.first), min(end, piece.first + piece.numel)
        if start < stop:
            at = piece.start - piece.first
            within = slice(first - matrix.first, last - matrix.first)
            yield MatrixPiece(number, at + start, at + stop, within, columns, start - begin)


@dataclass(frozen=True, slots=True)
class BucketMatrices:
    """One bucket's matrices, the parts that its ranks own of them, and the rank that computes with each."""

    number: int  # number of the bucket
    matrices: list[Matrix]
    parts: list[list[MatrixPiece]]  # by rank
    homes: list[int]

    def of(self, rank: int) -> list[Matrix]:
        return [matrix for matrix, home in zip(self.matrices, self.homes, strict=True) if home == rank]

    @property
    def sent(self) -> list[MatrixPiece]:
        """Return the parts that travel, because another rank than their owner computes with the matrix."""
        return [part for rank, own in enumerate(self.parts) for part in own if self.homes[part.matrix] != rank]


def buckets_with_matrices(layout: FlatLayout) -> dict[int | str, list[int]]:
    """Return the numbers of the buckets with matrices, by the axis whose ranks share them. A name: buckets with
    matrices that are cut into the blocks of this axis's ranks, so that all of a stage hold parts of them.
    """
    found: dict[int | str, list[int]] = {}
    for number, bucket in enumerate(layout.buckets):
        if matrices := matrices_of(bucket):
            cut = (matrix.spec.along for matrix in matrices if is_cut(matrix.spec))
            found.setdefault(next(cut, bucket.axis), []).append(number)
    return found


def find_homes(layout: FlatLayout, buckets: Sequence[int], places: Sequence[Place]) -> list[BucketMatrices]:
    """Return the matrices of these buckets, which the ranks at these places hold, with their parts and homes.

    Raises: ValueError naming a matrix of which these ranks do not have all elements.
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
                    f"Muon treats {matrix.spec.name} as matrices, but the ranks that hold it have {sum(share)} "
                    f"of {matrix.numel} elements; let AdamW update it: adamw=[{matrix.spec.name!r}]"
                )
        costs += [matrix.cost for matrix in matrices]
        held += shares
        found.append(BucketMatrices(number, matrices, parts, []))
    homes = iter(choose_homes(costs, held, len(places)))
    for bucket in found:
        bucket.homes.extend(next(homes) for _ in bucket.matrices)
    return found


def _block(spec: ParamSpec, block: int | None) -> tuple[slice, slice]:
    """Return the rows and columns of one of a parameter's equal blocks, in the parameter seen as rows of its last dim.

    `block`: its number; None: this rank's block. Raises: ValueError if the blocks are no ranges of rows and columns.
    """
    divided = [dim for dim, size in enumerate(spec.shape) if size != spec.full_shape[dim]]
    if any(0 < dim < len(spec.shape) - 1 for dim in divided) or len(divided) > 1:
        raise ValueError(
            f"Muon treats {spec.name} as matrices, but ranks divide its {[*spec.full_shape]} into blocks of "
            f"{[*spec.shape]}, which Muon cannot put together; let AdamW update it: adamw=[{spec.name!r}]"
        )
    starts = list(spec.offset)
    if block is not None:
        for dim in divided:
            starts[dim] = block * spec.shape[dim]
    per_row = math.prod(spec.shape[1:-1])
    first = starts[0] * per_row
    return slice(first, first + math.prod(spec.shape[:-1])), slice(starts[-1], starts[-1] + spec.shape[-1])


def choose_homes(costs: Sequence[int], held: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Return the home of each matrix, the rank that computes with it.

    If no matrix is divided, each matrix has its owner as home. Otherwise the home is the rank that owns most of the
    matrix, among the ranks whose work would not much exceed an even share; if there is none, it is the rank with the
    least work. `held`: elements of each matrix by rank.
    """
    if all(sum(map(bool, own)) == 1 for own in held):
        return [own.index(max(own)) for own in held]
    order = sorted(range(len(costs)), key=lambda number: -costs[number])
    evenly = [0] * num_ranks  # the largest first, each to the rank with the least work: close to the best (Graham 1969)
    for number in order:
        evenly[evenly.index(min(evenly))] += costs[number]
    most = (1 + constants.MOST_EXTRA_WORK) * max(evenly)
    loads, homes = [0] * num_ranks, [0] * len(costs)
    for number in order:
        fits = [rank for rank in range(num_ranks) if loads[rank] + costs[number] <= most]
        homes[number] = max(fits, key=held[number].__getitem__) if fits else loads.index(min(loads))
        loads[homes[number]] += costs[number]
    return homes
