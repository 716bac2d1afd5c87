"""`plan --gpus` finds layouts that fit: its filter never drops one that the traced plan takes, and the table's settings
are those of a job that starts.
"""

import json
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest

from megamix.cli.verbs import main
from megamix.config import FirstLayers, check_world_size, load_config, resized
from megamix.config.checks import check_config
from megamix.tools.plan.layout_picture import draw
from megamix.tools.plan.layout_report import fastest, why_none
from megamix.tools.plan.layouts import LayoutSearch
from megamix.tools.plan.least_memory import LeastMemory
from megamix.tools.plan.limits import RESERVED
from megamix.tools.plan.memory_plan import plan_memory
from megamix.tools.plan.time_constants import fitted_constants
from megamix.tools.plan.time_hardware import load_hardware
from tests.conftest import FULL

CONFIGS = Path(__file__).parents[3] / "configs"
HARDWARE, CONSTANTS = load_hardware("h100-sxm"), fitted_constants()
SMALL = [str(CONFIGS / "gpt2-124m.toml"), "model.num_layers=4"]


def search(config, limit=int(HARDWARE.memory_bytes) - RESERVED):
    return LayoutSearch(config, HARDWARE, CONSTANTS, limit)


NAMES = ["gpt2-124m", "llama3.2-1b", "qwen3-0.6b", "qwen3-30b-a3b", "gemma3-270m", "llama3.1-8b"]
MODEL = {"num_layers": [4, 8, 12], "seq_len": [256, 1024, 4096], "compile": [True, False], "window": [None]}
PARALLELISM = {
    "tp": [1, 1, 2, 4],
    "pp": [1, 1, 2, 4],
    "cp": [1, 1, 2],
    "ep": [1, 2, 4],
    "shard": ["states", "gradients", "parameters"],
    "accumulate": ["local", "owner"],
    "sequence_parallel": [True, False],
    "schedule": ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"],
}


def drawn(rng):
    """Draw a job that the configuration's checks take, and the size of its dp."""
    while True:
        config = load_config(CONFIGS / f"{rng.choice(NAMES)}.toml")
        size, dp, count = rng.choice([1, 2, 4]), rng.choice([1, 2, 8, 64]), rng.choice([1, 2, 4, 8])
        model, parallelism = (
            {key: rng.choice(values) for key, values in table.items()} for table in (MODEL, PARALLELISM)
        )
        some = FirstLayers(full=rng.randint(1, model["num_layers"]))
        model["recompute"] = rng.choice(["none", "selective", "full", some])
        if config.model.experts is None:
            parallelism["ep"] = 1
        training = {"micro_batch_size": size, "global_batch_size": size * dp * count, "batch_ramp": ()}
        sizes = {axis: parallelism.pop(axis) for axis in ("tp", "pp", "cp", "ep")}
        keys = resized(config.parallelism, **sizes)
        for table, key in (("tensor", "sequence_parallel"), ("pipeline", "schedule")):
            value = parallelism.pop(key)
            keys[table] = keys[table] and keys[table].model_copy(update={key: value})
        config = config.with_keys(model=model, parallelism=parallelism | keys, training=training)
        others = sizes["tp"] * sizes["pp"] * sizes["cp"]
        if not check_config(config) and not check_world_size(config, dp * others):
            return config, dp


@pytest.mark.parametrize("seed", range(100 if FULL else 6))
def test_the_filter_drops_nothing_that_the_trace_takes(seed):
    config, dp = drawn(random.Random(seed))
    assert LeastMemory(config, dp).peak() <= plan_memory(config, dp, "gpu").peak


def test_layouts_fit_and_come_in_the_order_of_their_time():
    limit = 2 * 2**30
    config = load_config(SMALL[0], SMALL[1:])
    found = [*fastest(search(config, limit), 8, 3)]
    seconds = [layout.time.seconds for layout, _ in found]
    assert seconds == sorted(seconds)
    for layout, peak in found:
        assert not check_config(layout.config)
        assert not check_world_size(layout.config, 8)
        assert plan_memory(layout.config, layout.job.dp, "gpu").peak == peak <= limit


