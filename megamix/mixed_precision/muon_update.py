"""The update of whole matrices: momentum in the shards, each matrix to one rank, its direction, and back to its owners.

What a rank computes with a matrix does not depend on who owns its elements, so neither does the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megamix.clock import Clock
from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.topology import Topology
from megamix.mixed_precision.bucket_update import BucketUpdate
from megamix.mixed_precision.flat_layout import FlatLayout, GroupSpan
from megamix.mixed_precision.matrix_layout import (
    BucketMatrices,
    Matrix,
    MatrixPiece,
    Place,
    buckets_with_matrices,
    find_homes,
)
from megamix.mixed_precision.observer import DIRECTION, SOURCE, StepObserver
from megamix.mixed_precision.orthogonal import NewtonSchulz, orthogonalised
from megamix.mixed_precision.update_slice import Kernel, StepScalars, UpdateSlice

if TYPE_CHECKING:
    from megamix.mixed_precision.bucket import Bucket


class MatrixMoves(NewtonSchulz, Protocol):
    """What of an optimizer says how matrices move."""

    @property
    def batched(self) -> bool: ...

    def lr_scale(self, rows: int, columns: int) -> float: ...


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows and columns of a matrix, and where what came of these lies, in their order."""

    rows: slice
    columns: slice
    places: list[slice]


@dataclass(frozen=True, slots=True)
class _Home:
    """A matrix that this rank computes with."""

    matrix: Matrix
    blocks: list[_Block]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One bucket's matrices, as this rank sees them."""

    among: Collectives  # the ranks that hold any of them
    pieces: list[MatrixPiece]  # what it owns, in the order in which it is sent: by home
    scales: list[float]  # of each piece's direction
    to: list[int]  # elements for each rank, and of each
    of: list[int]
    homes: list[_Home]
    travels: bool  # whether anything does, between any two ranks


