"""On simulated GPUs, the tests of ranks that were written for the CPU pass, bit for bit where they do there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.test_equals_reference import test_a_group_of_some_ranks_trains_like_a_world_of_its_own  # noqa: F401
from tests.distributed.test_overflow import (  # noqa: F401
    test_a_finite_gradient_too_large_to_square_counts_as_overflow,
    test_finite_gradients_whose_sum_overflows_change_nothing,
)
from tests.gpu.pools import on_default_gpu


@pytest.fixture
def run_ranks(gpu_ranks) -> Callable[..., list[Any]]:
    """In the place of the one of the same name: Gloo ranks on the CPU."""
    return lambda case, world_size, *args, **limits: gpu_ranks(on_default_gpu, world_size, case, *args, **limits)
