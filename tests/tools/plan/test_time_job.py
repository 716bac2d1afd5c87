"""A configured job as the time model's work, on the rates that `megamix doctor --json` prints, with constants from runs
of one's own. A run on a known GPU logs its step's planned and measured time; elsewhere it says nothing.
"""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megamix.base.console import Console
from megamix.base.machine import num_cores
from megamix.config import FP8Config, LatentSizes, load_config
from megamix.launch.journal import read_rows
from megamix.model.sizes import dense_peak
from megamix.tools.doctor.finding import not_here
from megamix.tools.doctor.host import judge_cores
from megamix.tools.doctor.measured import judge_rates, judge_wire
from megamix.tools.plan.calibrate import COMPUTING, MeasuredStep, calibrate, measured_step
from megamix.tools.plan.time_band import time_band
from megamix.tools.plan.time_constants import fitted_constants
from megamix.tools.plan.time_hardware import hardware_of, load_hardware, measured_hardware
from megamix.tools.plan.time_job import timed_job
from megamix.tools.plan.time_line import time_line
from megamix.tools.plan.time_model import step_time
from megamix.train.job import Lines
from megamix.train.main import run_job
from tests.builders import divided, tiny_job, write_data


def config(name="llama3.1-8b", **parallelism):
    return divided(load_config(Path(__file__).parents[3] / "configs" / f"{name}.toml"), **parallelism)


HARDWARE, CPU, BEFORE = load_hardware("h100-sxm"), load_hardware("cpu"), fitted_constants()
CONFIG = config()
JOB = timed_job(CONFIG, 64)
NAME = "NVIDIA H100 80GB HBM3"


def part(job_config, dp_size, name):
    return step_time(timed_job(job_config, dp_size), HARDWARE, BEFORE.values).parts[name]


def test_each_axis_costs_what_it_sends():
    assert part(CONFIG, 8, "tp") == part(CONFIG, 8, "cp") == part(CONFIG, 8, "bubble") == part(CONFIG, 1, "dp") == 0
    assert part(config(tensor={"size": 2}), 4, "tp") > 0
    assert part(config(context={"size": 2}), 4, "cp") > 0
    assert part(config(shard="parameters"), 8, "dp") > part(CONFIG, 8, "dp")
    assert part(config("qwen3-30b-a3b", expert={"size": 8}), 8, "ep") > 0


def test_fp8_makes_the_products_of_its_layers_faster():
    fp8 = FP8Config(recipe="rowwise", but=("blocks.0.*", "blocks.3?.*"))
    some = CONFIG.with_keys(precision={"fp8": fp8})
    every = CONFIG.with_keys(precision={"fp8": fp8.model_copy(update={"but": (), "weight_grad": "fp8"})})
    assert part(every, 8, "products") < part(some, 8, "products") < part(CONFIG, 8, "products")
    assert part(every, 8, "between") > part(some, 8, "between") > part(CONFIG, 8, "between")


