"""`megamix plot` draws the values of metrics.jsonl, of one run or of several in one picture, with units. A folder with
nothing to draw is named with its fix.
"""

import math
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megamix.cli.verbs import main
from megamix.log.history import read_history
from megamix.log.metrics import MetricsWriter, load_tags
from megamix.log.report.plot import figures
from tests.log.test_metrics import LAYER


def layer(number, headroom=3.0):
    return replace(LAYER, unscaled_below_share=number, headroom=headroom, hidden_update_share=2 * number)


def _write_run(folder):
    """Write an FP16 run with two overflows, two validations and two examined steps, the second of them an overflow."""
    with MetricsWriter(folder, tensorboard=False) as writer:
        writer.write(1, {"loss_scale": 2.0**24, "skipped_steps": 1})
        rates = {"lr": 0.25, "grad_norm": 2.0, "tokens_per_s": 1000.0}
        writer.write(10, {"loss": 7.0, "loss_scale": 2.0**23, "skipped_steps": 1, **rates})
        writer.write_precision(10, {"embedding": layer(0.01), "blocks.0": layer(0.02)})
        writer.write(10, {"valid_loss": 6.5})
        writer.write(13, {"loss_scale": 2.0**23, "skipped_steps": 2})
        writer.write(20, {"loss": math.nan, "loss_scale": 2.0**22, "skipped_steps": 2})
        writer.write_precision(20, {"embedding": layer(0.03), "blocks.0": layer(0.04, headroom=-math.inf)})
        writer.write(30, {"loss": 5.0, "loss_scale": 2.0**22, "skipped_steps": 2})
        writer.write(30, {"valid_loss": 5.5})
    return folder


@pytest.fixture
def run(tmp_path):
    return _write_run(tmp_path / "mine")


