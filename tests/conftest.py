"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.ranks import RankPools

# The counts that an issue names are run by `./launch/test.sh --full`; otherwise seeded samples of each sweep.
FULL = os.environ.get("MEGAMIX_FULL") == "1"

torch.set_num_threads(1)

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which the programs that tests start would inherit
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(case, world_size, *args)` runs a top-level function on real Gloo ranks; see tests/ranks.py."""
    pools = RankPools()
    yield pools.run
    pools.close()
