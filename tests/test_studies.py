"""Every study under docs/studies runs and finds what its page says, for example that headroom overflows in under 0.02 %
of 20,000 steps; figures/ holds the tables that the studies print, and the page links them.
"""

import re
import runpy
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import bf16_moments
import bf16_rounding
import experts
import fp8
import gemm_accumulation
import loss_scales
import memory
import optimizers
import overflow
import passes
import pytest
import regression
import run_all
import study
import torch
import vanishing
from long_runs import Curve

from tests.conftest import FULL

ROOT = Path(__file__).parents[1]
STUDIES = (
    bf16_moments, bf16_rounding, experts, fp8, gemm_accumulation, loss_scales, memory, optimizers, overflow, passes,
    regression, vanishing,
)  # fmt: skip
PAGE = run_all.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def _texts(tmp_path_factory):
    """Prepare the text of all small studies once."""
    texts = study.prepare_text(True, tmp_path_factory.mktemp("texts"))
    with mock.patch.object(study, "prepare_text", lambda small, folder: texts):
        yield


@pytest.fixture
def shows(tmp_path, monkeypatch):
    """Return a check that a study's tables are kept, with other numbers at full size, and that its figure is drawn."""
    return partial(_shows, tmp_path, monkeypatch)


def _shows(folder, monkeypatch, module, findings):
    assert _headings(_kept(module.__name__)) == _headings(module.text(findings)) != []
    assert f"](figures/{module.__name__}.txt)" in _section(module.__name__)
    if hasattr(module, "draw"):
        pytest.importorskip("matplotlib")
        monkeypatch.setattr(study, "FIGURES", folder)
        study.save_figure(module.__name__, lambda figure: module.draw(findings, figure))
        assert (folder / f"{module.__name__}.png").stat().st_size > 5_000
        assert (ROOT / f"docs/studies/figures/{module.__name__}.png").is_file()


def _kept(name):
    """Return what a study printed at full size."""
    return (run_all.FOLDER / f"figures/{name}.txt").read_text(encoding="utf-8")


def _section(name):
    """Return the page's text on a study."""
    return PAGE.partition(f"(`{name}`)\n")[2].partition("\n## ")[0]


def _headings(text):
    """Return the cells of each table's heading; every table is what `study.table` makes of its cells."""
    tables = [part.rstrip("\n") for part in text.split("\n\n") if re.search(r"^-+$", part, flags=re.MULTILINE)]
    headings = []
    for table in tables:
        heading, _, *rows = [re.split(" {2,}", line) for line in table.splitlines()]
        assert study.table(heading, rows) == table
        assert rows
        headings.append(heading)
    return headings


def _is_kept(module, shows):
    findings = module.measure()
    assert f"{module.text(findings)}\n" == _kept(module.__name__)
    shows(module, findings)


def test_halves_are_rounded_to_nearest_even_at_every_boundary(shows):
    findings = bf16_rounding.measure(small=True)
    for (dtype, rounding), by_class in findings.items():
        different, compared = (sum(counts) for counts in zip(*by_class.values(), strict=True))
        assert compared == 2**16 + 6 * {"BF16": 255 * 128, "FP16": 31 * 1024}[dtype]
        assert min(count for _, count in by_class.values()) > 0
        assert (different > 0) == rounding.startswith("cutting off"), (dtype, rounding)
    shows(bf16_rounding, findings)


def test_our_cpu_path_sums_in_fp32(shows):
    findings = gemm_accumulation.measure(small=True)
    for (_, inputs), by_length in findings.items():
        for k, errors in by_length.items():
            # One rounding hides what the order of an FP32 sum changes.
            assert errors.ours == pytest.approx(errors.fp32_sum_rounded, rel=0.01)
            assert errors.ours_is_best > 0.99
            assert errors.half_sum > (5 if k >= 128 else 3) * errors.ours
        if inputs == "zero mean":
            assert 0.4 < gemm_accumulation.growth(by_length, "half_sum") < 0.6
    shows(gemm_accumulation, findings)