@pytest.fixture
def drawn(monkeypatch):
    """Return the figures that are saved from now on."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **keys: figures.append(figure))
    return figures


def test_the_load_of_experts_is_drawn_of_the_last_counts(run):
    assert read_history(run).loads == {}
    counts = {"blocks.0": [0.0, 2.0], "blocks.1": [3.0, 1.0, 1.0, 3.0]}
    with MetricsWriter(run, tensorboard=False) as writer:
        writer.write(40, {"loss": 4.0}, load_tags({"blocks.0": [1.0, 1.0]}, detailed=True))
        writer.write(50, {"loss": 4.0}, load_tags(counts, detailed=True))
        writer.write(60, {"loss": 4.0}, load_tags(counts, detailed=False))
    ((step, loads),) = read_history(run).loads.items()
    assert (step, loads.layers, loads.columns) == (50, ["blocks.0", "blocks.1"], [0, 1, 2, 3])
    axes, bar = figures(read_history(run))["load"].axes
    assert (axes.get_xlabel(), bar.get_ylabel()) == ("expert", "times the layer's mean")
    (mesh,) = axes.collections
    want = [0.0, 2.0, math.nan, math.nan, 1.5, 0.5, 0.5, 1.5]
    assert mesh.get_array().filled(math.nan).flatten().tolist() == pytest.approx(want, nan_ok=True)


def _points(line):
    return [tuple(point) for point in line.get_xydata().tolist()]


def test_every_row_is_drawn_in_its_place(run):
    drawn = figures(read_history(run))
    curves = {axes.get_title(loc="left"): _points(axes.lines[0]) for axes in drawn["curves"].axes}
    assert curves == {"learning rate": [(10, 0.25)], "gradient norm": [(10, 2)], "tokens/s": [(10, 1e3)]}
    training, validation = drawn["loss"].axes[0].lines
    assert _points(training) == [(10, 7.0), (30, 5.0)]
    assert _points(validation) == [(10, 6.5), (30, 5.5)]
    scale, overflows = drawn["loss"].axes[1].lines
    assert _points(scale) == [(1, 2.0**24), (10, 2.0**23), (13, 2.0**23), (20, 2.0**22), (30, 2.0**22)]
    assert scale.get_drawstyle() == "steps-pre"  # it falls at the overflow, not at the next line of the log
    assert _points(overflows) == [(1, 2.0**24), (13, 2.0**23)]
    maps, bars = drawn["range"].axes[:3], drawn["range"].axes[3:]
    assert [bar.get_ylabel() for bar in bars] == ["% of elements", "octaves", "% of updates"]
    # By layer and step: the share below FP16's numbers, headroom, and hidden updates.
    for axes, values in zip(maps, ([1, 3, 2, 4], [3, 3, 3, math.nan], [2, 6, 4, 8]), strict=True):
        (mesh,) = axes.collections
        assert mesh.get_array().filled(math.nan).flatten().tolist() == pytest.approx(values, nan_ok=True)
        assert [label.get_text() for label in axes.get_yticklabels()] == ["embedding", "blocks.0"]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "20"]


def _legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_step_from_which_the_run_went_on_is_a_line_in_each_panel(run):
    with MetricsWriter(run, tensorboard=False, applied=30) as writer:
        writer.write(40, {"loss": 4.0, "loss_scale": 2.0**22, "skipped_steps": 2})
    drawn = figures(read_history(run))
    for axes in (drawn["loss"].axes[0], *drawn["curves"].axes):
        (line,) = (line for line in axes.lines if line.get_linestyle() == ":")
        assert [*line.get_xdata()] == [30, 30]
    assert _legend(drawn["loss"].axes[0]) == ["training", "validation", "resumed"]


def test_no_heat_map_of_one_column_and_nothing_that_is_not_there_is_drawn(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(3, {"loss_scale": 1.0, "skipped_steps": 1})  # an overflow in BF16, without a scale
        writer.write(10, {"loss": 7.0, "loss_scale": None, "skipped_steps": 1})
        writer.write_precision(10, {"embedding": layer(0.01)})
    drawn = figures(read_history(tmp_path))
    assert [*drawn] == ["loss", "curves"]
    (axes,) = drawn["loss"].axes
    assert _legend(axes) == ["training"]


def test_communication_is_drawn_of_a_profiled_attempt_whose_gathers_are_beside_the_next(run):
    assert "communication" not in figures(read_history(run))
    kinds = ("reduce_scatter", "all_gather")
    with MetricsWriter(run, tensorboard=False) as writer:
        for attempt, bucket in ((3, 0), (4, 0), (4, 1), (5, 0)):
            row = {"communication/attempt": attempt, "communication/bucket": bucket}
            for kind in kinds:
                times = {"launched_s": 0.5, "landed_s": 0.75 + bucket, "needed_s": 0.625, "waited_s": 0.125}
                row |= {f"communication/{kind}/{name}": s for name, s in times.items()}
            writer.append(4, row)
    (axes,) = figures(read_history(run))["communication"].axes
    assert axes.get_title(loc="left") == "communication of attempt 4"
    assert len(axes.patches) == 2 * 2 * 2
    bars = {(bar.get_x(), bar.get_width()) for bar in axes.patches}
    assert bars == {(500.0, 250.0), (500.0, 1250.0), (625.0, 125.0)}
    assert "waited for all-gather: 250.0 ms" in _legend(axes)


def test_the_command_leaves_pngs_in_the_run_s_folder(run, capsys):
    assert main(["plot", str(run)]) == 0
    written = [*map(Path, capsys.readouterr().out.splitlines())]
    assert written == [run / f"{name}.png" for name in ("loss", "curves", "range")]
    assert struct.unpack(">II", (run / "loss.png").read_bytes()[16:24]) == (1104, 403)


def test_several_runs_are_drawn_in_one_picture_and_one_that_is_given_twice_once(run, tmp_path, capsys, drawn):
    other, alike = _write_run(tmp_path / "other"), _write_run(tmp_path / "elsewhere/mine")
    for runs, names in (((run, other), ["mine", "other"]), ((run, alike), [str(run), str(alike)])):
        assert main(["plot", *map(str, runs)]) == 0
        assert capsys.readouterr().out == f"{run / 'compared.png'}\n"
        for axes in drawn.pop().axes:
            lines = [line for line in axes.lines if line.get_linestyle() != "None"]
            assert [line.get_label() for line in lines] == names
            assert len({line.get_color() for line in lines}) == 2
    assert main(["plot", str(run), f"{run}/../{run.name}"]) == 0
    assert "compared" not in capsys.readouterr().out


def test_names_that_matplotlib_reads_otherwise_are_shown(tmp_path, drawn):
    assert main(["plot", *(str(_write_run(tmp_path / name)) for name in ("$a_$", "_b"))]) == 0
    assert _legend(drawn[0].axes[0]) == [r"\$a_\$", "validation", "\u200b_b"]


@pytest.mark.parametrize("line", ['{"step": 40, "train/lo', "[2]", '{"train/loss": 1}'])
def test_a_line_that_no_run_has_written_whole_is_left_out(run, line):
    whole = read_history(run)
    rows = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(f"{line}\n{rows}{line}")
    assert str(read_history(run)) == str(whole)  # compared as text, for NaN is not equal to itself


@pytest.mark.parametrize("text", [None, "", '{"step": 1, "train/loss": null}\n'])
def test_what_cannot_be_drawn_is_named(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["plot", str(tmp_path)]) == 2
    words = f"RUN: no loss in {tmp_path / 'metrics.jsonl'}; give the folder of a run that has logged a step"
    assert capsys.readouterr().err == f"megamix plot: {words}\n"
    assert not list(tmp_path.glob("*.png"))


def test_matplotlib_that_is_not_installed_is_answered_with_the_pip_line(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(run)]) == 2
    told = "package 'matplotlib' is not installed; run pip install -e '.[plot]' in the checkout"
    assert told in capsys.readouterr().err
