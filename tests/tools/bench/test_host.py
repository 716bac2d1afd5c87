"""In the host bench every side of every case trains the same thing; a cost is the difference of two cases that differ
in one thing, tested on made-up figures.
"""

from dataclasses import replace

import pytest

from megamix.tools.bench import host_bench
from megamix.tools.bench.host_bench import (
    ALONE,
    BARE,
    CUT,
    FIRST_STEPS,
    HALF,
    JOINED,
    OURS,
    SHALLOW,
    TWO,
    UNJOINED,
    First,
    HostCase,
    Unjoined,
    a_further,
    host,
    sittings,
    small_model,
)
from megamix.tools.bench.ranks import Settings
from megamix.tools.bench.sides import Ours, Work, make_model
from tests.tools.bench.tiny import WORK, fork_ranks

TINY = Settings(work=replace(WORK, lr=1e-3), rounds=1)


def test_the_bench_runs_from_end_to_end_and_all_sides_train_the_same(monkeypatch):
    fork_ranks(monkeypatch)
    result = host(TINY, layers=4, width=8, steps=1)
    assert set(result.raw) == {ALONE, JOINED, SHALLOW, HALF, CUT, TWO}
    for case, raw in result.raw.items():
        trained = {name: first.losses for name, first in raw["first"].items() if name != BARE}
        assert all(len(losses) == FIRST_STEPS for losses in trained.values())
        for name, losses in trained.items():
            assert losses == pytest.approx(trained["parameters"], abs=2e-2), (case, name)
        assert raw["first"][BARE].losses[0] == pytest.approx(trained["parameters"][0], abs=2e-2)
        assert all(ms > 0 for (ms,) in raw["cpu_ms"].values())
    assert {"by hand", "autocast", "ddp", "fsdp2, kept", "fsdp2, resharded", UNJOINED, *OURS} < set(
        result.raw[ALONE]["cpu_ms"]
    )
    assert f"{ALONE}, 52 tensors: states" in result.text()
    assert len(result.goals) == 5


def test_cases_differ_in_one_thing_each():
    sizes = {}
    for sitting in sittings(Work(), 48, 32):
        for case, work in sitting.cases.items():
            model = make_model(replace(work, device="meta"))
            sizes[case] = len([*model.parameters()]), len(model.blocks)
    assert sizes[ALONE] == sizes[CUT] == (580, 48)
    assert sizes[JOINED] == (580, 12)
    assert sizes[SHALLOW] == (148, 12)
    assert [sizes[case][0] for case in (HALF, TWO)] == [292, 292]


def test_a_side_joins_no_units_and_its_engine_alone():
    work = replace(TINY.work, model=small_model(8, 16))
    joined, unjoined = Ours(work, shard="parameters"), Unjoined(work)
    assert len(unjoined.engine.buckets) > 16 > len(joined.engine.buckets)
    assert len(Ours(work, shard="parameters").engine.buckets) == len(joined.engine.buckets)


def _made_up(layers, tensors, **cpu_ms):
    settings = Settings(work=Work(model=small_model(8, layers)))
    return HostCase(settings, tensors, {BARE: [10.0, 20.0], **cpu_ms}, {name: First([], 0) for name in (BARE, *cpu_ms)})


def test_a_cost_is_what_two_cases_differ_in():
    measured = {
        ALONE: _made_up(8, 100, parameters=[22.0, 36.0], ddp=[15.0, 28.0]),
        JOINED: _made_up(8, 100, parameters=[16.0, 24.0], ddp=[15.0, 28.0]),
        SHALLOW: _made_up(2, 28, parameters=[12.4, 22.8], ddp=[12.0, 22.0]),
        HALF: _made_up(4, 52, parameters=[13.0, 23.0], ddp=[12.0, 22.0]),
        CUT: _made_up(8, 100, parameters=[25.0, 39.0], ddp=[15.0, 28.0]),
        TWO: _made_up(4, 52, parameters=[16.0, 28.0], ddp=[14.0, 28.0]),
    }
    assert a_further(measured, "parameters") == {
        "tensor": pytest.approx([3.6 / 72, 1.2 / 72]),
        "unit": [1.0, 2.0],
        "micro-batch": [1.0, 1.0],
        "rank": [3.0, 5.0],
    }
    assert not a_further(measured, UNJOINED)
    measured[ALONE].cpu_ms |= {"states": [11.0, 24.0], "gradients": [12.0, 28.0], UNJOINED: [4.5, 9.0]}
    measured[JOINED].cpu_ms[UNJOINED] = [1.5, 6.0]
    goals = host_bench._goals(measured)
    # The first is 1 and 4 over 5 and 8.
    assert [goal.value for goal in goals] == pytest.approx([0.35, 0.7, 2.2, 1.25, 0.5])
    assert [goal.met for goal in goals] == [True, False, False, False, False]
