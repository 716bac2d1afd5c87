"""Each recipe of docs/recipes.md, shrunken to a few layers, is accepted by the check and by `plan`, and trains on two
ranks; its sizes on the page are those of its file.
"""

import json
import re
from pathlib import Path

import pytest

from megamix.cli.verbs import main
from megamix.config import load_config, ranks_along
from megamix.model.family import parameter_count
from tests.builders import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
# Small numbers in place of a recipe's own; everything else stays.
SIZES = ["vocab_size=64", "seq_len=32", "hidden_size=32", "num_heads=4", "ffn_hidden_size=48", "compile=false"]
TRAINING = ["steps=6", "micro_batch_size=2", "eval_interval=3", "eval_batches=1"]
METRICS = ["optimizer.compile=false", "metrics.log_interval=1", "metrics.tensorboard=false"]
SMALL = [*(f"model.{size}" for size in SIZES), *(f"training.{size}" for size in TRAINING), *METRICS]
EXPERTS = ["model.experts.num_experts=8", "model.experts.top_k=2", "model.experts.ffn_hidden_size=24"]
ROWS = {row[1]: row for row in re.findall(r"^\| ([\w -]+) \| \[([\w.-]+)\]\(.*?\) \| (.*) \|$", PAGE, re.MULTILINE)}


def _shrunken(name, folder, data):
    path = str(ROOT / "configs" / name)
    whole = load_config(path)
    model, training, parallel = whole.model, whole.training, whole.parallelism
    ramp = [[2 * number, 4 * 2**number] for number in range(len(training.batch_ramp))]
    small = {
        "model.num_layers": len(model.window.sizes) if model.window else 2,
        "data.train": str(data / "train"),
        "data.valid": str(data / "valid"),
        "optimizer.lr": min(whole.optimizer.lr, 2e-3),  # the speed run's is for its width
        "lr_schedule.warmup_steps": min(2, whole.lr_schedule.warmup_steps),
        "training.global_batch_size": ramp[-1][1] if ramp else 4,
        "training.batch_ramp": ramp,
        "parallelism.context.size": min(2, ranks_along(parallel, "cp")),
        "parallelism.expert.size": min(2, ranks_along(parallel, "ep")),
        "checkpoint.folder": str(folder / "run"),
    }
    if model.num_kv_heads is not None:
        small["model.num_kv_heads"] = 4 * model.num_kv_heads // model.num_heads
    if model.window:
        small["model.window.sizes"] = [min(size, 8) for size in model.window.sizes]
    if whole.lr_schedule.decay_steps is not None:
        small["lr_schedule.decay_steps"] = 3
    if whole.optimizer.schedules.momentum is not None:
        small["optimizer.schedules.momentum.warmup_steps"] = 2
    changes = [f"{key}={json.dumps(value)}" for key, value in small.items()]
    return load_config(path, [*SMALL, *(EXPERTS if model.experts is not None else ()), *changes])


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_is_checked_planned_and_trained_at_a_small_size(run_ranks, tmp_path, data, capsys, monkeypatch, name):
    config = _shrunken(name, tmp_path, data)
    job = tmp_path / "job.toml"
    job.write_text(config.text)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(job), "--check"]) == 0
    monkeypatch.delenv("WORLD_SIZE")
    assert main(["plan", str(job), "--world", "2", "--device", "cpu"]) == 0
    assert "the most at once" in capsys.readouterr().out
    run_ranks(run_on_ranks, 2, config)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ROWS)
def test_the_sizes_on_the_page_are_those_of_the_file(name):
    assert len(ROWS) == 5
    config = load_config(str(ROOT / "configs" / name))
    cells = ROWS[name][2].split(" | ")
    size, unit = re.match(r"([\d.]+) ([MB])", cells[0]).groups()
    count = float(size) * {"M": 1e6, "B": 1e9}[unit]
    assert parameter_count(config.model) == pytest.approx(count, rel=0.03)
    assert cells[1] == f"{config.model.seq_len:,}"
    ramp = config.training.batch_ramp or [(0, config.training.global_batch_size)]
    ends = [start for start, _ in ramp[1:]] + [config.training.steps]
    sequences = sum((end - start) * size for (start, size), end in zip(ramp, ends, strict=True))
    assert sequences * config.model.seq_len == pytest.approx(float(cells[2]), rel=0.03)
