"""Whoever fills a disk, or loses it: a disk that is full, read-only or gone fails a save in the same way on every rank,
with one line; older checkpoints still load.
"""

import errno
import itertools
import logging
import os
import random
import resource
import shutil
import tempfile
from pathlib import Path

import pytest

from megamix.checkpoint.all_or_none import SomeRankFailed
from megamix.checkpoint.folder import Files, checkpoints
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import remove_old, save
from megamix.checkpoint.snapshot import take_snapshot
from tests.checkpoint.faults import FaultyFiles, listing
from tests.checkpoint.state import all_or_none_of, alone, fill, fp16_engine, resume, save_steps
from tests.conftest import FULL

PLACES = 5 if FULL else 2  # faults of each kind on each rank


def _full(name, arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_only(name, arguments):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _gone(name, arguments):
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))


KINDS = (_full, _read_only, _gone)


def _save_step_3(folder, faults):
    """Try a save once per fault, (rank, call, what happens). Return each error, and the folder's content after it."""
    engine = fp16_engine()
    fill(engine, 3)
    all_or_none = all_or_none_of(engine)
    snapshot = take_snapshot(engine, RunRecord(progress={"consumed_samples": 3}))
    outcomes = []
    for rank, at, fault in faults:
        files = FaultyFiles(at if all_or_none.rank == rank else None, fault)
        with pytest.raises(SomeRankFailed) as raised:
            save(folder, snapshot, all_or_none, files)
        outcomes.append((str(raised.value), listing(folder)))
    return outcomes


def _calls(folder):
    """Return the calls of a save that works."""
    engine = fp16_engine()
    fill(engine, 3)
    files = FaultyFiles()
    save(folder, take_snapshot(engine, RunRecord()), all_or_none_of(engine), files)
    return files.calls


def test_a_save_that_fails_on_one_rank_fails_on_all_and_costs_nothing(run_ranks, tmp_path):
    folder = tmp_path / "checkpoints"
    run_ranks(save_steps, 2, folder, [1, 2])
    shutil.copytree(folder, tmp_path / "counted")
    calls = run_ranks(_calls, 2, tmp_path / "counted")
    # Up to the rename: after it the checkpoint is there, whatever fails.
    before_commit = [range(calls[0].index("rename") + 1), range(len(calls[1]))]
    rng = random.Random(0)
    faults = [
        (rank, at, kind)
        for kind, rank in itertools.product(KINDS, (0, 1))
        for at in rng.sample(before_commit[rank], PLACES)
    ]
    answers = run_ranks(_save_step_3, 2, folder, faults)
    # The first rank removes leftovers, and only it knows when that is done.
    for (rank, at, kind), (told, left), (elsewhere, _) in zip(faults, *answers, strict=True):
        where = f"{kind.__name__} on rank {rank} before call {at} ({calls[rank][at]})"
        assert told == elsewhere, where
        assert told.startswith(f"rank {rank}: "), where
        assert "[Errno" in told, where
        assert "\n" not in told, where
        assert left == ["step_00000001", "step_00000002"], where
    assert run_ranks(resume, 2, folder) == [(2, [])] * 2
    assert run_ranks(save_steps, 2, folder, [4]) == [["step_00000004"]] * 2


def _save_within(folder, rank, largest):
    """Save with files on one rank limited to `largest` bytes by the system itself."""
    engine = fp16_engine()
    fill(engine, 3)
    all_or_none = all_or_none_of(engine)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if all_or_none.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        save(folder, take_snapshot(engine, RunRecord()), all_or_none)
    except SomeRankFailed as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_must_not_grow_is_named(run_ranks, tmp_path, rank):
    folder = tmp_path / "checkpoints"
    run_ranks(save_steps, 2, folder, [1, 2])
    told = run_ranks(_save_within, 2, folder, rank, 5000)
    assert told[0] == told[1]
    assert told[0].startswith(f"rank {rank}: OSError: [Errno {errno.EFBIG}] File too large")
    assert f"rank_{rank:05d}.safetensors" in told[0]
    assert run_ranks(resume, 2, folder) == [(2, [])] * 2
    assert listing(folder) == ["step_00000001", "step_00000002"]


class _Free(Files):
    def __init__(self, free):
        self.free = free

    def free_space(self, path):
        return self.free


def test_a_save_that_cannot_fit_is_not_begun(tmp_path):
    save_steps(tmp_path, [1, 2])
    engine = fp16_engine()
    fill(engine, 3)
    snapshot = take_snapshot(engine, RunRecord())
    with pytest.raises(SomeRankFailed, match=r"a checkpoint takes \d MiB, \d MiB are free"):
        save(tmp_path, snapshot, alone(), _Free(snapshot.largest_size - 1))
    assert listing(tmp_path) == ["step_00000001", "step_00000002"]
    save(tmp_path, snapshot, alone(), _Free(snapshot.largest_size))
    assert listing(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]


def test_what_is_asked_for_is_never_less_than_what_is_written(tmp_path):
    save_steps(tmp_path, [3])
    snapshot = take_snapshot(fp16_engine(), RunRecord())
    written = sum(file.stat().st_size for file in (tmp_path / "step_00000003").iterdir())
    assert written <= snapshot.largest_size


def test_an_old_checkpoint_that_cannot_be_removed_is_told(tmp_path, caplog):
    save_steps(tmp_path / "ready", [1, 2, 3], keep=3)

    def remove_with(files):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "ready", tmp_path / "copy")
        remove_old(tmp_path / "copy", 2, tmp_path / "copy" / "step_00000003", files)

    counted = FaultyFiles()
    remove_with(counted)
    assert listing(tmp_path / "copy") == ["step_00000002", "step_00000003"]
    for at in range(len(counted.calls)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="megamix"):
            remove_with(FaultyFiles(at, _read_only))
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith("an old checkpoint could not be removed: [Errno 30]")
        assert [path.name for path in checkpoints(tmp_path / "copy")][:2] == ["step_00000003", "step_00000002"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_real_disk_that_is_full_or_read_only(tmp_path):
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    if os.system(f"mount -t tmpfs -o size=4m megamix-test {folder} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    try:
        save_steps(folder / "checkpoints", [1, 2])
        engine = fp16_engine()
        fill(engine, 3)
        snapshot = take_snapshot(engine, RunRecord())
        (folder / "ballast").write_bytes(bytes(shutil.disk_usage(folder).free - (40 << 10)))
        with pytest.raises(SomeRankFailed, match=r"MiB are free"):
            save(folder / "checkpoints", snapshot, alone())
        with pytest.raises(SomeRankFailed, match=r"\[Errno 28\].*rank_00000.safetensors"):
            save(folder / "checkpoints", snapshot, alone(), _Free(1 << 40))
        assert os.system(f"mount -o remount,ro {folder}") == 0
        with pytest.raises(SomeRankFailed, match=r"\[Errno 30\]"):
            save(folder / "checkpoints", snapshot, alone(), _Free(1 << 40))
        assert resume(folder / "checkpoints") == (2, [])
    finally:
        os.system(f"umount {folder}")
