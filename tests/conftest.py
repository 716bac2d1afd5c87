"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.ranks import RankPools

# The counts that an issue names are run by `./launch/test.sh --full`; otherwise seeded samples of each sweep.
FULL = os.environ.get("MEGAMIX_FULL") == "1"

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(case, world_size, *args)` runs a top-level function on real Gloo ranks; see tests/ranks.py."""
    pools = RankPools()
    yield pools.run
    pools.close()
