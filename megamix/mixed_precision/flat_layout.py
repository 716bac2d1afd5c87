"""Places of all parameters: buckets, optimizer spans, padding and owners. Pure arithmetic: no tensors, no ranks
talking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megamix import tuned

# Every parameter and every shard starts on a multiple of 64 elements: 128 bytes in half precision, so that vector
# loads are aligned (a compiled kernel copies misaligned inputs first), and one row of the statistics, so that no row
# is cut by a shard border.
ROW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """What the engine knows of one trainable parameter. A shared parameter has one spec; `name` is the first
    registered one.

    A rank trains a block of the parameter, which may be all of it. Every rank that trains the same block owns a share
    of its FP32 truth, so no element has two owners, and none is counted or saved twice.
    """

    name: str
    shape: tuple[int, ...]  # of the block
    group: int  # index of its optimizer group
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the block in the full parameter
    axis: int = 0  # of the ranks that train this block, its owners: a number in the axes that the layout is built for
    # False: another owner has this same gradient, which is summed once. Not printed, since owners compare what is.
    counts: bool = field(default=True, repr=False)
    aliases: tuple[str, ...] = ()
    unit: int = field(default=0, repr=False)  # whose buffers come and go with it; 0: the root's. No bucket is of two
    # Rows of the matrices that the optimizer takes whole, one below the other in the full parameter seen as rows of its
    # last dim; none: it moves each element by itself.
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
    def block(self) -> tuple[slice, ...]:
        """Return what this rank trains of the full parameter."""
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
    """The part of one parameter that a rank owns: elements [start, end) of its shard of a bucket, with the padding
    that follows the parameter; both are multiples of ROW.
    """

    spec: ParamSpec
    first: int  # the number of its first element in the parameter's block
    start: int
    end: int
    numel: int  # elements of the parameter; what follows them is padding

    @property
    def elements(self) -> slice:
        """Return where the parameter's elements lie in the shard, without the padding."""
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A flat buffer's plan: parameters of one group stand together, each on a row border; the end is padded for the
    ranks that own a shard each.
    """

    slots: tuple[Slot, ...]
    spans: tuple[GroupSpan, ...]
    padded_numel: int
    num_shards: int

    @property
    def name(self) -> str:
        """For a message."""
        first, last = self.slots[0].spec.name, self.slots[-1].spec.name
        return first if first == last else f"{first} to {last}"

    @property
    def axis(self) -> int:
        """Return the number of its owners' axis, `ParamSpec.axis` of all its parameters."""
        return self.slots[0].spec.axis

    @property
    def unit(self) -> int:
        """Return `ParamSpec.unit` of all its parameters."""
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

    def padded_ends(self) -> list[int]:
        """Return where each parameter's padding ends, which is where the next one starts."""
        return [*(slot.start for slot in self.slots[1:]), self.padded_numel]

    def shard_pieces(self, shard: int) -> tuple[Piece, ...]:
        """Return the parameters in a shard, in order and without gaps."""
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
    """All buckets of what one rank trains, in the order in which backward fills them; those that more ranks share than
    the data-parallel ones are last.
    """

    buckets: tuple[BucketPlan, ...]

    @property
    def padded_numel(self) -> int:
        return sum(bucket.padded_numel for bucket in self.buckets)


def default_bucket_size(numel: int, dp_size: int) -> int:
    """Return the elements per bucket: large enough to use the wire well, yet at least four buckets, so that most of the
    reduction overlaps backward, as long as each keeps a million elements."""
    return min(max(40_000_000, 1_000_000 * dp_size), max(1_000_000, math.ceil(numel / 4)))


