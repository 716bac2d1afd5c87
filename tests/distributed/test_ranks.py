"""A rank that raises, dies or hangs is named, the next case gets healthy ranks, and no rank outlives its parent."""

import multiprocessing.connection
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megamix.tools import ranks
from megamix.tools.ranks import RankFailure, RankPool


def _sum_of_ranks():
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def _rank_one_raises():
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def _rank_one_hangs():
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.parametrize(
    ("case", "deadline_s", "message"),
    [(_rank_one_raises, 60.0, "planted"), (_rank_one_hangs, 0.5, "rank 1: did not answer")],
)
def test_a_failing_rank_is_named_and_the_next_case_runs(run_ranks, case, deadline_s, message):
    with pytest.raises(RankFailure, match=message):
        run_ranks(case, 2, deadline_s=deadline_s)
    assert run_ranks(_sum_of_ranks, 2) == [1, 1]


def _many_tensors():
    return [torch.full((2,), float(number)) for number in range(1500)]


def test_answers_of_many_tensors_open_no_files(run_ranks):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        answers = run_ranks(_many_tensors, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert all(
        torch.equal(one, other) for answer in answers for one, other in zip(answer, _many_tensors(), strict=True)
    )


def test_a_rank_that_died_between_two_calls_is_named():
    with RankPool(2) as pool:
        _, pid = pool.call(os.getpid)
        os.kill(pid, signal.SIGKILL)
        multiprocessing.connection.wait([pool._processes[1].sentinel])
        with pytest.raises(RankFailure, match="rank 1: died with exit code -9"):
            pool.call(_sum_of_ranks)
        assert pool.call(_sum_of_ranks) == [1, 1]


def _make_group_and_count():
    before = len(dist.distributed_c10d._world.pg_map)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    total = torch.tensor(1)
    dist.all_reduce(total, group=group)
    return before, int(total)


def test_groups_that_a_case_has_made_are_gone_in_the_next(run_ranks):
    for _ in range(3):
        assert run_ranks(_make_group_and_count, 2) == [(1, 2), (1, 2)]


def _count_in_this_world():
    return dist.distributed_c10d._get_default_store().add("calls", 1)


def test_ranks_that_made_no_group_keep_their_world(run_ranks):
    before, after = (sum(run_ranks(_count_in_this_world, 2)) for _ in range(2))
    assert after - before == 4


def _parent(pipe):
    del ranks.PRELOADED[1:]  # torch alone, as no engine is built
    with RankPool(2) as pool:
        pipe.send(pool.call(os.getpid))
        pool.call(time.sleep, 600.0)


def _lives(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux who lives")
def test_ranks_end_with_a_parent_that_is_killed():
    mine, theirs = ranks.forkserver().Pipe()
    parent = ranks.forkserver().Process(target=_parent, args=(theirs,))
    parent.start()
    theirs.close()
    pids = mine.recv()
    assert [_lives(pid) for pid in pids] == [True, True]
    parent.kill()
    end_s = time.monotonic() + 20.0
    while any(map(_lives, pids)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert [pid for pid in pids if _lives(pid)] == []
