"""Memory and traffic of the update of whole matrices, beside the bytes held, counted without ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch

from megamix.base import constants
from megamix.base.live_storage import LiveStorage
from megamix.comm.topology import Axis, Topology
from megamix.mixed_precision.bucket import BucketBytes
from megamix.mixed_precision.flat_layout import FlatLayout, ParamSpec, build_layout
from megamix.mixed_precision.optim.matrix_layout import BucketMatrices, Place, buckets_with_matrices, find_homes
from megamix.mixed_precision.optim.muon import Muon
from megamix.tools.plan.engine_memory import FP32, EngineMemory
from megamix.tools.plan.stand_ins import without_memory

_OF_EQUATION = 3  # FP32 tensors, at the most, of Muon's equation on torch's own kernels


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Ways by which matrices reach the ranks that compute with them, and the largest update of any rank in bytes."""

    update: int
    states: int  # bytes of the states of the matrices that a rank computes with
    count: int  # matrices of this stage
    travelling: int  # matrices that are sent, whole or in part
    sent: float  # bytes per element of a matrix sent to other ranks in a step, there and back
    of_each: int  # bytes of matrices that a rank sends in a step, on average
    padding: float  # padding, as a share of all parameters
    whole_from: int | None  # bucket_size with which each matrix is whole in one rank's shard, if not too large

    def __str__(self) -> str:
        if not self.travelling:
            return f"matrices: none of {self.count} travels, each is whole in one shard; padding {self.padding:.1%}"
        hint = f"; none would with parallelism.bucket_size = {self.whole_from}" if self.whole_from else ""
        return (
            f"matrices: {self.travelling} of {self.count} travel, {self.of_each / 2**20:,.1f} MiB from each rank in a "
            f"step, {self.sent:.2f} bytes an element{hint}; padding {self.padding:.1%}"
        )