def build_layout(specs: Sequence[ParamSpec], axis_sizes: Sequence[int], bucket_size: int | None = None) -> FlatLayout:
    """Cut the parameters, in reverse registration order (about the order of their gradients), into buckets.

    `axis_sizes`: how many ranks each `ParamSpec.axis` means; a bucket is of one of them. Buckets stand in the order of
    their last parameters, as backward fills them, whoever owns them. Last are those that more ranks share than the
    data-parallel ones, the first axis: tied tables and replicated norms. They come from all layers, so they are full at
    the end of backward, and the ends of a pipeline, whose backwards differ, must reach a table of theirs in one order.
    A bucket is closed once it holds `bucket_size` elements, so 1 gives a bucket per parameter, and where a unit ends.
    Where an optimizer takes whole matrices, no border of a shard cuts one, if that costs little padding and the ranks
    have whole ones: then none of their elements travels for the update.
    Raises: ValueError if there is nothing to train or bucket_size is not positive.
    """
    if not specs:
        raise ValueError("the model has no trainable parameter: it has none, or every requires_grad is False")
    if bucket_size is None:
        bucket_size = default_bucket_size(sum(spec.numel for spec in specs), axis_sizes[0])
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}; None picks a size by itself")
    flat = _cut(specs, axis_sizes, bucket_size, uncut=False)
    if not any(spec.matrices for spec in specs) or any(
        spec.matrices and spec.shape != spec.full_shape for spec in specs
    ):
        return flat
    uncut = _cut(specs, axis_sizes, bucket_size, uncut=True)
    return uncut if uncut.padded_numel <= (1 + tuned.MOST_PADDING) * flat.padded_numel else flat


def _cut(specs: Sequence[ParamSpec], axis_sizes: Sequence[int], bucket_size: int, *, uncut: bool) -> FlatLayout:
    """`uncut`: each matrix lies in one shard, and so do norms and biases, which fill the gaps."""
    buckets: list[BucketPlan] = []
    for axis, num_shards in enumerate(axis_sizes):
        for pack in (True, False) if uncut else (False,):
            held: list[ParamSpec] = []
            for spec in reversed(specs):
                if spec.axis != axis or (uncut and pack != bool(spec.matrices or len(spec.full_shape) < 2)):
                    continue
                if held and (held[-1].unit != spec.unit or sum(spec.numel for spec in held) >= bucket_size):
                    buckets.append(_bucket(held, num_shards, pack=pack))
                    held = []
                held.append(spec)
            if held:
                buckets.append(_bucket(held, num_shards, pack=pack))
    places = {spec.name: place for place, spec in enumerate(reversed(specs))}

    def turn(bucket: BucketPlan) -> int:  # of those that are last, the order in which they stand here is kept
        shared = bucket.num_shards > axis_sizes[0]
        return len(specs) if shared else max(places[slot.spec.name] for slot in bucket.slots)

    return FlatLayout(tuple(sorted(buckets, key=turn)))


def _bucket(specs: list[ParamSpec], num_shards: int, *, pack: bool) -> BucketPlan:
    slots: list[Slot] = []
    spans: list[GroupSpan] = []
    parts = _packed(specs, num_shards) if pack else [specs]
    size = max(sum(_round_up(spec.numel, ROW) for spec in part) for part in parts)
    for number, part in enumerate(parts):
        end = number * size
        for spec in sorted(part, key=lambda spec: spec.group):  # stable: keeps the reverse order within a group
            slots.append(Slot(spec, end))
            end += _round_up(spec.numel, ROW)
            start = spans.pop().start if spans and spans[-1].group == spec.group else slots[-1].start
            if spans:
                spans[-1] = GroupSpan(spans[-1].group, spans[-1].start, start)
            spans.append(GroupSpan(spec.group, start, end))
    # Padding belongs to the span before it: its weights, gradients and states are zeros, and every optimizer keeps them
    # so.
    padded_numel = _round_up(len(parts) * size, ROW * num_shards)
    spans[-1] = GroupSpan(spans[-1].group, spans[-1].start, padded_numel)
    return BucketPlan(tuple(slots), tuple(spans), padded_numel, num_shards)


def _packed(specs: Sequence[ParamSpec], num_shards: int) -> list[list[ParamSpec]]:
    """Divide them among the shards, the largest first, each to the one that holds the least (Graham 1969)."""
    parts: list[list[ParamSpec]] = [[] for _ in range(num_shards)]
    loads = [0] * num_shards
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        least = loads.index(min(loads))
        parts[least].append(spec)
        loads[least] += _round_up(spec.numel, ROW)
    return parts


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
