"""What the update of whole matrices takes beside what is held, and what of them travels, counted without ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from megamix import tuned
from megamix.comm.topology import Topology
from megamix.live_storage import LiveStorage
from megamix.mixed_precision.flat_layout import FlatLayout, ParamSpec, build_layout
from megamix.mixed_precision.matrix_layout import BucketMatrices, Place, buckets_with_matrices, find_homes
from megamix.mixed_precision.muon import Muon
from megamix.mixed_precision.orthogonal import orthogonalised
from megamix.plan.engine_memory import EngineMemory
from megamix.plan.stand_ins import without_memory

_FP32 = 4  # bytes
_OF_EQUATION = 3  # FP32 tensors at the most while Muon's runs on torch's own kernels


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """How matrices reach the ranks that compute with them, and the most bytes of their update on any rank."""

    update: int
    count: int  # of this stage
    travelling: int  # of these, all or in part
    sent: float  # bytes an element of a matrix that go to another rank in a step, there and back
    of_each: int  # bytes that a rank sends of them in a step, in the mean
    padding: float  # of all parameters, a share
    whole_from: int | None  # bucket_size with which each would be whole in one rank's shard, if not too large

    def __str__(self) -> str:
        if not self.travelling:
            return f"matrices: none of {self.count} travels, each is whole in one shard; padding {self.padding:.1%}"
        hint = f"; none would with parallelism.bucket_size = {self.whole_from}" if self.whole_from else ""
        return (
            f"matrices: {self.travelling} of {self.count} travel, {self.of_each / 2**20:,.1f} MiB from each rank in a "
            f"step, {self.sent:.2f} bytes an element{hint}; padding {self.padding:.1%}"
        )


def plan_matrices(
    layout: FlatLayout, specs: Sequence[ParamSpec], axis_sizes: Sequence[int], optimizer: Muon, topology: Topology,
    engine: EngineMemory, *, compiled: bool, on_gpu: bool,
) -> MatrixPlan:  # fmt: skip
    """Count for a rank of this stage. `specs` and `axis_sizes`: what the layout was built for."""
    of_run = engine.update
    if not compiled:
        largest = max(bucket.shard_numel for bucket in layout.buckets)
        of_run += _OF_EQUATION * _FP32 * tuned.piece(tuned.EQUATION_PIECE, largest, on_gpu=on_gpu)
    blocks, found = [Place(dp, tp) for dp in range(topology.dp.size) for tp in range(topology.tp.size)], []
    for axis, buckets in buckets_with_matrices(layout).items():
        owners = [Place(shard) for shard in range(layout.buckets[buckets[0]].num_shards)]
        found += find_homes(layout, buckets, blocks if axis is None else owners)
    numels = [matrix.numel for homes in found for matrix in homes.matrices]
    moved = 2 * optimizer.ns_dtype.itemsize * sum(part.numel for homes in found for part in homes.sent)
    numel = sum(spec.numel for spec in specs)
    most = engine.update + max(engine.updated_params)
    for rank in range(max((len(homes.parts) for homes in found), default=0)):
        own = {homes.number: homes for homes in found if rank < len(homes.parts)}
        # About the order in which forward needs them.
        by_bucket = map(own.get, range(len(layout.buckets)))
        turns = [_stages(bucket, rank, layout, optimizer, of_run, on_gpu) for bucket in by_bucket]
        most = max(most, _most_under_way(turns[::-1], engine.updated_params[::-1]))
    travelling = sum(len({part.matrix for part in homes.sent}) for homes in found)
    return MatrixPlan(
        most, len(numels), travelling, moved / max(sum(numels), 1), moved // len(blocks),
        layout.padded_numel / numel - 1, _whole_from(specs, axis_sizes) if moved else None,
    )  # fmt: skip


def _whole_from(specs: Sequence[ParamSpec], axis_sizes: Sequence[int]) -> int | None:
    """Return a bucket_size that gives each matrix to one rank, with at least four buckets; None: none is known."""
    size = axis_sizes[0] * max(spec.numel for spec in specs if spec.matrices)
    buckets = build_layout(specs, axis_sizes, size).buckets
    placed = [(slot, bucket.shard_numel) for bucket in buckets for slot in bucket.slots if slot.spec.matrices]
    is_divided = any(slot.spec.shape != slot.spec.full_shape for slot, _ in placed)  # by other ranks than its owners
    is_across = any(slot.start // shard != (slot.end - 1) // shard for slot, shard in placed)
    return None if is_divided or is_across or 4 * size > sum(spec.numel for spec in specs) else size


_Stages = list[tuple[int, int]]  # of a bucket's update: the most bytes in each, and what is left behind it


def _stages(
    homes: BucketMatrices | None, rank: int, layout: FlatLayout, optimizer: Muon, of_run: int, on_gpu: bool
) -> _Stages:
    if homes is None:
        return [(0, 0)]
    size, shard = optimizer.ns_dtype.itemsize, layout.buckets[homes.number].shard_numel
    pieces = [part.numel for part in homes.parts[rank]]
    own = [matrix for matrix, home in zip(homes.matrices, homes.homes, strict=True) if home == rank]
    shapes = Counter((matrix.rows, matrix.columns) for matrix in own)
    counts = shapes if optimizer.batched else dict.fromkeys(shapes, 1)
    turn = max((_turn(count, *shape, optimizer.ns_dtype, on_gpu) for shape, count in counts.items()), default=0)
    sent, arrived = size * sum(pieces), size * sum(matrix.numel for matrix in own)
    momentum = (_FP32 + size) * shard + max(sent, of_run)
    direction = _FP32 * shard + max(of_run, sent + _FP32 * max(pieces, default=0) * (size < _FP32))
    if not homes.sent:
        return [(max(momentum, sent + turn, direction), 0)]
    both = sent + arrived  # until an exchange has ended
    return [(max(momentum, both), both), (max(both, arrived + turn), both), (max(both, direction), 0)]


@cache
def _turn(count: int, rows: int, columns: int, dtype: torch.dtype, on_gpu: bool) -> int:
    """Trace the bytes while matrices of one shape are made orthogonal."""
    with without_memory(on_gpu=on_gpu) as device, LiveStorage(counts_meta=True) as tracker:
        matrices = torch.empty(count, rows, columns, dtype=dtype, device=device)
        orthogonalised(matrices if count > 1 else matrices[0], Muon(lr=0.0, ns_dtype=dtype))
        most: int = tracker.peak_bytes
        return most


def _most_under_way(buckets: Sequence[_Stages], params: Sequence[int]) -> int:
    """Return the most bytes where each bucket's next stage begins with the next bucket, the newest one first. `params`:
    of each bucket until it has ended, and those before it have.
    """
    left, first, most = [0] * len(buckets), 0, 0
    for turn in range(len(buckets) + 2):
        newest = min(turn, len(buckets) - 1)
        for number in range(newest, first - 1, -1):
            if turn - number < len(buckets[number]):
                now, then = buckets[number][turn - number]
                most = max(most, sum(params[first : newest + 1]) + sum(left) - left[number] + now)
                left[number] = then
        while first <= newest and turn - first >= len(buckets[first]) - 1:
            first += 1
    return most
