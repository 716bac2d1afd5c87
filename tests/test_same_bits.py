"""The comparison of two engines covers every possible pair of settings; a differing bit is named by attempt, rank and
tensor, and an engine that fails does not count as equal.
"""

import pytest

from tests.same_bits.__main__ import first_difference
from tests.same_bits.configurations import choose, pairs_of, restricted, tree_of
from tests.same_bits.worker import joined, train


def test_every_pair_of_settings_that_can_be_is_shown():
    axes = restricted(("shard=parameters", "layout=dp2,tp2"))
    chosen, others = choose(axes, 120, seed=3), choose(axes, 300, seed=4)
    assert (len(chosen), len(others)) == (120, 300)
    assert set().union(*map(pairs_of, others)) <= set().union(*map(pairs_of, chosen))
    assert all(value in axes[axis] for one in chosen for axis, value in one.items())


TOLD = {"attempt 0: rank 0: loss": "a", "attempt 1: rank 0: loss": "b", "attempt 0: rank 1: loss": "a"}
FAILED = {"error": "Traceback\nValueError: no"}


@pytest.mark.parametrize(
    ("new", "want"),
    [
        (TOLD, None),
        (TOLD | {"attempt 1: rank 0: loss": "e"}, "attempt 1: rank 0: loss: b -> e; places that differ: 1"),
        (dict.fromkeys(TOLD, "b"), "attempt 0: rank 0: loss: a -> b; places that differ: 2"),
        ({}, "attempt 0: rank 0: loss: a -> not told; places that differ: 3"),
        (TOLD | {"attempt 0: norm": "b"}, "attempt 0: norm: not told -> b; places that differ: 1"),
        (FAILED, "the new tree failed:\nTraceback\nValueError: no"),
    ],
)
def test_the_first_difference_is_named(new, want):
    assert first_difference(TOLD, new) == want


def test_trees_that_fail_alike_are_not_equal():
    assert first_difference(FAILED, FAILED) == "the old tree failed:\nTraceback\nValueError: no"


def test_ranks_tell_the_same_wherever_buckets_lie_and_name_what_changes_a_step(run_ranks):
    only = ("layout=dp2", "dtype=fp16", "scale=dynamic", "model=tied", "shard=parameters", "bucket_size=none")
    one = choose(restricted((*only, "clip_grad=0.0", "optimizer=adamw")), 1, seed=0)[0]
    changes = [{}, {"bucket_size": "700"}, {"clip_grad": "0.5"}]
    told, moved, changed = (joined(run_ranks(train, 2, tree_of(one | change))) for change in changes)
    skipped = [int(bits.split()[-1]) for place, bits in told.items() if place.endswith("rank 1: skipped_steps")]
    assert 2 <= max(skipped) < len(skipped) - 2
    assert first_difference(told, moved) is None
    assert first_difference(told, changed).startswith("attempt 0 ends: rank 0: half parameter embedding.weight: ")
