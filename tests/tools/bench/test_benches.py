"""The benches compare sides that do the same work and report what they measured; goals are tested on made-up figures,
and each bench from end to end at a tiny size.
"""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megamix.cli.verbs import main
from megamix.tools.bench import benches, startup_bench, train_bench, update_bench
from megamix.tools.bench.ranks import Settings, Turn
from megamix.tools.bench.report import Result, machine_line
from megamix.tools.bench.startup_bench import startup
from megamix.tools.bench.train_bench import LAYOUTS, Measured, layout, train
from megamix.tools.bench.update_bench import AFTER, BY_HAND, CASTS, COMPILED, COPY, LIBRARY, STATS, UpdateRank, update
from tests.conftest import FULL
from tests.tools.bench.tiny import MODEL, WORK, fork_ranks

TINY = Settings(work=WORK, rounds=1, ranks=1)


def _measured(tokens_per_s, peak_live_bytes=100):
    ones = [1.0] * len(tokens_per_s)
    return Measured(tokens_per_s, ones, ones, [{} for _ in ones], 10**8, peak_live_bytes)


def _figures(goals):
    return [f"{goal.text}: {goal.value:.4g}, {'met' if goal.met else 'missed'}" for goal in goals]


def test_a_step_takes_as_long_as_its_slowest_rank_and_tokens_of_a_shared_model_count_once():
    rounds = [[Turn(0.5, 3.0, 0.0, 0.5, {"update": 1.0}, 7), Turn(0.25, 4.0, 0.0, 1.0, {"update": 2.0}, 6)]]
    settings = replace(TINY, ranks=2)
    measured = train_bench._measured(rounds, 8, settings)
    # 2 ranks x 2 sequences x 16 tokens in half a second
    assert measured == Measured([128.0], [4.0], [0.75], [{"update": 1.0}], 7, 8, [])
    shared = replace(settings, work=replace(WORK, shared=True, micro_batches=4))  # 4 micro-batches of both ranks
    assert train_bench._measured(rounds, 8, shared).tokens_per_s == [256.0]


