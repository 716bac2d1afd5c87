"""A bench prints and writes its measurements; medians, quartiles and paired ratios equal those computed by hand."""

import importlib.metadata
import json
from types import SimpleNamespace
from unittest import mock

import pytest

from megamix.tools.bench import report
from megamix.tools.bench.report import (
    Goal,
    Result,
    Spread,
    append_line,
    describe_machine,
    machine_line,
    paired_ratio,
    show,
    spread,
    table,
)


@pytest.mark.parametrize(
    ("value", "at_least", "met"), [(1.05, True, True), (1.04, True, False), (1.05, False, True), (1.06, False, False)]
)
def test_a_goal_is_met_at_its_bound_and_on_the_right_side_of_it(value, at_least, met):
    assert Goal("speed", value, 1.05, at_least).met is met


def test_goals_show_figure_quartiles_and_bound_and_numbers_stand_in_columns():
    goal = Goal("tokens/s over ddp", Spread(1.0, 1.1, 1.25), 1.05)
    assert goal.line() == "met    1.100 [1.000, 1.250] >= 1.05  tokens/s over ddp"
    assert show(Spread(1.04, 1.25, 2.0), 1) == "1.2 [1.0, 2.0]"
    rows = [("ours", "1.0"), ("the other", "10.0")]
    assert table(("side", "ms"), rows) == ["side         ms", "ours        1.0", "the other  10.0"]


def test_every_line_of_the_file_is_json_with_all_rounds_and_versions(tmp_path):
    raw = {"ours": {"tokens_per_s": [1.0, 2.0]}}
    result = Result("train", {"rounds": 2}, raw, ("side",), [("ours",)], [Goal("speed", 1.0, 2.0)], ["a note"])
    file, not_installed = tmp_path / "not" / "yet" / "there.jsonl", importlib.metadata.PackageNotFoundError
    with mock.patch.object(importlib.metadata, "version", side_effect=not_installed):
        line = result.json_line(describe_machine())
    append_line(file, line)
    append_line(file, line)
    first, second = map(json.loads, file.read_text().splitlines())
    assert first == second
    assert first["raw"] == raw
    assert first["goals"] == [
        {"text": "speed", "measured": 1.0, "value": 1.0, "bound": 2.0, "at_least": True, "met": False}
    ]
    assert {"date", "cpu", "cores", "vector_units", "load", "torch", "python"} <= set(first["machine"])
    assert first["machine"]["megamix"] == "not installed"
    assert "MISSED 1.000 >= 2  speed\na note" in result.text()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"fp16_units": False, "bf16_units": False}, "on Fast CPU, 2 cores: AVX2, no half units, BF16 products wide; "),
        ({"fp16_units": True, "bf16_units": True}, "on Fast CPU, 2 cores: AVX2, FP16 and BF16 units, BF16 products "),
        (
            {"device": "NVIDIA H200", "cards": 8, "cuda": "13.0"},
            "on 8 NVIDIA H200, beside 2 cores of Fast CPU; load 0.2, torch 2, CUDA 13.0",
        ),
    ],
)
def test_the_kind_of_a_machine_is_told(found, said):
    told = {"cpu": "Fast CPU", "cores": 2, "vector_units": "AVX2", "bf16_products": "wide", "load": 0.25, "torch": "2"}
    assert machine_line(describe_machine() | told | found).startswith(said)


def test_quartiles_are_between_values_and_a_slow_round_cancels_in_a_paired_ratio():
    assert spread([5.0]) == Spread(5.0, 5.0, 5.0)
    assert spread([4.0, 2.0, 3.0, 1.0]) == Spread(1.75, 2.5, 3.25)
    # The machine is ten times slower in the second round, for both sides.
    assert paired_ratio([20.0, 2.0, 20.0], [10.0, 1.0, 10.0]) == Spread(2.0, 2.0, 2.0)
    assert paired_ratio([1.0, 6.0, 2.0], [1.0, 2.0, 1.0]) == Spread(1.5, 2.0, 2.5)


def test_each_round_tells_the_time_left(monkeypatch, capsys):
    now_s = iter([100.0, 100.0, 130.0, 170.0])  # the start, and each round's begin
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    assert [*report.rounds_told(3)] == [0, 1, 2]
    told = ["round 1 of 3", "round 2 of 3, about 60 s left", "round 3 of 3, about 35 s left"]
    assert capsys.readouterr().err.splitlines() == told
