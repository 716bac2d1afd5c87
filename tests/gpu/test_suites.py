"""Tests of ranks that were written for the CPU pass on simulated GPUs, with the CPU's bits if they compare bits."""

import inspect

import pytest

from tests.conftest import FULL
from tests.distributed import test_exact_mean, test_half_fp32_sum, test_overlap
from tests.gpu.pools import on_default_gpu

# Without `--full`, of each suite what is cheap.
SUITES = {
    test_exact_mean: {"test_a_step_in_which_no_target_counts_applies_a_zero_gradient"},
    test_half_fp32_sum: {"test_a_sum_that_fp16_cannot_hold_is_no_overflow_and_equals_the_reference"},
    test_overlap: {
        "test_a_backward_that_failed_under_way_leaves_nothing_in_the_next_step",
        "test_an_engine_dropped_in_flight_leaves_the_group_to_the_next",
    },
}
for suite, sample in SUITES.items():
    for name, member in vars(suite).items():
        takes_ranks = name.startswith("test_") and "run_ranks" in inspect.signature(member).parameters
        if name in sample or (FULL and takes_ranks):
            globals()[name] = member


@pytest.fixture
def run_ranks(gpu_ranks):
    """In the place of the one of the same name: Gloo ranks on the CPU."""

    return lambda case, world_size, *args, **limits: gpu_ranks(on_default_gpu, world_size, case, *args, **limits)
