"""The rule names a rank that is slow by 30 % and no other, a slow node as a node, and compares only ranks with equal
work.
"""

import numpy as np
import pytest

from megamix.log.slow_ranks import KINDS, RankPlace, SlowRanks

FORWARD = [*KINDS].index("forward_backward")
SECONDS = (0.01, 1.0, 0.1)  # of each kind


def _places(hosts, each):
    return [RankPlace(f"n{rank // each}", 0, rank) for rank in range(hosts * each)]


def _judged(rule, size, slow, rng, intervals, noise=0.03):
    """Return all verdicts. `slow`: how many times as long forward and backward of a rank take. `noise`: its spread."""
    found = []
    for _ in range(intervals):
        times = np.array(SECONDS) * rng.normal(1, noise, (size, len(KINDS)))
        for rank, factor in slow.items():
            times[rank, FORWARD] *= factor
        found += rule.judge(times)
    return found


@pytest.mark.parametrize("size", [2, 4, 16])
def test_a_rank_that_is_slow_by_30_percent_is_named_and_no_other(size):
    for seed in range(20):
        rng, slow = np.random.default_rng(seed), seed % size
        rule = SlowRanks(_places(1, size))
        assert _judged(rule, size, {}, rng, 20) == []
        verdicts = _judged(rule, size, {slow: 1.3}, rng, 5)
        assert verdicts
        assert {(tuple(one.ranks), one.kind) for one in verdicts} == {((slow,), "forward_backward")}
        assert verdicts[-1].ratio == pytest.approx(1.27, abs=0.15)
        assert rule.slowest()[0] == slow


def test_a_rank_whose_times_vary_widely_is_not_named_by_chance():
    rule = SlowRanks(_places(1, 4))
    rng = np.random.default_rng(1)
    found = [_judged(rule, 4, {1: factor}, rng, 1) for factor in rng.normal(1, 0.3, 200)]
    assert sum(map(bool, found)) <= 4


def test_most_runs_of_ranks_alike_name_nobody_however_their_times_vary():
    for noise, most in ((0.05, 0), (0.2, 10)):
        runs = [_judged(SlowRanks(_places(1, 4)), 4, {}, np.random.default_rng(seed), 60, noise) for seed in range(20)]
        assert sum(map(bool, runs)) <= most


def _told(places, slow, intervals=5, seed=3):
    rule = SlowRanks(places)
    return {one.words for one in _judged(rule, len(places), slow, np.random.default_rng(seed), intervals)}


def test_three_slow_intervals_at_the_start_of_a_run_name_nobody():
    assert _told(_places(1, 2), {1: 1.3}, 4, seed=9) == set()
    assert _told(_places(1, 2), {1: 1.3}, 5, seed=9)


def test_a_rank_that_is_fast_again_is_no_longer_named():
    rule, rng = SlowRanks(_places(1, 4)), np.random.default_rng(2)
    assert _judged(rule, 4, {3: 1.5}, rng, 5)
    _judged(rule, 4, {}, rng, 3)
    assert _judged(rule, 4, {}, rng, 5) == []


def test_a_slow_rank_is_named_with_its_node_a_slow_node_and_ranks_that_wait_for_each_other_as_one():
    assert _told(_places(2, 2), {2: 1.9}) == {"rank 2 on n1"}
    assert _told(_places(2, 8), dict.fromkeys(range(8, 16), 1.3)) == {"node n1, ranks 8 to 15,"}
    groups = [RankPlace("n0", 0, rank // 2) for rank in range(4)]
    assert _told(groups, {2: 1.3, 3: 1.3}) == {"ranks 2, 3 on n0"}


def test_stages_of_a_pipeline_are_compared_within_themselves():
    places = [RankPlace("n0", rank // 3, rank % 3) for rank in range(6)]
    heavier = dict.fromkeys(range(3, 6), 2.0)  # the work of the second stage
    assert _told(places, heavier, 10) == set()
    assert _told(places, heavier | {1: 1.4}) == {"rank 1 on n0"}
    assert not SlowRanks([RankPlace("n0", 0, 0), RankPlace("n1", 1, 0)]).compares
