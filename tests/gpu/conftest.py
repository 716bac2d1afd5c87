"""Fixtures for tests on simulated GPUs."""

import pytest

from megamix.tools.ranks import RankPool
from tests.gpu import library
from tests.gpu.pools import on_gpu, processes_with_gpus


@pytest.fixture(scope="session")
def gpu_ranks():
    """`gpu_ranks(case, world_size, *args)`, as `run_ranks`, on simulated GPUs and NCCL. `seed`: of its delays."""
    if reason := library.missing():
        pytest.skip(reason)
    library.build()
    pools = {}

    def run(case, world_size, *args, seed=0, deadline_s=None):
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, "cuda")
        with processes_with_gpus():
            return pools[world_size].call(on_gpu, seed, case, *args, deadline_s=deadline_s)

    yield run
    for pool in pools.values():
        pool.close()