def test_fp32_masters_converge_and_half_masters_stall(shows):
    findings = regression.measure(small=True)
    largest = float(regression.problem(torch.float32)[2].abs().max())
    assert 2 < largest < 4  # hence the spacing of halves there, twice their eps
    for name, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
        spacing = 2 * torch.finfo(dtype).eps
        engine, by_hand = findings[name, "FP32"], findings[name, name]
        assert max(engine.master_error[-100:]) < spacing / 2
        assert max(engine.copy_error[-100:]) < spacing
        assert regression.last_change(by_hand) < 300
        # Stuck where a step, 2 * LR / (1 - MOMENTUM) times the error, is less than half the spacing, and far off.
        assert 2 * regression.LR / (1 - regression.MOMENTUM) * by_hand.master_error[-1] < spacing / 2
        assert by_hand.master_error[-1] > 20 * max(engine.master_error[-100:])
    shows(regression, findings)


def test_every_gradient_of_a_run_is_counted_by_its_power_of_two(shows):
    findings = vanishing.measure(small=True)
    steps = len(findings.steps)
    assert sum(int(counts.sum()) for counts in findings.weights.values()) == steps * findings.num_params
    assert {*findings.weights} == {*findings.activations} - {"head"}  # whose weights are the embedding's
    for layer, counts in findings.activations.items():
        assert int(counts.sum()) == steps * findings.tokens * (300 if layer == "head" else 64)
    assert findings.losses[-1] < findings.losses[0]
    shows(vanishing, findings)


def test_every_loss_scale_that_can_train_reaches_the_loss_of_fp32(shows, monkeypatch):
    monkeypatch.setattr(overflow, "SMALL", (*overflow.SMALL, "training.steps=12"))
    findings = overflow.measure(small=True)
    runs = findings.runs
    ended = {name: run for name, run in runs.items() if run.history.valid_loss.values}
    assert {*runs} - {*ended} == {"static 2^20, requeue", "static 2^24, requeue"}
    # 20 in a row are too many; one more was in flight.
    assert {(run.applied, run.overflowed) for name, run in runs.items() if name not in ended} == {(0, 21)}
    for name, run in ended.items():
        assert run.applied == findings.steps
        assert (run.overflowed > 0) == name.startswith("dynamic"), name
        loss, reference = (each.history.valid_loss.values[-1] for each in (run, runs[overflow.REFERENCE]))
        other_data = name in ("FP32, another seed", "dynamic, skip")
        assert abs(loss - reference) < (0.1 if other_data else 0.005), name
    for name, run in runs.items():
        fate = overflow.StepOutcome.LOST if run.on_overflow == "skip" else overflow.StepOutcome.REQUEUED
        assert run.fates == dict.fromkeys(overflow.StepOutcome, 0) | {fate: run.overflowed}, name
    shows(overflow, findings)


@pytest.mark.skipif(not FULL, reason="--full: a study, trained again")
def test_moments_in_bf16_move_the_loss_less_than_another_seed(shows):
    findings = bf16_moments.measure(small=True)
    assert len({*map(tuple, findings.losses.values())}) == len(bf16_moments.WAYS)  # no two ways are one
    for way in findings.losses:
        # Of one seed the weights and samples are the same: what is left is rounding.
        assert abs(bf16_moments.difference(findings, way)) < bf16_moments.spread(findings, way) / 20
    shows(bf16_moments, findings)


@pytest.mark.skipif(not FULL, reason="--full: a study, trained again")
def test_headroom_overflows_in_under_a_fiftieth_of_a_percent_of_20_000_steps(shows):
    findings = loss_scales.measure(small=True)
    for world in ("drift", loss_scales.NOISY):
        outcome = findings.by_rule["headroom"][world]
        assert outcome.share < 0.0002
        assert 2 <= outcome.octaves_below < 6  # the price of it
    # Every other rule begins with overflows.
    assert {rule: by_world["fixed"].search for rule, by_world in findings.by_rule.items()} == {
        "headroom": 0, "dynamic": 9, "torch": 1, "MXNet": 2, "deepspeed": 2, "deepspeed, consecutive": 2,
        "megatron": 18,
    }  # fmt: skip
    shows(loss_scales, findings)


def test_a_rank_holds_the_formula_and_a_few_counters(shows):
    findings = memory.measure(small=True)
    assert {ranks for _, ranks in findings} == {1, 2}
    for (title, ranks), (formula, by_rank) in findings.items():
        assert len(by_rank) == ranks
        for held in by_rank:
            assert 0 <= memory.beyond_formula(formula, held) < 1024, (title, ranks)
    (by_hand,) = findings[memory.TEXTBOOK, 1][1]
    assert by_hand.peak >= 20 * by_hand.num_params  # with the FP32 copy of the gradient
    shows(memory, findings)


