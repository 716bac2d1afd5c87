"""The comparison of two engines covers every possible pair of settings; a differing bit is named by attempt, rank and
tensor, and an engine that fails does not count as equal.
"""

import copy
import re
from pathlib import Path

import pytest

from tests.same_bits.compare import first_difference, lies_alike
from tests.same_bits.configurations import FORBIDDEN, NAMED, allowed_pairs, choose, pairs_of, restricted
from tests.same_bits.worker import joined, train

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("only", [(), ("shard=parameters", "layout=dp2,tp2"), ("layout=pp2zb",)])
def test_every_pair_of_settings_that_can_be_is_shown(only):
    axes = restricted(only)
    chosen = choose(axes, 120, seed=3)
    assert len(chosen) == 120
    assert allowed_pairs(axes) <= set().union(*map(pairs_of, chosen))
    assert all(pairs_of(one).isdisjoint(FORBIDDEN) for one in chosen)
    assert all(value in axes[axis] for one in chosen for axis, value in one.items())


TOLD = {
    "layout": "x",
    "told": {
        "all ranks": {"attempt 1: master of up": "c", "at the end: master of up": "d"},
        "rank 0": {"attempt 0: loss": "a", "attempt 1: loss": "b", "attempt 1: by_piece": "e"},
        "rank 1": {"attempt 0: loss": "a", "attempt 1: loss": "b", "attempt 1: by_piece": "f"},
    },
}


def _changed(*changes, layout="x"):
    answer = copy.deepcopy(TOLD) | {"layout": layout}
    for who, what, bits in changes:
        answer["told"][who][what] = bits
        if bits is None:
            del answer["told"][who][what]
    return answer


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ([], None),
        (
            [("all ranks", "at the end: master of up", "e")],
            "all ranks, at the end: master of up: d -> e; places that differ: 1",
        ),
        (
            [("all ranks", "at the end: master of up", "e"), ("rank 1", "attempt 0: loss", "b")],
            "rank 1, attempt 0: loss: a -> b; places that differ: 2",
        ),
        ([("rank 0", "attempt 1: loss", None)], "rank 0, attempt 1: loss: b -> not told; places that differ: 1"),
        ([("rank 0", "attempt 2: loss", "b")], "rank 0, attempt 2: loss: not told -> b; places that differ: 1"),
    ],
)
def test_the_first_difference_is_named(changes, want):
    assert first_difference(TOLD, _changed(*changes)) == want


def test_pieces_that_lie_elsewhere_are_no_difference():
    pieces = ("rank 0", "attempt 1: by_piece", "g")
    assert first_difference(TOLD, _changed(pieces)) is not None
    assert first_difference(TOLD, _changed(pieces, layout="y")) is None
    assert first_difference(TOLD, _changed(("rank 0", "attempt 1: loss", "g"), layout="y")) is not None


def test_trees_that_fail_alike_are_not_equal():
    failed = {"error": "Traceback\nValueError: no"}
    assert "the old tree failed:\nTraceback\nValueError: no" in str(first_difference(failed, failed))
    assert "the new tree failed" in str(first_difference(TOLD, failed))


def test_ranks_tell_the_same_wherever_buckets_lie_and_name_what_changes_a_step(run_ranks):
    one = NAMED[0] | {"compiled": False, "seed": "a", "layout": "dp2", "model": "tied", "shard": "parameters"}
    changes = [{}, {"bucket_size": 1}, {"clip_grad": 0.1}]
    told, moved, changed = (joined(run_ranks(train, 2, one | change, str(ROOT))) for change in changes)
    assert 0 < told["skipped"] < told["attempts"] - 2
    assert first_difference(told, moved) is None
    assert not lies_alike(told, moved)
    assert re.match(r"(all ranks|rank \d), attempt [0-4]: ", str(first_difference(told, changed)))
