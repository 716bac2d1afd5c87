"""The update of whole matrices: momentum in the shards, each matrix to one rank, its direction, and back to its owners.

What a rank computes with a matrix does not depend on who owns its elements, so neither does the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from megamix.clock import Clock
from megamix.comm.collectives import Collectives, make_collectives
from megamix.comm.topology import Topology
from megamix.mixed_precision import muon
from megamix.mixed_precision.fused_update import Cut, StepScalars, Update, update_shard
from megamix.mixed_precision.half_params import HalfParams
from megamix.mixed_precision.master_shard import MasterShard
from megamix.mixed_precision.matrix_layout import (
    BucketMatrices,
    Matrix,
    MatrixPiece,
    Place,
    buckets_with_matrices,
    find_homes,
)
from megamix.mixed_precision.optimizers import Optimizer, UpdateGroup

Spread = list[tuple[slice, slice, Sequence[slice]]]  # of a matrix: rows, columns, and where what came of these lies
# What a step sums over ranks and micro-batches, what it makes orthogonal, and what of that moves the masters.
GRADIENT, SOURCE, DIRECTION = "gradient", "direction's input", "direction"


def with_moves(optimizer: Optimizer, groups: Sequence[UpdateGroup]) -> list[UpdateGroup]:
    """Return the groups and, if there are matrices, as many behind them, without states: of masters that move along
    directions.
    """
    return [*groups, *(group._replace(states=()) for group in groups if isinstance(optimizer, muon.Muon))]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One bucket's matrices, as this rank sees them."""

    among: Collectives  # the ranks that hold any of them
    pieces: list[MatrixPiece]  # what it owns, in the order in which it is sent: by home
    scales: list[float]  # of each piece's direction
    to: list[int]  # elements for each rank, and of each
    of: list[int]
    own: list[tuple[Matrix, Spread]]  # what it computes with
    travels: bool  # whether anything does, between any two ranks


class MatrixUpdate:
    """Updates buckets, those that hold matrices in three stages, with an exchange between each two: momentum;
    directions; masters and half parameters. Without matrices it is one stage.

    While a bucket's matrices travel, the next one's momentum is computed, and the directions of the one before. Each
    direction is computed once, whether the step is skipped or not: the host does not know.
    """

    def __init__(
        self, optimizer: Optimizer, of_run: Update, num_groups: int, shard: MasterShard, half_params: HalfParams,
        topology: Topology, clock: Clock,
    ):  # fmt: skip
        """`of_run`: by the groups of `with_moves`. Every rank must call it."""
        self.of_run, self._num_groups, self._shard, self._half_params = of_run, num_groups, shard, half_params
        self._clock = clock
        # Of a bucket's shard, of matrices with zeros where none is: for whoever judges a step. Nothing else keeps them.
        self.look: Callable[[str, int, Tensor], object] = lambda what, bucket, values: None
        specs = (slot.spec for bucket in shard.layout.buckets for slot in bucket.slots)
        self._matrix_groups = {spec.group for spec in specs if spec.matrices}
        self._exchanges: dict[int, _Exchange] = {}
        if isinstance(optimizer, muon.Muon):
            self._muon, self._exchanges = optimizer, _plan(optimizer, shard, topology)
        elif self._matrix_groups:
            raise TypeError(f"{type(optimizer).__name__} has matrices, but only a Muon moves any; derive it from that")

    def in_turn(
        self, buckets: Sequence[int], cuts: Sequence[Sequence[Cut]], grad_shards: Sequence[Tensor], step: StepScalars
    ) -> Iterator[int]:
        """Update this rank's shards; yield each bucket, in this order, when it is done."""
        under_way: deque[tuple[int, Iterator[bool]]] = deque()

        def advance() -> Iterator[int]:
            # The newest first: what it sends travels while the older ones compute.
            ended = [next(stages, True) for _, stages in reversed(under_way)]
            while under_way and ended.pop():
                yield under_way.popleft()[0]

        for bucket in buckets:
            under_way.append((bucket, self._stages(bucket, cuts[bucket], grad_shards[bucket], step)))
            yield from advance()
        while under_way:
            yield from advance()

    def _stages(self, bucket: int, cuts: Sequence[Cut], grad: Tensor, step: StepScalars) -> Iterator[bool]:
        """Do one stage after the other; yield False behind each but the last."""
        master, half = self._shard.master[bucket], self._half_params.shards[bucket]
        self._half_params.take(bucket)
        self.look(GRADIENT, bucket, grad)
        with self._clock.span("update"):
            plain = [cut for cut in cuts if cut[0].group not in self._matrix_groups]
            update_shard(plain, grad, self._shard, bucket, half, step)
            if (exchange := self._exchanges.get(bucket)) is None:
                return
            values = self._momentum(exchange, bucket, grad, step)
        values = yield from self._sent(exchange, bucket, values, exchange.to, exchange.of)
        with self._clock.span("update"):
            for matrices in self._together(exchange.own):
                self._turn(values, matrices)
        values = yield from self._sent(exchange, bucket, values, exchange.of, exchange.to)
        with self._clock.span("update"):
            values = self._direction(exchange, bucket, values)
            # A direction has no length of the gradient's, so nothing to clip, and no scale of the loss.
            step = step._replace(multiplier=torch.ones_like(step.multiplier))
            for run, update in cuts:
                if run.group in self._matrix_groups:
                    at = slice(run.start, run.end)
                    update(values[at], master[at], {}, half[at], self._num_groups + run.group, step)

    def _momentum(self, exchange: _Exchange, bucket: int, grad: Tensor, step: StepScalars) -> Tensor:
        """Return what is to be orthogonalised of what this rank owns, in the order in which it is sent."""
        wide = torch.zeros_like(self._shard.master[bucket])
        narrow = torch.zeros_like(wide, dtype=self._muon.ns_dtype)
        for run in self._shard.runs[bucket]:
            if run.group in self._matrix_groups:
                at = slice(run.start, run.end)
                states = self._shard.states_of(bucket, run.start, run.end)
                self.of_run(grad[at], wide[at], states, narrow[at], run.group, step)
        self.look(SOURCE, bucket, narrow)
        return torch.cat([narrow[:0], *(narrow[piece.start : piece.end] for piece in exchange.pieces)])

    def _direction(self, exchange: _Exchange, bucket: int, values: Tensor) -> Tensor:
        """Return by what this rank's masters move."""
        direction = torch.zeros_like(self._shard.master[bucket])
        parts = torch.split(values, [piece.numel for piece in exchange.pieces])
        for piece, part, scale in zip(exchange.pieces, parts, exchange.scales, strict=True):
            torch.mul(part.float(), scale, out=direction[piece.start : piece.end])
        self.look(DIRECTION, bucket, direction)
        return direction

    def _sent(
        self, exchange: _Exchange, bucket: int, values: Tensor, to: Sequence[int], of: Sequence[int]
    ) -> Generator[bool, None, Tensor]:
        """Send values to the ranks and return what these have sent; yield while it is under way."""
        if not exchange.travels:
            return values
        with self._clock.span("update"):
            arrived = values.new_empty(sum(of))
            pending = exchange.among.exchange(values, arrived, to, of)
            self._clock.watch("matrices", bucket, pending)
        yield False
        with self._clock.span("exposed_matrices"):
            pending.wait()
        return arrived

    def _together(self, own: Sequence[tuple[Matrix, Spread]]) -> list[list[tuple[Matrix, Spread]]]:
        if not self._muon.batched:
            return [[one] for one in own]
        by_shape: dict[tuple[int, int], list[tuple[Matrix, Spread]]] = {}
        for one in own:
            by_shape.setdefault((one[0].rows, one[0].columns), []).append(one)
        return [*by_shape.values()]

    def _turn(self, arrived: Tensor, matrices: Sequence[tuple[Matrix, Spread]]) -> None:
        """Put the directions of matrices of one shape in their place."""
        whole = arrived.new_empty(len(matrices), matrices[0][0].rows, matrices[0][0].columns)
        for out, (_, spread) in zip(whole, matrices, strict=True):
            for rows, columns, where in spread:
                block = out[rows, columns]
                block.copy_(torch.cat([arrived[place] for place in where]).view(block.shape))
        directions = muon.orthogonalised(whole if len(matrices) > 1 else whole[0], self._muon).view(whole.shape)
        for direction, (_, spread) in zip(directions, matrices, strict=True):
            for rows, columns, where in spread:
                parts = direction[rows, columns].reshape(-1).split([place.stop - place.start for place in where])
                for place, part in zip(where, parts, strict=True):
                    arrived[place].copy_(part)


