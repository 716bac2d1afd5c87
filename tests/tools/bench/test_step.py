"""A stopwatch assigns each moment of a step to one part, and the parts leave no time out; watched steps train as others
do; goals compare the time beyond forward and backward.
"""

import time
from functools import partial
from types import SimpleNamespace

from megamix.tools.bench import step_bench
from megamix.tools.bench.ranks import Settings, Side, TrainRank
from megamix.tools.bench.sides import Ddp, ForwardBackward, Fsdp, Ours
from megamix.tools.bench.step_bench import (
    ALONE,
    BACKWARD,
    BATCH,
    CPU,
    DDP,
    FORWARD,
    GATHERS,
    HOOKS,
    LAUNCHES,
    OTHERS,
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
    Timed,
    step,
)
from tests.tools.bench.tiny import WORK, fork_ranks


def test_each_moment_goes_to_one_part(monkeypatch):
    now, cpu = 10.0, 1.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "thread_time", lambda: cpu)
    clock = SimpleNamespace(read=dict)
    watch = Stopwatch(clock)
    for seconds, part, rest, spans in (
        (4.0, FORWARD, "", {"exposed_all_gather": 1.0}),
        (8.0, BACKWARD, "", {"exposed_reduce_scatter": 2.0}),
        (1.0, HOOKS, "", {}),
        (6.0, STATISTICS, REST, {"update": 3.0, "exposed_reduce_scatter": 1.0}),
        (7.0, UPDATE, LAUNCHES, {"update": 5.0}),
        (7.0, UPDATE, REST, {"update": 6.0}),
    ):
        now += seconds
        cpu += seconds / 2
        clock.read = lambda spans=spans: spans
        watch.lap(part, rest)
    clock.read = dict
    now += 0.5
    read = watch.read()
    assert read == {
        BATCH: 500.0, FORWARD: 3000.0, BACKWARD: 6000.0, HOOKS: 1000.0, SUMS: 3000.0, GATHERS: 1000.0,
        STATISTICS: 3000.0, UPDATE: 11000.0, LAUNCHES: 2000.0, REST: 3000.0,
        CPU[BATCH]: 0.0, CPU[FORWARD]: 2000.0, CPU[BACKWARD]: 4000.0, CPU[HOOKS]: 500.0, CPU[STATISTICS]: 3000.0,
        CPU[UPDATE]: 7000.0,
    }  # fmt: skip
    assert watch.read() == {BATCH: 0.0, CPU[BATCH]: 0.0}  # a lap begins where the last one ended


BUILDS = {shard: partial(Ours, shard=shard) for shard in SHARDS} | {DDP: Ddp, RESHARDED: Fsdp}


def _turns():
    found = {}
    for name, build in BUILDS.items():
        watched = TrainRank(Side(name, partial(Timed, build=build), steps=2), WORK)
        found[name] = watched.turn(), watched.losses(2), TrainRank(Side(name, build), WORK).losses(5)[3:]
    alone = TrainRank(Side(ALONE, partial(Timed, build=ForwardBackward), steps=2), WORK)
    return {**found, ALONE: (alone.turn(), [], [])}


def test_the_parts_of_a_turn_leave_nothing_out_and_change_no_bit(run_ranks):
    for found in run_ranks(_turns, 2):
        for name, (turn, watched, plain) in found.items():
            parts = turn.details_ms
            assert watched == plain, name
            # The stopwatch is set just before the turn begins and read just after its end.
            elapsed = {part: ms for part, ms in parts.items() if part in PARTS}
            assert sum(elapsed.values()) >= 0.999 * 1e3 * turn.seconds, name
            expected = {BATCH, FORWARD, BACKWARD, UPDATE}
            if name in SHARDS:  # "parameters" launches gathers in the passes
                expected = set(PARTS) - ({LAUNCHES} if name == "parameters" else set())
            assert set(elapsed) == expected, name
            assert {part for part in CPU if CPU[part] in parts} == expected & set(CPU), name
            assert all(ms > 0 for part, ms in parts.items() if part in (FORWARD, BACKWARD, HOOKS)), parts


def test_the_bench_runs_from_end_to_end(monkeypatch):
    fork_ranks(monkeypatch)
    result = step(Settings(work=WORK, rounds=1))
    assert [row[0] for row in result.rows[:-4]] == [*PARTS, WHOLE, *CPU.values(), OTHERS, PROCESSOR]
    assert result.columns == ("ms a step", ALONE, *SHARDS, DDP, RESHARDED)
    assert len(result.goals) == 4


def test_goals_are_over_forward_and_backward_alone_in_the_same_round():
    def rounds(*whole):
        return [{WHOLE: ms, PROCESSOR: 2 * ms} for ms in whole]

    parts = {
        ALONE: rounds(100.0, 200.0),
        "states": rounds(110.0, 210.0),
        "parameters": rounds(135.0, 235.0),
        DDP: rounds(120.0, 220.0),
        RESHARDED: rounds(140.0, 240.0),
    }
    goals = step_bench._goals(parts)
    assert [goal.value for goal in goals] == [0.5, 0.5, 0.875, 0.875]
    assert [goal.met for goal in goals] == [True, True, False, False]