# Made-up tokens/s and peak live bytes of each side, and the bench's goals for them.
JUDGED = {
    "train": (
        lambda: train(TINY),
        {
            "ours": _measured([110.0, 100.0, 120.0], 90),
            "gradients": _measured([110.0, 99.0, 120.0], 80),
            "parameters": _measured([99.0, 90.0, 108.0], 60),
            "resharded": _measured([66.0, 75.0, 60.0], 50),
            "ddp": _measured([100.0, 100.0, 100.0], 180),
            "zero": _measured([100.0, 200.0, 60.0], 80),  # as fast as DDP by its own median
            "fsdp2": _measured([50.0, 50.0, 50.0], 60),
            "forward and backward": _measured([125.0, 125.0, 150.0], 50),
        },
        [
            "tokens/s over the best of the three (ddp): 1.1, met",
            "tokens/s over forward and backward alone: 0.8, missed",
            "peak live bytes over ddp's: 0.5, met",
            "peak live bytes over zero's: 1.125, missed",
            "gradients: tokens/s over ours: 1, met",
            "parameters: tokens/s over ours: 0.9, missed",
            "parameters: tokens/s over resharded: 1.5, met",
            "parameters: peak live bytes over resharded's: 1.2, missed",
        ],
    ),
    "tp2": (
        lambda: layout("tp2", Settings(rounds=3)),
        {
            "ours": _measured([110.0]),
            "autocast": _measured([100.0]),
            "fully_shard": _measured([50.0]),
            "ours, whole positions": _measured([200.0]),
        },
        ["tokens/s over torch alone (autocast): 1.1, met"],
    ),
    "cp2": (
        lambda: layout("cp2", Settings(rounds=3)),
        {"ours": _measured([95.0]), "dp2": _measured([100.0])},
        ["tokens/s over data-parallel ranks (dp2): 0.95, met"],
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_goals_are_over_the_peer_that_comes_nearest(monkeypatch, name):
    bench, rounds, goals = JUDGED[name]
    seen = []

    def measure(sides, settings):
        seen.append(settings)
        return {side.name: rounds[side.name] for side in sides}

    monkeypatch.setattr(train_bench, "measure", measure)
    assert _figures(bench().goals) == goals
    assert seen == [Settings(work=LAYOUTS[name].work, rounds=3, ranks=2) if name in LAYOUTS else TINY]


def test_benches_run_from_end_to_end_and_leave_lines_of_json(tmp_path, capsys, monkeypatch):
    output = tmp_path / "bench.jsonl"
    if not FULL:
        fork_ranks(monkeypatch)
        monkeypatch.setattr(update_bench, "KINDS", {"fp16": update_bench.KINDS["fp16"]})  # one process a kind
    tiny = partial(update, threads=(1,), calls=1, sizes={"tiny": MODEL})
    benches.report({"update": (tiny, TINY), "train": (partial(train, names=("ours", "plain")), TINY)}, output)
    every = [json.loads(line) for line in output.read_text().splitlines()]
    updated, trained = (line for line in every if "goals" in line)
    assert [line["bench"] for line in (updated, trained)] == ["update", "train"]
    begun, *sides = [[*line] for line in every if line["bench"] == "train"][:3]
    assert begun == ["bench", "machine", "settings"]
    assert sides == [["bench", "side", "round", "tokens_per_s"]] * 2
    assert {line["side"] for line in every if "round" in line} == {"fp16", "ours", "plain"}
    assert set(updated["raw"]["fp16, 1 thread(s)"]) == {LIBRARY, "statistics, no compiler", CASTS, COPY}
    ((after,), (by_hand,)) = (updated["raw"]["tiny"][way] for way in (AFTER, BY_HAND))
    (goal,) = [goal for goal in updated["goals"] if goal["text"] == f"{AFTER}: processor time over by hand's (tiny)"]
    assert (goal["value"], goal["bound"], goal["at_least"]) == (after / by_hand, 1.1, False)
    turns = trained["raw"]["plain"]
    assert [len(turns[name]) for name in ("tokens_per_s", "optimizer_ms", "details_ms")] == [1, 1, 1]
    assert turns["peak_live_bytes"] > 0
    printed = capsys.readouterr().out
    assert "megamix bench update" in printed
    assert re.search("ours, ms a step on rank 0: .*exposed_all_gather", printed)
    assert machine_line(trained["machine"]) in printed


def test_startup_fills_the_cache_before_it_finds_it_full(monkeypatch):
    fork_ranks(monkeypatch)
    real, starts = startup_bench._seconds_to_first_step, []

    def seconds(side, work, environment, world_size):
        starts.append((side.build, work, environment))
        return real(side, work, environment, world_size) if side.name == "ddp" else 10.0

    monkeypatch.setattr(startup_bench, "_seconds_to_first_step", seconds)
    monkeypatch.setattr(startup_bench, "MAX_ROUNDS", 1)
    result = startup(Settings(work=replace(WORK, compile_update=True), rounds=9))
    assert [*result.raw] == ["ours, compile cache cold", "ours, compile cache warm", "ours, no compiler", "ddp"]
    assert 0 < result.raw["ddp"][0] < 120
    cold, warm, uncompiled, _ = starts
    assert cold == warm
    assert (cold[1].compile_update, uncompiled[1].compile_update) == (True, False)
    assert not Path(cold[2]["TORCHINDUCTOR_CACHE_DIR"]).exists()  # the bench removed its own folder


def test_update_goals_are_ratios_of_rates():
    seconds = {COPY: [9.0, 9.0], COMPILED: [10.0, 10.0], CASTS: [13.0, 13.0], STATS: [4.0, 4.0], LIBRARY: [12.0, 12.0]}
    assert _figures([*update_bench._goals((1, "bf16"), seconds)]) == [
        "compiled update's rate over the copy's (bf16, 1 thread(s)): 0.9, met",
        "compiled update's speed over cast + AdamW(fused) + cast (bf16, 1 thread(s)): 1.3, met",
        "compiled statistics' time over the compiled update's (bf16, 1 thread(s)): 0.4, missed",
        "update's rate without a compiler over the copy's (bf16, 1 thread(s)): 0.75, missed",
    ]


def test_the_bytes_of_an_update_are_those_of_its_tensors():
    for name, (dtype, optimizer) in update_bench.KINDS.items():
        rank = UpdateRank(replace(WORK, dtype=dtype), optimizer)
        moved = 0
        for bucket in rank._buckets:
            states = [state for of_span in bucket.states for state in of_span.values()]
            both = 2 * [bucket.master, *states]  # read and written
            moved += sum(tensor.nbytes for tensor in [bucket.grads, bucket.params, *both])
        assert moved == update_bench.update_bytes(optimizer) * rank.num_params()
        bytes_a_param = 20 if "moments" in name else 28
        seconds = {LIBRARY: [1e-9 * rank.num_params()], COPY: [1.0]}
        (row, _) = update_bench._rows((1, name), seconds, rank.num_params())
        assert row[1:3] == ("1.000 [1.000, 1.000]", f"{bytes_a_param}.0 [{bytes_a_param}.0, {bytes_a_param}.0]")


def test_the_compiled_update_is_timed_beside_the_others(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # speed is not tested here
    rank = UpdateRank(replace(WORK, compile_update=True), calls=1)
    seconds = rank.seconds(3)
    assert [*seconds] == [*rank.variants][3:] + [*rank.variants][:3]
    assert {COMPILED, STATS, LIBRARY, CASTS, COPY} <= set(seconds)
    for name in (COMPILED, LIBRARY, CASTS):
        before = [bucket.master.clone() for bucket in rank._buckets]
        rank.variants[name]()
        assert not all(map(torch.equal, before, [bucket.master for bucket in rank._buckets])), name
        assert all(torch.equal(bucket.params, bucket.master.bfloat16()) for bucket in rank._buckets), name


EVERY = ["update", "train", "step", "host", *LAYOUTS, "startup"]


@pytest.mark.parametrize(
    ("flags", "want"),
    [(["step", "--json"], ["step"]), (["all"], EVERY), (["--layout", "tp2"], ["tp2"]),
     (["train", "--layout", "pp2"], ["pp2"])],
)  # fmt: skip
def test_the_verb_runs_what_it_names(flags, want, tmp_path, capsys, monkeypatch):
    ran = []

    def bench(name, settings, **_):
        ran.append((name, settings.rounds))
        return Result(name, {}, {}, ("side",), [])

    monkeypatch.setattr(benches, "layout", bench)
    for name in EVERY:
        monkeypatch.setattr(benches, name, partial(bench, name), raising=False)
    output = tmp_path / "lines.jsonl"
    assert main(["bench", *flags, "--rounds", "3", "--output", str(output)]) == 0
    assert ran == [(name, 3) for name in want]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["bench"] for line in lines if "goals" in line] == want
    printed, is_json = capsys.readouterr().out, "--json" in flags
    assert (printed == output.read_text()) is is_json
    assert all((f"megamix bench {name}" in printed) is not is_json for name in want)


def test_gpus_that_torch_does_not_see_are_not_measured(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for what in ("train", "all"):
        assert main(["bench", what, "--device", "cuda"]) == 2
        said = f"--device: got cuda, but {what} is not measured on 0 GPU(s); write --device cpu"
        assert said in capsys.readouterr().err
