"""Tests of ranks that were written for the CPU pass on simulated GPUs, with the CPU's bits if they compare bits."""

import inspect

import pytest

from tests.conftest import FULL
from tests.distributed import (
    test_equals_reference,
    test_exact_mean,
    test_half_fp32_sum,
    test_overflow,
    test_overlap,
    test_pipeline,
)
from tests.gpu.pools import on_default_gpu
from tests.parallel import test_full_weights, test_ten_layouts, test_tensor_parallel

pytestmark = pytest.mark.uncounted

# Without `--full`, of each suite what is cheap.
SUITES = {
    test_equals_reference: {"test_a_group_of_some_ranks_trains_like_a_world_of_its_own"},
    test_exact_mean: {"test_a_step_in_which_no_target_counts_applies_a_zero_gradient"},
    test_half_fp32_sum: {"test_a_sum_that_fp16_cannot_hold_is_no_overflow_and_equals_the_reference"},
    test_overflow: {"test_finite_gradients_whose_sum_overflows_change_nothing"},
    test_overlap: {
        "test_a_backward_that_failed_under_way_leaves_nothing_in_the_next_step",
        "test_an_engine_dropped_in_flight_leaves_the_group_to_the_next",
    },
    test_pipeline: {
        "test_four_stages_and_eight_equal_one_process",
        "test_a_tied_table_is_summed_over_both_ends_and_stays_equal",
    },
    test_full_weights: set(),
    test_tensor_parallel: {"test_dividing_the_positions_changes_no_bit_of_the_loss"},
    test_ten_layouts: set(),
}
# These look at what Gloo alone has, compile, or compute beside the ranks on the CPU.
NOT_HERE = {
    "test_the_sum_is_as_exact_as_fp32_and_its_statistics_are_those_of_the_shard",
    "test_the_late_gather_catches_a_missing_wait",
    "test_compiled_blocks_with_a_compiled_update_train_alike_in_one_graph",
    "test_logits_are_whole_on_every_rank_for_a_prompt_of_any_length",
}
for suite, sample in SUITES.items():
    for name, member in vars(suite).items():
        takes_ranks = name.startswith("test_") and "run_ranks" in inspect.signature(member).parameters
        if name in sample or (FULL and takes_ranks and name not in NOT_HERE):
            globals()[name] = member


@pytest.fixture
def run_ranks(gpu_ranks):
    """In the place of the one of the same name: Gloo ranks on the CPU."""

    def run(case, world_size, *args, **limits):
        if case.__module__ == test_ten_layouts.__name__:  # it says itself what lies where
            return gpu_ranks(case, world_size, *args, **limits)
        return gpu_ranks(on_default_gpu, world_size, case, *args, **limits)

    return run


def test_ranks_equal_the_plain_loop(run_ranks):
    assert run_ranks(test_equals_reference.check_cases, 3, test_equals_reference._cases(3, 4)[:4]) == [[], [], []]