def plan_matrices(
    layout: FlatLayout, specs: Sequence[ParamSpec], axes: Sequence[Axis], optimizer: Muon, topology: Topology,
    engine: EngineMemory, own_states: bool,
) -> MatrixPlan:  # fmt: skip
    """Return the plan of this stage's matrices. `specs` and `axes`: those that the layout was built for.
    `own_states`: the states of matrices are this rank's, not those of the rank with the most.
    """
    found, states = list[BucketMatrices](), 0
    for axis, numbers in buckets_with_matrices(layout).items():
        shards = range(layout.buckets[numbers[0]].num_shards)
        blocks = range(topology.along(axis).size) if isinstance(axis, str) else (None,)
        places = [Place(shard, block) for shard in shards for block in blocks]
        homes_of_axis = find_homes(layout, numbers, places)
        by_rank = [0] * len(places)
        for rank, homes in product(range(len(places)), homes_of_axis):
            sizes = (optimizer.matrix_states(matrix.rows, matrix.columns).values() for matrix in homes.of(rank))
            by_rank[rank] += FP32 * sum(map(sum, sizes))
        own = topology.owners_of(None) if isinstance(axis, str) else axes[axis]
        states += by_rank[own.rank] if own_states else max(by_rank)
        found += homes_of_axis
    numels = [matrix.numel for homes in found for matrix in homes.matrices]
    size = 2 * optimizer.ns_dtype.itemsize  # there and back
    moved = [size * sum(part.numel for part in homes.sent) for homes in found]
    of_each = sum(sent // len(homes.parts) for sent, homes in zip(moved, found, strict=True))
    turn = cache(partial(_turn, optimizer, engine.on_gpu))
    by_number = {homes.number: homes for homes in found}
    of_buckets = [(bucket, by_number.get(number)) for number, bucket in enumerate(engine.passing)]
    most = engine.update() + max(bucket.params for bucket in engine.passing)
    for rank in range(max((len(homes.parts) for homes in found), default=0)):
        updates = [_update_of(bucket, homes, rank, optimizer, engine, turn) for bucket, homes in of_buckets]
        most = max(most, _most_under_way(updates[::-1]))  # about the order in which forward needs the buckets
    travelling = sum(len({part.matrix for part in homes.sent}) for homes in found)
    return MatrixPlan(
        most, states, len(numels), travelling, sum(moved) / max(sum(numels), 1), of_each,
        layout.padded_numel / sum(spec.numel for spec in specs) - 1,
        _whole_from(specs, [axis.size for axis in axes]) if of_each else None,
    )  # fmt: skip


def _whole_from(specs: Sequence[ParamSpec], axis_sizes: Sequence[int]) -> int | None:
    """Return a bucket_size that gives each matrix to one rank, with at least four buckets; None if none is known."""
    size = axis_sizes[0] * max(spec.numel for spec in specs if spec.matrices)
    buckets = build_layout(specs, axis_sizes, size).buckets
    placed = [(slot, bucket.shard_numel) for bucket in buckets for slot in bucket.slots if slot.spec.matrices]
    is_divided = any(slot.spec.shape != slot.spec.full_shape for slot, _ in placed)  # by ranks other than its owners
    is_across = any(slot.start // shard != (slot.end - 1) // shard for slot, shard in placed)
    return None if is_divided or is_across or 4 * size > sum(spec.numel for spec in specs) else size


class _Update(NamedTuple):
    """Bytes of one bucket's update."""

    stages: tuple[int, int, int] = (0, 0, 0)  # maximum of each stage
    between: int = 0  # bytes that one stage leaves for the next


def _update_of(
    bucket: BucketBytes,
    homes: BucketMatrices | None,
    rank: int,
    optimizer: Muon,
    engine: EngineMemory,
    turn_of: Callable[[int, int], int],
) -> _Update:
    if homes is None or rank >= len(homes.parts):
        return _Update()
    size, shard = optimizer.ns_dtype.itemsize, bucket.plan.shard_numel
    of_span = engine.update()
    if not engine.compiled:
        of_span += (
            _OF_EQUATION * FP32 * constants.chunk(constants.EQUATION_CHUNK, engine.largest_shard, on_gpu=engine.on_gpu)
        )
    pieces = [part.numel for part in homes.parts[rank]]
    own = homes.of(rank)
    turn = max((turn_of(matrix.rows, matrix.columns) for matrix in own), default=0)
    sent, arrived = size * sum(pieces), size * sum(matrix.numel for matrix in own)
    momentum = (FP32 + size) * shard + max(sent, of_span)
    direction = FP32 * shard + max(of_span, sent + FP32 * max(pieces, default=0) * (size < FP32))
    if not homes.sent:
        return _Update((max(momentum, sent + turn, direction), 0, 0))
    both = sent + arrived  # both live until an exchange has ended
    return _Update((max(momentum, both), max(both, arrived + turn), max(both, direction)), both)


def _turn(optimizer: Muon, on_gpu: bool, rows: int, columns: int) -> int:
    """Return the peak bytes while a matrix is made orthogonal."""
    with without_memory(on_gpu=on_gpu) as device, LiveStorage(counts_meta=True) as tracker:
        lengths = optimizer.matrix_states(rows, columns)
        states = {name: torch.empty(length, device=device) for name, length in lengths.items()}
        optimizer.direction(torch.empty(rows, columns, dtype=optimizer.ns_dtype, device=device), states)
        most: int = tracker.peak_bytes
        return most


def _most_under_way(updates: Sequence[_Update]) -> int:
    """Return the peak bytes if each bucket's next stage begins with the next bucket: three are under way at a time."""
    row = [_Update(), _Update(), *updates, _Update(), _Update()]
    return max(
        update.stages[2 - place] + sum(other.between for other in row[at : at + 3]) - update.between
        for at in range(len(row) - 2)
        for place, update in enumerate(row[at : at + 3])
    )
