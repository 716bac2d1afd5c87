"""`megamix plot` draws what metrics.jsonl says, and names what is missing with its fix."""

from __future__ import annotations

import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megamix.cli import main
from megamix.train.metrics import LayerPrecision, MetricsWriter
from megamix.train.plot import HeatMap, Series, figures, read_history

NUMBERS = ["zero_share", "subnormal_share", "below_share", "unscaled_subnormal_share", "unscaled_below_share"]
NUMBERS += ["headroom", "hidden_update_share"]


def layer(number: float, headroom: float = 3.0) -> LayerPrecision:
    return LayerPrecision(
        zero_share=0.0,
        subnormal_share=0.5,
        below_share=0.0,
        unscaled_subnormal_share=0.75,
        unscaled_below_share=number,
        headroom=headroom,
        hidden_update_share=2 * number,
        exponents=(1,) * 58,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An FP16 run with two overflows, two validations and two examined steps, the second of them an overflow."""
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss_scale": 2.0**24, "skipped_steps": 1})
        writer.write(10, {"loss": 7.0, "loss_scale": 2.0**23, "skipped_steps": 1})
        writer.write_precision(10, {"embedding": layer(0.01), "blocks.0": layer(0.02)})
        writer.write(10, {"valid_loss": 6.5})
        writer.write(20, {"loss": math.nan, "loss_scale": 2.0**23, "skipped_steps": 2})
        writer.write_precision(20, {"embedding": layer(0.03), "blocks.0": layer(0.04, headroom=-math.inf)})
        writer.write(30, {"loss": 5.0, "loss_scale": 2.0**22, "skipped_steps": 2})
        writer.write(30, {"valid_loss": 5.5})
    return tmp_path


def test_every_row_finds_its_place(run: Path) -> None:
    history = read_history(run)
    assert history.loss == Series([10, 30], [7.0, 5.0])
    assert history.valid_loss == Series([10, 30], [6.5, 5.5])
    assert history.loss_scale == Series([1, 10, 20, 30], [2.0**24, 2.0**23, 2.0**23, 2.0**22])
    assert history.overflows == Series([1, 20], [2.0**24, 2.0**23])
    assert [*history.precision] == NUMBERS
    assert history.precision["unscaled_below_share"] == HeatMap(
        ["embedding", "blocks.0"], [10, 20], [[0.01, 0.03], [0.02, 0.04]]
    )
    headroom = history.precision["headroom"].values
    assert (headroom[0], headroom[1][0]) == ([3.0, 3.0], 3.0)
    assert math.isnan(headroom[1][1])


def test_what_is_drawn_is_what_was_read(run: Path) -> None:
    history = read_history(run)
    drawn = figures(history)
    training, validation = drawn["loss"].axes[0].lines
    assert training.get_xydata().tolist() == [[10, 7.0], [30, 5.0]]
    assert validation.get_xydata().tolist() == [[10, 6.5], [30, 5.5]]
    scale, overflows = drawn["loss_scale"].axes[0].lines
    assert scale.get_ydata().tolist() == history.loss_scale.values
    assert overflows.get_xydata().tolist() == [[1, 2.0**24], [20, 2.0**23]]
    for name, factor in (("unscaled_below_share", 100), ("headroom", 1), ("hidden_update_share", 100)):
        axes = drawn[name].axes[0]
        (mesh,) = axes.collections
        flat = [factor * value for values in history.precision[name].values for value in values]
        assert mesh.get_array().filled(math.nan).flatten().tolist() == pytest.approx(flat, nan_ok=True)
        assert [label.get_text() for label in axes.get_yticklabels()] == ["embedding", "blocks.0"]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "20"]


def _png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_the_command_leaves_pngs_in_the_run_s_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(run)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written] == [
        f"{name}.png" for name in ("loss", "loss_scale", "unscaled_below_share", "headroom", "hidden_update_share")
    ]
    assert _png_size(run / "loss.png") == _png_size(run / "loss_scale.png") == (1080, 540)
    assert _png_size(run / "headroom.png") == (1080, 300)


def test_a_run_without_scale_and_examined_steps_is_drawn_as_far_as_it_goes(tmp_path: Path, capsys) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(3, {"loss_scale": 1.0, "skipped_steps": 1})  # an overflow in BF16
        writer.write(10, {"loss": 7.0, "loss_scale": None, "skipped_steps": 1})
    assert main(["plot", str(tmp_path)]) == 0
    loss, scale, maps = capsys.readouterr().out.splitlines()
    assert loss == str(tmp_path / "loss.png")
    assert scale == "no loss_scale.png: this run has no loss scale"
    assert maps.startswith("no heat maps: ")
    assert "metrics.precision_interval" in maps
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["loss.png"]


def test_a_last_line_that_is_still_being_written_is_left_out(run: Path) -> None:
    whole = read_history(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/lo')
    assert str(read_history(run)) == str(whole)  # a NaN in it is not equal to itself


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "has no metrics.jsonl; give the folder of a run"),
        ("", "holds no complete line yet"),
        ('{"step"', "holds no complete line yet"),
        ('{"step": 1}\n{"st\n{"step": 3}\n', "line 2 of .* is damaged, no object with a step; delete that line"),
        ('{"step": 1}\n[2]\n', "line 2 of .* is damaged"),
        ('{"loss": 1}\n', "line 1 of .* is damaged"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, capsys, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["plot", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error)
    assert error.startswith("megamix plot: flags: 1 problem\n  RUN: ")
    assert not list(tmp_path.glob("*.png"))


def test_matplotlib_that_is_not_installed_is_answered_with_the_pip_line(run: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plot", str(run)]) == 2
    assert "matplotlib is not installed; run pip install 'megamix[plot]'" in capsys.readouterr().err


def test_plotting_needs_no_torch_and_no_screen(run: Path) -> None:
    code = f"import sys; from megamix.cli import main; status = main(['plot', {str(run)!r}]); "
    code += "print(status, 'torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3:] == ["0", "False", "False"]
