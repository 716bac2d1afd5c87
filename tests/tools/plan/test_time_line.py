"""A run on a known GPU logs its step's planned and measured time; elsewhere it says nothing."""

import re
from pathlib import Path

import pytest
import torch

from megamix.config import load_config
from megamix.model.sizes import dense_peak
from megamix.report.journal import read_rows
from megamix.supervise.console import Console
from megamix.tools.plan.time_hardware import hardware_of
from megamix.tools.plan.time_line import time_line
from megamix.train.job import run_job
from tests.builders import tiny_job, write_data

CONFIG = load_config(Path(__file__).parents[3] / "configs" / "llama3.1-8b.toml")
GPU = torch.device("cuda", 0)


def test_a_known_gpu_is_compared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    line = time_line(CONFIG, 64, GPU, 512 * 8192 / 10)
    said = re.fullmatch(r"time \| a step: planned ([\d.]+) s within \d+%, measured 10 s \((.*)%\)", line)
    assert said is not None
    assert float(said[2]) == pytest.approx(100 * (10 / float(said[1]) - 1), abs=1)
    other = CONFIG.with_keys(model={"family": "mine"})
    assert time_line(other, 64, GPU, 1.0).startswith("time | NOT compared with what was planned: model.family: got")


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_a_device_has_one_peak(name):
    hardware = hardware_of(name)
    assert hardware is not None
    assert hardware.dense_flops == dense_peak(name, torch.float16)


def test_nothing_is_said_of_other_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert time_line(CONFIG, 64, GPU, 1.0) == ""
    assert time_line(CONFIG, 64, torch.device("cpu"), 1.0) == ""


def test_a_run_compares_once_behind_its_first_detailed_line_after_compiling(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Console, "line", lambda _, line: told.append(line))
    write_data(tmp_path / "data")
    training = {"steps": 3, "eval_interval": 0}
    job = tiny_job(tmp_path, training=training, warmup_steps=0, log_interval=1)
    run_job(job, time_line=lambda config, engine, tokens_per_s: f"time | {tokens_per_s > 0}")
    lines = [line for line in told if line.startswith(("step", "time")) and "valid loss" not in line]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3", "|"]
    assert lines[-1] == "time | True"
    (row,) = (row for row in read_rows(Path(job.checkpoint.folder)) if row["kind"] == "compared")
    assert row["words"] == lines[-1]