def test_schedules_wait_less_in_their_order():
    waits = [
        part(config(pipeline={"size": 4, "schedule": schedule}), 2, "bubble")
        for schedule in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[2]


def test_what_the_model_does_not_know_is_refused():
    with pytest.raises(ValueError, match='model.family: got "mine"; time is planned for "transformer" alone'):
        timed_job(CONFIG.with_keys(model={"family": "mine"}), 1)
    latent = LatentSizes(kv_rank=512, unrotated_dim=128, rotary_dim=64, value_dim=128)
    with pytest.raises(ValueError, match="model.latent_attention: time is planned without it alone"):
        timed_job(CONFIG.with_keys(model={"latent_attention": latent}), 1)


def test_a_cpus_rates_are_those_that_doctor_saw_and_its_ranks_share_the_cores():
    wire = judge_wire(
        [{"reduce-scatter": 1e9, "all-gather": 3e9}, {"reduce-scatter": 2e9, "all-gather": 3e9}], on_gpus=False
    )
    rates = judge_rates([({"products": 1234.5e9, "copy": 36e9}, [])], "")
    hardware = measured_hardware(map(asdict, [judge_cores(0.1), wire, *rates]), CPU)
    assert hardware.cores == num_cores()
    assert hardware.dense_flops == pytest.approx(1234.5e9)
    assert hardware.memory_bytes_per_s == pytest.approx(36e9)
    assert hardware.link_bytes_per_s == pytest.approx(1.5e9)  # as long as the slowest rank's two together
    of_six = replace(CPU, cores=6, dense_flops=10.0)
    assert [of_six.shared(ranks).dense_flops for ranks in (1, 2, 4, 6, 12)] == [60, 30, 10, 10, 5]
    assert CPU.shared(12) == CPU


def test_a_gpu_keeps_its_peak_and_what_was_not_measured():
    rates = judge_rates([({"products": 700e12, "copy": 2.8e12}, [])], NAME)
    hardware = measured_hardware(map(asdict, [not_here("wire", "there is one rank"), *rates]), HARDWARE)
    assert asdict(hardware) == asdict(replace(HARDWARE, memory_bytes_per_s=2.8e12))


def calibrated(hardware=HARDWARE, **truth):
    """Return constants of which a run has these values, and those that it teaches."""
    values = replace(BEFORE.values, **truth)
    time = step_time(JOB, hardware, values)
    computing = sum(time.parts[part] for part in COMPUTING)
    return values, calibrate([MeasuredStep(JOB, hardware, time.seconds, computing)], BEFORE)


def test_a_run_corrects_the_prediction_and_narrows_the_band():
    truth, after = calibrated(own=1.15, product_rate=0.6)
    assert step_time(JOB, HARDWARE, BEFORE.values).seconds / step_time(JOB, HARDWARE, truth).seconds < 0.85
    for job in (JOB, replace(JOB, dp=128, global_batch=2 * JOB.global_batch)):  # other GPUs are predicted, too
        seconds = step_time(job, HARDWARE, truth).seconds
        assert step_time(job, HARDWARE, after.values).seconds == pytest.approx(seconds, rel=0.03)
        assert time_band(job, HARDWARE, after) < 0.6 * time_band(job, HARDWARE, BEFORE)


def test_a_cpu_may_be_far_from_what_gpus_taught():
    truth, after = calibrated(CPU, own=1.8, product_rate=0.95)
    for job in (JOB, replace(JOB, dp=16, global_batch=JOB.global_batch // 4)):
        seconds = step_time(job, CPU, truth).seconds
        assert step_time(job, CPU, after.values).seconds == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("factor", [0.3, 300.0])
def test_a_run_that_contradicts_the_constants_widens_the_band(factor):
    _, after = calibrated(own=factor)
    assert time_band(JOB, HARDWARE, after) > time_band(JOB, HARDWARE, BEFORE)


def test_of_a_log_the_first_interval_is_left_out_and_no_other_is_refused(tmp_path):
    path, rows = tmp_path / "metrics.jsonl", [{"step": 1}, {"throughput/tokens_per_s": 1.0}]  # which compiles
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(
        ValueError, match="fewer than 2 rows .* every metrics.log_interval updates, .*; train for longer"
    ):
        measured_step(path, JOB, HARDWARE)
    row = {"throughput/tokens_per_s": JOB.step_tokens / 5, "time_share/forward_backward": 0.8}
    with path.open("a") as file:
        file.write(f'{json.dumps(row)}\n{{"step": 5, "throu')  # as while the run trains
    step = measured_step(path, JOB, HARDWARE)
    assert (step.seconds, step.computing) == pytest.approx((5, 4))


def test_bands_are_wider_where_less_is_known():
    known = time_band(JOB, HARDWARE, BEFORE)
    assert time_band(JOB, load_hardware("b200"), BEFORE) > known
    assert time_band(replace(JOB, cp=8, dp=8), HARDWARE, BEFORE) > known


def test_a_known_gpu_is_compared_and_of_other_devices_nothing_is_said(monkeypatch):
    gpu, names = torch.device("cuda", 0), [f"{NAME} MIG 1g.10gb", NAME, NAME]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names.pop(0))
    assert time_line(CONFIG, 64, gpu, 1.0) == time_line(CONFIG, 64, torch.device("cpu"), 1.0) == ""
    line = time_line(CONFIG, 64, gpu, JOB.step_tokens / 10)
    said = re.fullmatch(r"time \| a step: planned ([\d.]+) s within \d+%, measured 10 s \((.*)%\)", line)
    assert said is not None
    assert float(said[2]) == pytest.approx(100 * (10 / float(said[1]) - 1), abs=1)
    other = CONFIG.with_keys(model={"family": "mine"})
    assert time_line(other, 64, gpu, 1.0).startswith("time | NOT compared with what was planned: model.family: got")


@pytest.mark.parametrize("name", [NAME, "NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_a_device_has_one_peak(name):
    assert hardware_of(name).dense_flops == dense_peak(name, torch.float16)


def test_a_run_compares_once_behind_its_first_detailed_line_after_compiling(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Console, "line", lambda _, line: told.append(line))
    write_data(tmp_path / "data")
    job = tiny_job(tmp_path, steps=3, eval_interval=0, warmup_steps=0, log_interval=1)
    run_job(job, Lines(time=lambda engine, tokens_per_s: f"time | {tokens_per_s > 0}"))
    lines = [line for line in told if line.startswith(("step", "time")) and "valid loss" not in line]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3", "|"]
    assert lines[-1] == "time | True"
    (row,) = (row for row in read_rows(Path(job.checkpoint.folder)) if row["kind"] == "compared")
    assert row["words"] == lines[-1]
