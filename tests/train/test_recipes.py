"""Each recipe of docs/recipes.md, shrunken to a few layers, is accepted by the check and by `plan`, and trains on two
ranks; its sizes on the page are those of its file.
"""

import json
import re
from pathlib import Path

import pytest

from megamix.cli import main
from megamix.config import config_to_toml, load_config
from megamix.model.family import parameter_count
from tests.builders import VOCAB, run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
_EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24}
ROWS = {row[1]: row for row in re.findall(r"^\| ([\w -]+) \| \[([\w.-]+)\]\(.*?\) \| (.*) \|$", PAGE, re.MULTILINE)}


def _shrunken(name, folder, data):
    """Return the recipe with small numbers in place of its own; everything else stays."""
    path = str(ROOT / "configs" / name)
    whole = load_config(path)
    model, training, parallel = whole.model, whole.training, whole.parallelism
    ramp = [[2 * number, 4 * 2**number] for number in range(len(training.batch_ramp))]
    small = {
        "model.vocab_size": VOCAB,
        "model.seq_len": 32,
        "model.hidden_size": 32,
        "model.num_heads": 4,
        "model.num_layers": len(model.windows) or 2,
        "model.ffn_hidden_size": 48,
        "model.compile": False,
        "data.train": str(data / "train"),
        "data.valid": str(data / "valid"),
        "optimizer.compile": False,
        "optimizer.lr": min(whole.optimizer.lr, 2e-3),  # the speed run's is for its width
        "lr_schedule.warmup_steps": min(2, whole.lr_schedule.warmup_steps),
        "training.steps": 6,
        "training.micro_batch_size": 2,
        "training.global_batch_size": ramp[-1][1] if ramp else 8,
        "training.batch_ramp": ramp,
        "training.eval_interval": 3,
        "training.eval_batches": 1,
        "parallelism.cp_size": min(2, parallel.cp_size),
        "parallelism.ep_size": min(2, parallel.ep_size),
        "checkpoint.folder": str(folder / "run"),
        "metrics.log_interval": 1,
        "metrics.tensorboard": False,
    }
    if model.num_kv_heads is not None:
        small["model.num_kv_heads"] = 4 * model.num_kv_heads // model.num_heads
    if model.windows:
        small["model.windows"] = [min(window, 8) for window in model.windows]
    if model.experts is not None:
        small |= {f"model.experts.{key}": size for key, size in _EXPERTS.items()}
    if whole.lr_schedule.decay_steps is not None:
        small["lr_schedule.decay_steps"] = 3
    if whole.optimizer.schedules.momentum is not None:
        small["optimizer.schedules.momentum.warmup_steps"] = 2
    return load_config(path, [f"{key}={json.dumps(value)}" for key, value in small.items()])


def _train(config):
    run_on_ranks(config)


def test_the_page_has_five_recipes():
    assert len(ROWS) == 5


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_is_checked_planned_and_trained_at_a_small_size(run_ranks, tmp_path, data, capsys, monkeypatch, name):
    config = _shrunken(name, tmp_path, data)
    job = tmp_path / "job.toml"
    job.write_text(config_to_toml(config))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(job), "--check"]) == 0
    monkeypatch.delenv("WORLD_SIZE")
    assert main(["plan", str(job), "--world", "2", "--device", "cpu"]) == 0
    assert "the most at once" in capsys.readouterr().out
    run_ranks(_train, 2, config)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ROWS)
def test_the_sizes_on_the_page_are_those_of_the_file(name):
    config = load_config(str(ROOT / "configs" / name))
    cells = ROWS[name][2].split(" | ")
    told = re.match(r"([\d.]+) ([MB])", cells[0])
    assert told is not None
    count = float(told[1]) * {"M": 1e6, "B": 1e9}[told[2]]
    assert parameter_count(config.model) == pytest.approx(count, rel=0.03)
    assert cells[1] == f"{config.model.seq_len:,}"
    ramp = [(0, config.training.global_batch_size)] if not config.training.batch_ramp else config.training.batch_ramp
    ends = [start for start, _ in ramp[1:]] + [config.training.steps]
    sequences = sum((end - start) * size for (start, size), end in zip(ramp, ends, strict=True))
    assert sequences * config.model.seq_len == pytest.approx(float(cells[2]), rel=0.03)