def test_every_optimizer_trains_and_its_tables_are_what_the_kept_runs_say(shows):
    small = optimizers.measure(small=True)
    ends = {run.way: curve.losses[-1] for run, curve in small.items()}
    assert [*ends] == [*optimizers.WAYS]
    assert all(curve.losses[-1] < curve.losses[0] for curve in small.values())
    assert ends["Muon"] != ends["Muon, one scale"]
    assert optimizers.text(small).count("small, ") == 2 * len(ends)
    _is_kept(optimizers, shows)


def test_a_mixture_trains_as_the_dense_model_does_and_its_tables_are_what_the_kept_runs_say(shows):
    small = experts.measure(small=True)
    assert [run.way for run in small] == [*experts.WAYS]
    assert all(curve.losses[-1] < curve.losses[0] for curve in small.values())
    assert [curve.load is None for curve in small.values()] == [False, True]
    _is_kept(experts, shows)


def test_each_recipe_of_fp8_trains_and_its_tables_are_what_the_kept_runs_say(shows):
    small = fp8.measure(small=True)
    assert [run.way for run in small] == [*fp8.WAYS]
    assert all(curve.losses[-1] < curve.losses[0] for curve in small.values())
    assert len({tuple(curve.losses) for curve in small.values()}) == len(fp8.WAYS)
    _is_kept(fp8, shows)


def test_a_grid_goes_on_until_its_best_lies_inside_then_come_the_seeds():
    def trained(best):
        curves = {}
        while runs := optimizers.PLAN.missing(curves, "2 M", "AdamW"):
            curves[runs[0]] = Curve([1], [max(runs[0].lr / best, best / runs[0].lr)])
        return [(run.lr, run.seed) for run in sorted(curves)]

    inside = [(lr, 1) for lr in (1e-3, 2e-3, 4e-3, 8e-3)]
    assert trained(4e-3) == sorted([*inside, (4e-3, 2), (4e-3, 3)])
    assert trained(1e-3) == sorted([(5e-4, 1), *inside, (1e-3, 2), (1e-3, 3)])
    assert trained(32e-3) == sorted([*inside, (16e-3, 1), (32e-3, 1), (64e-3, 1), (32e-3, 2), (32e-3, 3)])


def test_passes_are_summed_by_what_a_step_needs(shows):
    findings = passes.measure(small=True)
    sums = {timing.way: timing for timing in passes.sums(findings.timings)}
    assert [timing.num_bytes for timing in sums.values()] == [64, 60, 30]
    by_hand = [timing for timing in findings.timings if timing.way == passes.BY_HAND]
    assert sums[passes.BY_HAND].seconds[1] == sum(timing.seconds[1] for timing in by_hand)
    shows(passes, findings)


def test_every_study_has_a_test_and_a_place_on_the_page():
    scripts = {path.stem for path in (ROOT / "docs/studies").glob("*.py")} - {"study", "long_runs", "run_all"}
    assert scripts == {module.__name__ for module in STUDIES} == {*run_all.studies()}


def test_the_summary_has_no_number_that_its_study_does_not_show():
    summary = (ROOT / "docs/numerics.md").read_text(encoding="utf-8").partition("## What the literature claims")[2]
    rows = re.findall(r"^\| .* \| .* \| (.*) \| \[(\w+)\]\(studies/README.md#\S+\) \|$", summary, flags=re.MULTILINE)
    assert {name for _, name in rows} == {module.__name__ for module in STUDIES}
    for found, name in rows:
        assert set(_numbers(found)) - set(_numbers(_section(name) + _kept(name))) == set(), name


def test_the_page_s_tables_have_no_number_that_their_study_does_not_show():
    for name in run_all.studies():
        rows = re.findall(r"^\|.*", _section(name), flags=re.MULTILINE)
        assert set(_numbers("\n".join(rows))) - set(_numbers(_kept(name))) == set(), name


def _numbers(text):
    return re.findall(r"\d+(?:[.,]\d+)*", text)


def test_a_study_runs_from_its_command(monkeypatch, capsys):
    script = "docs/studies/bf16_rounding.py"
    monkeypatch.setattr(sys, "argv", [script, "--small"])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert capsys.readouterr().out == bf16_rounding.text(bf16_rounding.measure(small=True)) + "\n"