class MuonUpdate(BucketUpdate):
    """Updates buckets, those that hold matrices in three stages, with an exchange between each two: momentum;
    directions; masters and half parameters.

    While a bucket's matrices travel, the next one's momentum is computed, and the directions of the one before. Each
    direction is computed once, whether the step is skipped or not: the host does not know.
    """

    def __init__(
        self, kernel: Kernel, buckets: Sequence[Bucket], topology: Topology, clock: Clock,
        observers: Sequence[StepObserver], muon: MatrixMoves, num_groups: int,
    ):  # fmt: skip
        """`num_groups`: of parameters; as many stand behind them for the kernel, of masters that move along directions.
        Every rank must call it.
        """
        super().__init__(kernel, clock, observers)
        self._muon = muon
        self._num_groups = num_groups
        slots = (slot for bucket in buckets for slot in bucket.plan.slots)
        self._matrix_groups = {slot.spec.group for slot in slots if slot.spec.matrices}
        self._exchanges = _plan(muon, buckets, topology)

    def in_turn(self, buckets: Iterable[Bucket], step: StepScalars) -> Iterator[Bucket]:
        under_way: deque[_UnderWay] = deque()

        def advance() -> Iterator[Bucket]:
            # The newest first: what it sends travels while the older ones compute.
            ended = [next(one.stages, True) for one in reversed(under_way)]
            while under_way and ended.pop():
                yield under_way.popleft().bucket

        for bucket in buckets:
            under_way.append(_UnderWay(bucket, self._stages(bucket, step)))
            yield from advance()
        while under_way:
            yield from advance()

    def _stages(self, bucket: Bucket, step: StepScalars) -> Iterator[bool]:
        """Do one stage after the other; yield False behind each but the last."""
        self._begin(bucket)
        plain = [span for span in bucket.spans if span.group not in self._matrix_groups]
        of_matrices = [span for span in bucket.spans if span.group in self._matrix_groups]
        with self._clock.span("update"):
            for span in self._cut(bucket, plain):
                self._kernel(bucket.slice(span), step)
            exchange = self._exchanges.get(bucket)
            if exchange is None:
                return
            values = self._momentum(exchange, bucket, of_matrices, step)
        values = yield from self._sent(exchange, bucket, values, exchange.to, exchange.of)
        with self._clock.span("update"):
            for homes in self._together(exchange.homes):
                self._turn(values, homes)
        values = yield from self._sent(exchange, bucket, values, exchange.of, exchange.to)
        with self._clock.span("update"):
            values = self._direction(exchange, bucket, values)
            # A direction has no length of the gradient's, so nothing to clip, and no scale of the loss.
            step = step._replace(multiplier=torch.ones_like(step.multiplier))
            for span in self._cut(bucket, of_matrices):
                part = bucket.slice(span)
                moves = self._num_groups + span.group
                direction = values[span.start : span.end]
                self._kernel(UpdateSlice(moves, direction, part.master, {}, part.half), step)

    def _momentum(self, exchange: _Exchange, bucket: Bucket, spans: Sequence[GroupSpan], step: StepScalars) -> Tensor:
        """Return what is to be orthogonalised of what this rank owns, in the order in which it is sent."""
        wide = torch.zeros_like(bucket.master)
        narrow = torch.zeros_like(wide, dtype=self._muon.ns_dtype)
        for span in spans:
            part = bucket.slice(span)
            at = slice(span.start, span.end)
            self._kernel(UpdateSlice(span.group, part.grad, wide[at], part.states, narrow[at]), step)
        for observer in self._observers:
            observer.on_use(SOURCE, bucket, narrow)
        return torch.cat([narrow[:0], *(narrow[piece.start : piece.end] for piece in exchange.pieces)])

    def _direction(self, exchange: _Exchange, bucket: Bucket, values: Tensor) -> Tensor:
        """Return by what this rank's masters move."""
        direction = torch.zeros_like(bucket.master)
        parts = torch.split(values, [piece.numel for piece in exchange.pieces])
        for piece, part, scale in zip(exchange.pieces, parts, exchange.scales, strict=True):
            torch.mul(part.float(), scale, out=direction[piece.start : piece.end])
        for observer in self._observers:
            observer.on_use(DIRECTION, bucket, direction)
        return direction

    def _sent(
        self, exchange: _Exchange, bucket: Bucket, values: Tensor, to: Sequence[int], of: Sequence[int]
    ) -> Generator[bool, None, Tensor]:
        """Send values to the ranks and return what these have sent; yield while it is under way."""
        if not exchange.travels:
            return values
        with self._clock.span("update"):
            arrived = values.new_empty(sum(of))
            pending = exchange.among.exchange(values, arrived, to, of)
            for observer in self._observers:
                observer.on_transfer("matrices", bucket, pending)
        yield False
        with self._clock.span("exposed_matrices"):
            pending.wait()
        return arrived

    def _together(self, homes: Sequence[_Home]) -> list[list[_Home]]:
        if not self._muon.batched:
            return [[home] for home in homes]
        by_shape: dict[tuple[int, int], list[_Home]] = {}
        for home in homes:
            by_shape.setdefault((home.matrix.rows, home.matrix.columns), []).append(home)
        return [*by_shape.values()]

    def _turn(self, arrived: Tensor, homes: Sequence[_Home]) -> None:
        """Put the directions of matrices of one shape in their place."""
        whole = arrived.new_empty(len(homes), homes[0].matrix.rows, homes[0].matrix.columns)
        for out, home in zip(whole, homes, strict=True):
            for block in home.blocks:
                values = out[block.rows, block.columns]
                values.copy_(torch.cat([arrived[place] for place in block.places]).view(values.shape))
        directions = orthogonalised(whole if len(homes) > 1 else whole[0], self._muon).view(whole.shape)
        for direction, home in zip(directions, homes, strict=True):
            for block in home.blocks:
                values = direction[block.rows, block.columns].reshape(-1)
                parts = values.split([place.stop - place.start for place in block.places])
                for place, part in zip(block.places, parts, strict=True):
                    arrived[place].copy_(part)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A bucket amid its stages."""

    bucket: Bucket
    stages: Iterator[bool]


def _plan(muon: MatrixMoves, buckets: Sequence[Bucket], topology: Topology) -> dict[Bucket, _Exchange]:
    """Return each bucket's exchange: who computes with which matrix, and what goes where. Every rank must call it."""
    exchanges: dict[Bucket, _Exchange] = {}
    # Of each axis apart: its ranks alone know all of its matrices.
    layout = FlatLayout(tuple(bucket.plan for bucket in buckets))
    for axis, numbers in buckets_with_matrices(layout).items():
        holders = [bucket for bucket in buckets if bucket.number in numbers]
        among = holders[0].owners
        places = [Place(rank) for rank in range(among.axis.size)]
        if axis is None:
            device = holders[0].master.device
            row = torch.tensor([among.axis.rank, topology.tp.rank], device=device)
            among = make_collectives(topology.along(*topology.owns, "tp"), device)
            places = [Place(*place) for place in among.table(row).tolist()]
        both = zip(holders, find_homes(layout, numbers, places), strict=True)
        exchanges |= {bucket: _exchange(muon, among, matrices) for bucket, matrices in both}
    return exchanges


def _exchange(muon: MatrixMoves, among: Collectives, found: BucketMatrices) -> _Exchange:
    rank = among.axis.rank
    matrices = found.matrices

    def home(part: MatrixPiece) -> int:
        return found.homes[part.matrix]

    def block(part: MatrixPiece) -> tuple[int, int, int]:
        return part.matrix, part.rows.start, part.columns.start

    mine = sorted(found.parts[rank], key=home)  # stable: by matrix within
    coming = [part for own in found.parts for part in own if home(part) == rank]
    ends = accumulate(part.numel for part in coming)
    placed = [_Placed(part, slice(end - part.numel, end)) for part, end in zip(coming, ends, strict=True)]
    placed.sort(key=lambda one: (*block(one.part), one.part.first))
    blocks: dict[int, list[_Block]] = {}
    for _, group in groupby(placed, key=lambda one: block(one.part)):
        together = [*group]
        part = together[0].part
        blocks.setdefault(part.matrix, []).append(_Block(part.rows, part.columns, [one.place for one in together]))
    return _Exchange(
        among,
        mine,
        scales=[muon.lr_scale(matrices[part.matrix].rows, matrices[part.matrix].columns) for part in mine],
        to=[sum(part.numel for part in mine if home(part) == other) for other in range(among.axis.size)],
        of=[sum(part.numel for part in own if home(part) == rank) for own in found.parts],
        homes=[_Home(matrices[number], of_matrix) for number, of_matrix in blocks.items()],
        travels=bool(found.sent),
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a piece of a matrix lies in what has arrived."""

    part: MatrixPiece
    place: slice
