"""The places of all parameters: buckets, optimizer spans, padding and owners. Pure arithmetic: no tensors, no
communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from megamix.base import constants

# Every parameter and every shard starts on a multiple of 64 elements. That is 128 bytes in half precision, so vector
# loads are aligned (a compiled kernel would first copy misaligned inputs). And it is one row of the statistics, so no
# shard border cuts a row.
ROW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """The engine's record of one trainable parameter. A shared parameter has one record, under its first registered
    name.

    A rank trains a block of the parameter, which may be all of it. Each rank that trains the same block owns a share of
    the block's FP32 masters. So no element has two owners, and none is counted or saved twice.
    """

    name: str
    shape: tuple[int, ...]  # shape of the block
    group: int  # index of its optimizer group
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]  # offset of the block in the full parameter
    axis: int = 0  # number of the owners' axis; the owners are the ranks that train this block
    # False: another owner has this same gradient, and only that copy is summed. Not in the repr, because the owners
    # compare the reprs, and this field differs between them.
    counts: bool = field(default=True, repr=False)
    along: str = field(default="tp", repr=False)  # the axis whose ranks hold all blocks, in order, or "ep"
    aliases: tuple[str, ...] = ()
    unit: int = field(default=0, repr=False)  # number of the unit that gathers it; 0: the root
    # Rows of each matrix that the optimizer takes whole. The matrices lie one below the other in the full parameter,
    # seen as rows of its last dim. Empty: the optimizer updates each element by itself.
    matrices: tuple[int, ...] = field(default=(), repr=False)

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], group: int, aliases: tuple[str, ...] = ()) -> ParamSpec:
        """Describe a parameter that every rank trains in full."""
        return ParamSpec(
            name=name, shape=shape, group=group, full_shape=shape, offset=(0,) * len(shape), aliases=aliases
        )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_of_experts(self) -> bool:
        """Return whether its first dim counts the experts of a layer."""
        return self.along == "ep"

    @property
    def block(self) -> tuple[slice, ...]:
        """Return the slices of the full parameter that this rank trains."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in its bucket: elements [start, end)."""

    spec: ParamSpec
    start: int

    @property
    def end(self) -> int:
        return self.start + self.spec.numel


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Neighbouring elements [start, end) of one optimizer group; both are multiples of ROW."""

    group: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that a rank owns: elements [start, end) of its shard of a bucket. It includes the
    padding after the parameter, so both are multiples of ROW.
    """

    spec: ParamSpec
    first: int  # number of its first element in the parameter's block
    start: int
    end: int
    numel: int  # elements of the parameter; the rest is padding

    @property
    def elements(self) -> slice:
        """Return the range of the parameter's elements in the shard, without padding."""
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The plan of a flat buffer: each parameter starts on a row border, and the end is padded to equal shards. Within
    each shard, parameters of one group stand together.
    """

    slots: tuple[Slot, ...]
    spans: tuple[GroupSpan, ...]
    padded_numel: int
    num_shards: int

    @property
    def name(self) -> str:
        """Return the name of the bucket for messages: its first and last parameters."""
        first, last = self.slots[0].spec.name, self.slots[-1].spec.name
        return first if first == last else f"{first} to {last}"

    @property
    def axis(self) -> int:
        """Return the number of its owners' axis, which is the `ParamSpec.axis` of all its parameters."""
        return self.slots[0].spec.axis

    @property
    def unit(self) -> int:
        """Return the `ParamSpec.unit` of all its parameters."""
        return self.slots[0].spec.unit

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.num_shards

    def shard_spans(self, shard: int) -> tuple[GroupSpan, ...]:
        """Return the spans of a shard, counted from its start: at most one per group."""
        first, last = shard * self.shard_numel, (shard + 1) * self.shard_numel
        clipped = (
            GroupSpan(span.group, max(span.start, first) - first, min(span.end, last) - first) for span in self.spans
        )
        return tuple(span for span in clipped if span.start < span.end)

    def unlike_shards(self) -> set[int]:
        """Return the numbers of shards of which one has the spans of any shard: those at a span's border, and the next
        ones.
        """
        at_borders = {border // self.shard_numel for span in self.spans for border in (span.start, span.end)}
        return {shard for first in at_borders for shard in (first, first + 1) if shard < self.num_shards}

    def padded_ends(self) -> list[int]:
        """Return the end of each parameter's padding, where the next parameter starts."""
        return [*(slot.start for slot in self.slots[1:]), self.padded_numel]

    def shard_pieces(self, shard: int) -> tuple[Piece, ...]:
        """Return the parameters' parts in a shard, in order and without gaps."""
        first, last = shard * self.shard_numel, (shard + 1) * self.shard_numel
        pieces = []
        for slot, end in zip(self.slots, self.padded_ends(), strict=True):
            start = max(slot.start, first)
            if start < min(end, last):
                numel = max(0, min(slot.end, last) - start)
                pieces.append(Piece(slot.spec, start - slot.start, start - first, min(end, last) - first, numel))
        return tuple(pieces)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All buckets of one rank, in the order in which backward fills them. Buckets with more owners than the
    data-parallel ranks come last.
    """

    buckets: tuple[BucketPlan, ...]

    @property
    def padded_numel(self) -> int:
        return sum(bucket.padded_numel for bucket in self.buckets)


def default_bucket_size(numel: int, dp_size: int) -> int:
    """Return the elements per bucket. Buckets are large enough to use the network well. There are at least four,
    so that most of the reduction overlaps with backward, unless each would have fewer than a million elements.
    """
    return min(max(40_000_000, 1_000_000 * dp_size), max(1_000_000, math.ceil(numel / 4)))


def build_layout(specs: Sequence[ParamSpec], axis_sizes: Sequence[int], bucket_size: int | None = None) -> FlatLayout:
    """Cut the parameters, in reverse registration order (about the order of their gradients), into buckets.

    `axis_sizes`: the number of ranks in each axis of `ParamSpec.axis`; all of a bucket's parameters have one axis.
    Buckets stand in the order of their last parameters, which is the order in which backward fills them.
    Buckets with more owners than the data-parallel ranks (the first axis) come last. They hold tied tables and
    replicated norms. Their parameters come from all layers, so they are full only at the end of backward. Also, the two
    ends of a pipeline have different backwards, but must sum their common table at the same place in the order.
    A bucket is closed at the end of a unit, or once it holds `bucket_size` elements, so size 1 gives a bucket per
    parameter.
    If an optimizer takes whole matrices, no shard border of an axis cuts a matrix, provided that this costs little
    padding and that the axis's ranks have whole matrices. Then no element of a matrix travels for the update.
    Raises: ValueError if there is nothing to train or bucket_size is not positive.
    """
    if not specs:
        raise ValueError("the model has no trainable parameter: it has none, or every requires_grad is False")
    if bucket_size is None:
        bucket_size = default_bucket_size(sum(spec.numel for spec in specs), axis_sizes[0])
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}; None picks a size by itself")
    buckets = list[BucketPlan]()
    for axis, num_shards in enumerate(axis_sizes):
        buckets += _buckets([spec for spec in specs if spec.axis == axis], num_shards, bucket_size)
    places = {spec.name: place for place, spec in enumerate(reversed(specs))}

    def turn(bucket: BucketPlan) -> int:  # sorted() is stable: shared buckets keep their order
        shared = bucket.num_shards > axis_sizes[0]
        return len(specs) if shared else max(places[slot.spec.name] for slot in bucket.slots)

    return FlatLayout(tuple(sorted(buckets, key=turn)))


def _buckets(specs: Sequence[ParamSpec], num_shards: int, bucket_size: int) -> list[BucketPlan]:
    flat = _cut(specs, num_shards, bucket_size, uncut=False)
    matrices = [spec for spec in specs if spec.matrices]
    if not matrices or any(spec.shape != spec.full_shape for spec in matrices):
        return flat
    uncut = _cut(specs, num_shards, bucket_size, uncut=True)
    most = (1 + constants.MOST_PADDING) * sum(bucket.padded_numel for bucket in flat)
    return uncut if sum(bucket.padded_numel for bucket in uncut) <= most else flat


def _cut(specs: Sequence[ParamSpec], num_shards: int, bucket_size: int, *, uncut: bool) -> list[BucketPlan]:
    """Cut the parameters into buckets. `uncut`: each matrix lies within one shard. So do norms and biases, which fill
    the gaps.
    """
    buckets = list[BucketPlan]()
    for pack in (True, False) if uncut else (False,):
        held = list[ParamSpec]()
        for spec in reversed(specs):
            if uncut and pack != bool(spec.matrices or len(spec.full_shape) < 2):
                continue
            if held and (held[-1].unit != spec.unit or sum(spec.numel for spec in held) >= bucket_size):
                buckets.append(_bucket(held, num_shards, pack=pack))
                held = []
            held.append(spec)
        if held:
            buckets.append(_bucket(held, num_shards, pack=pack))
    return buckets


def _bucket(specs: list[ParamSpec], num_shards: int, *, pack: bool) -> BucketPlan:
    slots = list[Slot]()
    parts = _packed(specs, num_shards) if pack else [specs]
    size = max(sum(_round_up(spec.numel, ROW) for spec in part) for part in parts)
    for number, part in enumerate(parts):
        end = number * size
        for spec in sorted(part, key=lambda spec: spec.group):  # stable: keeps the reverse order within a group
            slots.append(Slot(spec, end))
            end += _round_up(spec.numel, ROW)
    padded_numel = _round_up(len(parts) * size, ROW * num_shards)
    # Padding belongs to the span before it: its weights, gradients and states are zeros, and every optimizer keeps them
    # zero.
    firsts = [next(run) for _, run in groupby(slots, key=lambda slot: slot.spec.group)]
    ends = [*(slot.start for slot in firsts[1:]), padded_numel]
    spans = tuple(GroupSpan(slot.spec.group, slot.start, end) for slot, end in zip(firsts, ends, strict=True))
    return BucketPlan(tuple(slots), spans, padded_numel, num_shards)


def _packed(specs: Sequence[ParamSpec], num_shards: int) -> list[list[ParamSpec]]:
    """Divide parameters among the shards: the largest first, each to the shard that holds the least (Graham 1969)."""
    parts: list[list[ParamSpec]] = [[] for _ in range(num_shards)]
    loads = [0] * num_shards
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        least = loads.index(min(loads))
        parts[least].append(spec)
        loads[least] += _round_up(spec.numel, ROW)
    return parts


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
