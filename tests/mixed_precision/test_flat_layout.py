"""Every parameter has one aligned place and every element one owner, on borders that kernels and statistics rely on."""

import random
from dataclasses import replace

import pytest

from megamix.mixed_precision.flat_layout import ROW, ParamSpec, build_layout, default_bucket_size
from tests.conftest import FULL


def _random_layout(seed):
    rng = random.Random(seed)
    shapes = [tuple(rng.randint(1, 40) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 30))]
    specs = [ParamSpec.whole(name=f"p{i}", shape=shape, group=rng.randrange(3)) for i, shape in enumerate(shapes)]
    return specs, build_layout(specs, [rng.choice([1, 2, 3, 4, 7, 8])], rng.choice([1, 999, 20_000, None]))


@pytest.mark.parametrize("seed", range(40 if FULL else 12))
def test_every_parameter_has_one_aligned_place_and_every_element_one_owner(seed):
    specs, layout = _random_layout(seed)
    slots = [slot for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(slot.spec.name for slot in slots) == sorted(spec.name for spec in specs)
    for bucket in layout.buckets:
        assert bucket.padded_numel % (ROW * bucket.num_shards) == 0
        assert all(slot.start % ROW == 0 for slot in bucket.slots)
        ends = [0, *(slot.end for slot in bucket.slots)]
        assert all(end <= slot.start for end, slot in zip(ends, bucket.slots, strict=False))
        assert ends[-1] <= bucket.padded_numel
        # Spans tile the bucket, one per group, and hold that group's parameters.
        assert [span.start for span in bucket.spans] == [0, *(span.end for span in bucket.spans[:-1])]
        assert bucket.spans[-1].end == bucket.padded_numel
        assert len({span.group for span in bucket.spans}) == len(bucket.spans)
        for slot in bucket.slots:
            (span,) = [span for span in bucket.spans if span.start <= slot.start < span.end]
            assert span.group == slot.spec.group
            assert slot.end <= span.end
        # The ranks' pieces tile their shards. Put end to end, they give every element the last parameter that starts at
        # or before it.
        for rank in range(bucket.num_shards):
            shard_numel = bucket.shard_numel
            pieces = bucket.shard_pieces(rank)
            assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
            assert pieces[-1].end == shard_numel
            for piece in pieces:
                assert piece.start % ROW == 0
                for element in (piece.start, piece.end - 1):
                    before = [slot for slot in bucket.slots if slot.start <= rank * shard_numel + element]
                    assert before[-1].spec.name == piece.spec.name
                (slot,) = [slot for slot in bucket.slots if slot.spec.name == piece.spec.name]
                real = [slot.start <= rank * shard_numel + e < slot.end for e in range(piece.start, piece.end)]
                assert real == [True] * piece.numel + [False] * (piece.end - piece.start - piece.numel)
        # The ranks' spans, put end to end, are the bucket's elements in order, with their groups.
        shard_numel = bucket.shard_numel
        owned = [0] * bucket.padded_numel
        for rank in range(bucket.num_shards):
            for span in bucket.shard_spans(rank):
                assert span.start % ROW == 0
                for element in range(span.start, span.end):
                    (whole,) = [r for r in bucket.spans if r.start <= rank * shard_numel + element < r.end]
                    assert whole.group == span.group
                    owned[rank * shard_numel + element] += 1
        assert set(owned) == {1}


@pytest.mark.parametrize(
    ("numel", "dp_size", "want"),
    [
        (500_000, 1, 1_000_000),  # small: one bucket of a million at most
        (8_000_000, 2, 2_000_000),  # four buckets
        (124_000_000, 1, 31_000_000),
        (10**9, 1, 40_000_000),
        (10**9, 100, 100_000_000),  # a million elements for each owner
    ],
)
def test_default_bucket_size(numel, dp_size, want):
    assert default_bucket_size(numel, dp_size) == want


def test_buckets_stand_in_the_order_of_backward_whoever_owns_them_and_what_more_ranks_share_is_last():
    def spec(name, axis):
        return replace(ParamSpec.whole(name=name, shape=(64,), group=0), axis=axis)

    # There are 4 data-parallel ranks; experts have 2 owners, norms 8, a tied table 16.
    specs = [spec("table", 3), spec("norm0", 2), spec("dense0", 0), spec("experts0", 1)]
    specs += [spec("norm1", 2), spec("dense1", 0), spec("experts1", 1)]

    def order(bucket_size):
        layout = build_layout(specs, [4, 2, 8, 16], bucket_size)
        assert all(len({slot.spec.axis for slot in bucket.slots}) == 1 for bucket in layout.buckets)
        return [[slot.spec.name for slot in bucket.slots] for bucket in layout.buckets]

    shared = [["norm1"], ["norm0"], ["table"]]
    assert order(1) == [["experts1"], ["dense1"], ["experts0"], ["dense0"], *shared]
    # A bucket of two parameters is full when its last one is.
    assert order(128) == [["experts1", "experts0"], ["dense1", "dense0"], ["norm1", "norm0"], ["table"]]


def test_nothing_to_train_and_a_wrong_bucket_size_are_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_layout([], [1])
    with pytest.raises(ValueError, match="bucket_size must be at least 1 element, got 0"):
        build_layout([ParamSpec.whole(name="w", shape=(3,), group=0)], [1], bucket_size=0)


def test_whole_matrices_stay_uncut_beside_a_stack_that_fewer_ranks_divide():
    dense = [
        replace(ParamSpec.whole(f"dense{number}", (rows, 40), 0), matrices=(rows,))
        for number, rows in enumerate([48] * 4 + [24] * 4)
    ]
    experts = ParamSpec(
        name="experts", shape=(2, 8, 40), full_shape=(4, 8, 40), group=0, offset=(2, 0, 0), matrices=(8,) * 4, axis=1
    )
    buckets = build_layout([*dense, experts], [4, 2], 10**9).buckets
    assert [bucket.num_shards for bucket in buckets] == [2, 4]
    shard = buckets[1].shard_numel
    assert all(slot.start // shard == (slot.end - 1) // shard for slot in buckets[1].slots)
