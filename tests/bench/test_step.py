"""The parts of a step: a stopwatch gives each moment to one, the parts of a turn leave nothing of it out, watched steps
train as others do, and goals compare what is over forward and backward alone.
"""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from megamix.bench import step_bench
from megamix.bench.ranks import Settings, Side, TrainRank
from megamix.bench.sides import Ours
from megamix.bench.step_bench import (
    ALONE,
    BACKWARD,
    BATCH,
    DDP,
    FORWARD,
    GATHERS,
    HOOKS,
    PARTS,
    PROCESSOR,
    RESHARDED,
    REST,
    SHARDS,
    STATISTICS,
    SUMS,
    UPDATE,
    WHOLE,
    Stopwatch,
    TimedAlone,
    TimedOurs,
    step,
)
from tests.bench.tiny import WORK, fork_ranks


def test_each_moment_goes_to_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock: Any = SimpleNamespace(read=dict)
    watch = Stopwatch(clock)
    for seconds, part, span_alone, spans in (
        (4.0, FORWARD, False, {"exposed_all_gather": 1.0}),
        (8.0, BACKWARD, False, {"exposed_reduce_scatter": 2.0}),
        (1.0, HOOKS, False, {}),
        (6.0, STATISTICS, True, {"update": 3.0, "exposed_reduce_scatter": 1.0}),
        (7.0, UPDATE, True, {"update": 5.0}),
    ):
        now += seconds
        clock.read = lambda spans=spans: spans
        watch.lap(part, span_alone)
    clock.read = dict
    now += 0.5
    read = watch.read()
    assert read == {
        BATCH: 500.0, FORWARD: 3000.0, BACKWARD: 6000.0, HOOKS: 1000.0, SUMS: 3000.0, GATHERS: 1000.0,
        STATISTICS: 3000.0, UPDATE: 5000.0, REST: 4000.0,
    }  # fmt: skip
    assert watch.read() == {BATCH: 0.0, REST: 0.0}  # a lap begins where the last one ended


def _turns() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shard in SHARDS:
        watched = TrainRank(Side(shard, lambda work, shard=shard: TimedOurs(work, shard), steps=2), WORK)
        plain = TrainRank(Side(shard, lambda work, shard=shard: Ours(work, shard=shard)), WORK)
        found[shard] = watched.turn(), watched.losses(2), plain.losses(5)[3:]
    alone = TrainRank(Side("alone", TimedAlone, steps=2), WORK)
    return {**found, ALONE: (alone.turn(), [], [])}


def test_the_parts_of_a_turn_leave_nothing_out_and_change_no_bit(run_ranks) -> None:
    for found in run_ranks(_turns, 2):
        for name, (turn, watched, plain) in found.items():
            parts = turn.details_ms
            assert watched == plain, name
            # The stopwatch is set just before the turn begins and read just behind its end.
            assert sum(parts.values()) >= 0.999 * 1e3 * turn.seconds, name
            assert set(parts) == ({BATCH, FORWARD, BACKWARD, REST} if name == ALONE else set(PARTS)), name
            assert all(ms > 0 for part, ms in parts.items() if part not in (REST, GATHERS)), (name, parts)


def test_the_bench_runs_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)
    result = step(Settings(work=WORK, rounds=1))
    assert [row[0] for row in result.rows[:11]] == [*PARTS, WHOLE, PROCESSOR]
    assert result.columns == ("ms a step", ALONE, *SHARDS, DDP, RESHARDED)
    assert len(result.goals) == 6


def test_goals_are_over_forward_and_backward_alone_in_the_same_round() -> None:
    def rounds(*whole: float) -> list[dict[str, float]]:
        return [{WHOLE: ms, PROCESSOR: 2 * ms} for ms in whole]

    parts = {
        ALONE: rounds(100.0, 200.0),
        "states": rounds(110.0, 210.0),
        "gradients": rounds(110.0, 210.0),
        "parameters": rounds(120.0, 220.0),
        DDP: rounds(120.0, 220.0),
        RESHARDED: rounds(140.0, 240.0),
    }
    goals = step_bench._goals(parts)
    assert [round(goal.value, 3) for goal in goals] == [0.5, 0.5, 0.5, 0.5, 1.0, 0.936]
    assert [goal.met for goal in goals] == [True, True, True, True, True, False]
