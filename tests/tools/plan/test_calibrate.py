"""Constants from runs of one's own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megamix.config import load_config
from megamix.tools.plan.calibrate import COMPUTING, calibrate, measured_step
from megamix.tools.plan.time_band import time_band
from megamix.tools.plan.time_constants import fitted_constants
from megamix.tools.plan.time_hardware import load_hardware
from megamix.tools.plan.time_job import timed_job
from megamix.tools.plan.time_model import step_time

HARDWARE = load_hardware("h100-sxm")
JOB = timed_job(load_config(Path(__file__).parents[3] / "configs" / "llama3.1-8b.toml"), 64)


def log_of(folder, job, truth, hardware=HARDWARE):
    """Write the metrics.jsonl of a run that takes as long as the model says with these constants."""
    time = step_time(job, hardware, truth)
    computing, update = sum(time.parts[part] for part in COMPUTING), time.parts["update"]
    row = {
        "throughput/tokens_per_s": job.step_tokens / time.seconds,
        "time_share/forward_backward": computing / time.seconds,
        "time_share/update": update / time.seconds,
    }
    slow = row | {"throughput/tokens_per_s": 1.0}  # the first interval compiles
    path = folder / "metrics.jsonl"
    written = "".join(f"{json.dumps(line)}\n" for line in ({"step": 1}, slow, row, row))
    path.write_text(written + '{"step": 5, "throu')  # as while the run trains
    return path


def test_a_run_corrects_the_prediction_and_narrows_the_band(tmp_path):
    before = fitted_constants()
    truth = replace(before.values, own=1.15, product_rate=0.6)
    after = calibrate([measured_step(log_of(tmp_path, JOB, truth), JOB, HARDWARE)], before)
    assert step_time(JOB, HARDWARE, before.values).seconds / step_time(JOB, HARDWARE, truth).seconds < 0.85
    other = replace(JOB, dp=128, global_batch=2 * JOB.global_batch)  # other GPUs are predicted, too
    for job in (JOB, other):
        assert step_time(job, HARDWARE, after.values).seconds == pytest.approx(
            step_time(job, HARDWARE, truth).seconds, rel=0.03
        )
        assert time_band(job, HARDWARE, after) < 0.6 * time_band(job, HARDWARE, before)


def test_a_cpu_may_be_far_from_what_gpus_taught(tmp_path):
    cpu, before = load_hardware("cpu"), fitted_constants()
    truth = replace(before.values, own=1.8, product_rate=0.95)
    after = calibrate([measured_step(log_of(tmp_path, JOB, truth, cpu), JOB, cpu)], before)
    other = replace(JOB, dp=16, global_batch=JOB.global_batch // 4)
    for job in (JOB, other):
        foreseen = step_time(job, cpu, after.values).seconds
        assert foreseen == pytest.approx(step_time(job, cpu, truth).seconds, rel=0.05)


def test_a_log_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "throughput/tokens_per_s": 5.0}\n')
    with pytest.raises(
        ValueError, match="fewer than 2 rows .* every metrics.log_interval updates, .*; train for longer"
    ):
        measured_step(path, JOB, HARDWARE)


@pytest.mark.parametrize("factor", [0.3, 3.0, 300.0])
def test_a_run_that_contradicts_the_constants_widens_the_band(factor, tmp_path):
    before = fitted_constants()
    truth = replace(before.values, own=factor)
    after = calibrate([measured_step(log_of(tmp_path, JOB, truth), JOB, HARDWARE)], before)
    assert time_band(JOB, HARDWARE, after) > time_band(JOB, HARDWARE, before)


def test_bands_are_wider_where_less_is_known():
    constants = fitted_constants()
    known = time_band(JOB, HARDWARE, constants)
    assert time_band(JOB, load_hardware("b200"), constants) > known
    assert time_band(replace(JOB, cp=8, dp=8), HARDWARE, constants) > known
