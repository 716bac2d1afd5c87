"""Rates that `megamix doctor --json` prints, as hardware of the time model."""

from dataclasses import asdict, replace

import pytest

from megamix.machine import num_cores
from megamix.tools.doctor.finding import not_here
from megamix.tools.doctor.host import judge_cores
from megamix.tools.doctor.measured import judge_rates, judge_wire
from megamix.tools.plan.time_hardware import load_hardware, measured_hardware


def test_a_cpus_rates_are_those_that_doctor_saw():
    wire = judge_wire(
        [{"reduce-scatter": 1e9, "all-gather": 3e9}, {"reduce-scatter": 2e9, "all-gather": 3e9}], on_gpus=False
    )
    rates = judge_rates([({"products": 1234.5e9, "copy": 36e9}, [])], "")
    hardware = measured_hardware(map(asdict, [judge_cores(0.1), wire, *rates]), load_hardware("cpu"))
    assert hardware.cores == num_cores()
    assert hardware.dense_flops == pytest.approx(1234.5e9)
    assert hardware.memory_bytes_per_s == pytest.approx(36e9)
    assert hardware.link_bytes_per_s == pytest.approx(1.5e9)  # as long as the slowest rank's two together


def test_ranks_share_the_cores_of_a_cpu():
    hardware = replace(load_hardware("cpu"), cores=6, dense_flops=10.0)
    assert [hardware.shared(ranks).dense_flops for ranks in (1, 2, 4, 6, 12)] == [60, 30, 10, 10, 5]
    assert load_hardware("cpu").shared(12) == load_hardware("cpu")


def test_a_gpu_keeps_its_peak_and_what_was_not_measured():
    base = load_hardware("h100-sxm")
    card = "NVIDIA H100 80GB HBM3"
    rates = judge_rates([({"products": 700e12, "copy": 2.8e12}, [])], card)
    hardware = measured_hardware(map(asdict, [not_here("wire", "there is one rank"), *rates]), base)
    assert asdict(hardware) == asdict(replace(base, memory_bytes_per_s=2.8e12))