def _plan(optimizer: muon.Muon, shard: MasterShard, topology: Topology) -> dict[int, _Exchange]:
    """Return each bucket's exchange: who computes with which matrix, and what goes where. Every rank must call it."""
    layout, exchanges = shard.layout, {}
    # Of each axis apart: its ranks alone know all of its matrices.
    for axis, buckets in buckets_with_matrices(layout).items():
        among = shard.collectives[buckets[0]]
        places = [Place(rank) for rank in range(among.axis.size)]
        if axis is None:
            device = shard.master[0].device
            row = torch.tensor([among.axis.rank, topology.tp.rank], device=device)
            among = make_collectives(topology.along(*topology.owns, "tp"), device)
            places = [Place(*place) for place in among.table(row).tolist()]
        for found in find_homes(layout, buckets, places):
            exchanges[found.number] = _exchange(optimizer, among, found)
    return exchanges


def _exchange(optimizer: muon.Muon, among: Collectives, found: BucketMatrices) -> _Exchange:
    rank, matrices = among.axis.rank, found.matrices

    def home(part: MatrixPiece) -> int:
        return found.homes[part.matrix]

    def block(part: MatrixPiece) -> tuple[int, int, int]:
        return part.matrix, part.rows.start, part.columns.start

    mine = sorted(found.parts[rank], key=home)  # stable: by matrix within
    coming = [part for own in found.parts for part in own if home(part) == rank]
    ends = accumulate(part.numel for part in coming)
    placed = [(part, slice(end - part.numel, end)) for part, end in zip(coming, ends, strict=True)]
    placed.sort(key=lambda one: (*block(one[0]), one[0].first))
    spreads: dict[int, Spread] = {}
    for _, parts in groupby(placed, key=lambda one: block(one[0])):
        (part, *_), where = zip(*parts, strict=True)
        spreads.setdefault(part.matrix, []).append((part.rows, part.columns, where))
    return _Exchange(
        among,
        mine,
        scales=[optimizer.lr_scale(matrices[part.matrix].rows, matrices[part.matrix].columns) for part in mine],
        to=[sum(part.numel for part in mine if home(part) == other) for other in range(among.axis.size)],
        of=[sum(part.numel for part in own if home(part) == rank) for own in found.parts],
        own=[(matrices[number], spread) for number, spread in spreads.items()],
        travels=bool(found.sent),
    )
