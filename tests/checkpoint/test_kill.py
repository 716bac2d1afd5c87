"""A process is killed at any call of a save that touches the disk, on either rank, in a save at once or beside
training, with whole parameters kept or not. The newest complete checkpoint stays, and the next save removes what the
killed one left.
"""

import random
import shutil

import pytest

from megamix.checkpoint.manifest import RunRecord
from megamix.tools.ranks import RankFailure, RankPool
from tests.checkpoint.faults import CALLS, FaultyFiles, kill, kill_in_the_middle, listing
from tests.checkpoint.state import all_or_none_of, fill, fp16_engine, make_saver, resume, save_steps
from tests.conftest import FULL

SHARDS = ("states", "parameters")
SAMPLE = 12  # points, where not all are taken


def _save_step_3(folder, shard, victim, at, midway, beside):
    engine = fp16_engine(shard=shard)
    fill(engine, 3)
    all_or_none = all_or_none_of(engine)
    at = at if all_or_none.rank == victim else None
    files = FaultyFiles(at, kill_in_the_middle if midway else kill)
    saver = make_saver(folder, all_or_none, files)
    run = RunRecord(progress={"consumed_samples": 3})
    if beside:
        saver.start(engine, run)
        fill(engine, 9)  # training goes on
    else:
        saver.save(engine, run)
    saver.finish()
    return files.calls


def _resume_and_save_step_4(folder):
    found = resume(folder)
    save_steps(folder, [4])
    return found


def _points(calls):
    """Return the points of a kill, (setting, rank, number of the call, inside it, beside training): before every call,
    and inside every write.
    """
    points = [
        (shard, rank, at, midway, beside)
        for shard, by_rank in calls.items()
        for rank, names in enumerate(by_rank)
        for at, name in enumerate(names)
        for midway in ((False, True) if name == "write" else (False,))
        for beside in (False, True)
    ]
    if FULL:
        return points
    # One for each kind of call, as most are writes of tensors, and the rest by chance.
    random.Random(0).shuffle(points)
    kinds = {calls[point[0]][point[1]][point[2]]: point for point in points}
    others = [point for point in points if point not in kinds.values()]
    return [*kinds.values(), *others[: SAMPLE - len(kinds)]]


def test_a_kill_at_any_call_leaves_the_newest_complete_checkpoint(run_ranks, tmp_path):
    ready = tmp_path / "ready"
    run_ranks(save_steps, 2, ready, [1, 2])
    calls = {}
    for shard in SHARDS:
        shutil.copytree(ready, tmp_path / shard)
        calls[shard] = run_ranks(_save_step_3, 2, tmp_path / shard, shard, -1, None, False, False)
        assert set(calls[shard][0]) == set(CALLS), "every kind is met"
    points = _points(calls)
    assert len(points) >= (120 if FULL else SAMPLE)
    for shard, rank, at, midway, beside in points:
        where = f"{shard}, rank {rank} before call {at} ({calls[shard][rank][at]}), {midway=}, {beside=}"
        folder = tmp_path / "killed"
        shutil.copytree(ready, folder)
        pool = RankPool(2)
        with pytest.raises(RankFailure, match=f"rank {rank}: died with exit code -9"):
            pool.call(_save_step_3, folder, shard, rank, at, midway, beside, deadline_s=60.0)
        pool.close(kill=True)
        newest = 3 if rank == 0 and at > calls[shard][0].index("rename") else 2
        assert run_ranks(_resume_and_save_step_4, 2, folder) == [(newest, [])] * 2, where
        assert listing(folder) == [f"step_{newest:08d}", "step_00000004"], where
        shutil.rmtree(folder)