def test_the_table_has_a_row_a_layout_and_settings_that_make_the_first_one(tmp_path, capsys):
    assert main(["plan", *SMALL, "--gpus", "8"]) == 0
    titles, *rows, predicted, said = capsys.readouterr().out.splitlines()
    assert predicted == "times are predicted; no GPU has run megamix yet (docs/planning.md)"
    assert " ".join(titles.split()) == "GPUs memory step tokens/s MFU exposed days GPU-hours band layout"
    assert len(rows) == 5
    assert all(re.search(r"; \+\d+\.\d% by (more|slower|a longer) ", row) for row in rows[1:])
    settings = said.removeprefix("the first row as settings: ").split()
    assert check_world_size(load_config(SMALL[0], [*SMALL[1:], *settings]), 8) == []
    plot = tmp_path / "plan.svg"
    assert main(["plan", *SMALL, "--gpus", "8..16", "--json", "--plot", str(plot)]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert [*layouts] == ["8", "16"]
    best = layouts["8"][0]
    assert best["settings"] == settings
    assert sum(best["parts_s"].values()) == pytest.approx(best["step_s"])
    assert best["days"] == pytest.approx(best["gpu_hours"] / 8 / 24)
    assert b"<svg" in plot.read_bytes()
    (axes,) = draw("", [found[0] for found in layouts.values()]).axes
    bars = defaultdict(float)  # length of each row's bar
    for box in axes.patches:
        bars[box.get_y()] += box.get_width()
    costs = [1e6 / found[0]["tokens_per_s"] for found in layouts.values()]
    assert [*bars.values()] == pytest.approx(costs)


def test_numbers_of_gpus_without_a_layout_say_why():
    config = load_config(SMALL[0], SMALL[1:])
    said = why_none(search(config.with_keys(training={"global_batch_size": 12})), 1024)
    assert said.startswith("training.global_batch_size: got 12, which no layout of 1024 GPUs divides; take fewer GPUs")
    said = why_none(search(load_config("configs/quickstart_moe.toml")), 64)  # its checks refuse all that would fit
    assert said.startswith("no layout is a job that would start; take fewer GPUs; of the fastest: parallelism.")


def refused(capsys, *flags):
    """Return what is said of a job's flags."""
    assert main(["plan", *SMALL, *flags]) == 2
    return capsys.readouterr().err


def test_a_run_of_ones_own_narrows_the_band_and_another_is_refused(tmp_path, capsys):
    config, events, metrics = (tmp_path / name for name in ("config.toml", "journal.jsonl", "metrics.jsonl"))
    flags = ["--gpus", "8", "--calibrate", str(metrics)]
    plain = f'base = "{SMALL[0]}"\nmodel.num_layers = 4\n'
    config.write_text(plain)
    start = {"t": 1.0, "at": 0.0, "starts": 1, "step": 0, "tokens": 0, "kind": "start", "phase": "start"}
    start |= {"seconds": {}, "ranks": 8}
    events.write_text(f"\n{json.dumps(start)}\n")
    rate = {"throughput/tokens_per_s": 4.8e6}
    metrics.write_text(f"{json.dumps(rate | {'time_share/forward_backward': 0.88})}\n" * 3)
    assert main(["plan", *SMALL, *flags]) == 0
    said = re.search(r"the first row's band goes from ([\d.]+)% to ([\d.]+)%", capsys.readouterr().out)
    assert float(said[2]) < float(said[1])
    config.write_text(f"{plain}training.batch_ramp = [[0, 256], [10, 512]]\n")
    assert "whose steps grew by a batch_ramp; name a run of equal steps" in refused(capsys, *flags)
    config.write_text(plain)
    metrics.write_text(f"{json.dumps(rate)}\n" * 3)
    assert "has a line that is no row of a run's metrics; name the metrics.jsonl" in refused(capsys, *flags)
    config.unlink()
    assert "config.toml, there is no such file" in refused(capsys, *flags)
    events.write_text(f"\n{json.dumps(start)}\n{json.dumps(start | {'ranks': 4})}\n")
    assert "the starts had [8, 4] ranks, but one number is needed; name a run's own" in refused(capsys, *flags)
    events.unlink()
    assert "the starts had no ranks, but one number is needed; name a run's own" in refused(capsys, *flags)


@pytest.mark.parametrize("text", ["hello", "[1]", '{"check": 1}', '{"fit": true}'])
def test_rates_are_what_doctor_prints(text, tmp_path, capsys):
    (tmp_path / "rates.json").write_text(text)
    said = refused(capsys, "--gpus", "8", "--rates", str(tmp_path / "rates.json"))
    assert re.search(r"--rates: got \S+rates.json, .*; on that machine run megamix doctor --json > FILE", said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--gpus 8 --world 8", "--world: got it with --gpus; leave it out"),
        ("--hardware h200", "--hardware: got it without --gpus; write --gpus 8..1024 beside it"),
        ("--gpus 8 --hardware h101", 'hardware: got "h101", known are a100, b200, '),
        ("precision.fp8.recipe=tensorwise --gpus 8 --hardware a100", "a100 has no products in FP8"),
    ],
)
def test_wrong_flags_are_named(flags, said, capsys):
    assert said in refused(capsys, *flags.split())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "0"], "--gpus: got '0', must be a number from 1 to 16384"),
        (["--gpus", "9..15"], "two of them with a power of two between them; write --gpus 8..1024"),
        (["--gpus", "8", "--memory", "many"], "--memory: got 'many'"),
    ],
)
def test_what_is_no_size_and_no_number_is_named(flags, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *SMALL, *flags])
    assert said in capsys.readouterr().err


def test_a_number_without_a_layout_fails(capsys):
    assert main(["plan", *SMALL, "--gpus", "8", "--memory", "1MiB"]) == 1
    assert "no layout fits 0.0 GiB; take more GPUs" in capsys.readouterr().out
