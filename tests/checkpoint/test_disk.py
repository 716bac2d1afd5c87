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
from functools import partial

import pytest

from megamix.checkpoint.all_or_none import SomeRankFailed
from megamix.checkpoint.folder import Files, checkpoints
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import remove_old
from megamix.checkpoint.snapshot import take_snapshot
from tests.checkpoint.faults import FaultyFiles, listing
from tests.checkpoint.state import all_or_none_of, fill, fp16_engine, make_saver, resume, save_now, save_steps
from tests.conftest import FULL

PLACES = 5 if FULL else 2  # faults of each kind on each rank


def _fails(number, name, arguments):
    raise OSError(number, os.strerror(number))


KINDS = [partial(_fails, number) for number in (errno.ENOSPC, errno.EROFS, errno.ENOENT)]


def _save_step_3(folder, faults):
    """Try a save once per fault, (rank, call, what happens). Return each error, and the folder's content after it."""
    engine = fp16_engine()
    fill(engine, 3)
    outcomes = []
    for rank, at, fault in faults:
        files = FaultyFiles(at if engine.topology.world.rank == rank else None, fault)
        with pytest.raises(SomeRankFailed) as raised:
            save_now(folder, engine, files, consumed_samples=3)
        outcomes.append((str(raised.value), listing(folder)))
    return outcomes


def _calls(folder):
    """Return the calls of a save that works."""
    engine, files = fp16_engine(), FaultyFiles()
    fill(engine, 3)
    save_now(folder, engine, files)
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
        where = f"{kind.args} on rank {rank} before call {at} ({calls[rank][at]})"
        assert told == elsewhere, where
        assert told.startswith(f"rank {rank}: "), where
        assert "[Errno" in told, where
        assert "\n" not in told, where
        assert left == ["step_00000001", "step_00000002"], where
    assert run_ranks(resume, 2, folder) == [(2, [])] * 2
    assert run_ranks(save_steps, 2, folder, [4]) == [["step_00000004"]] * 2


def _save_within(folder, largest):
    """Save with files on the second rank limited to `largest` bytes by the system itself."""
    engine = fp16_engine()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.topology.world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        save_now(folder, engine)
    except SomeRankFailed as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


def test_a_file_that_must_not_grow_is_named(run_ranks, tmp_path):
    folder = tmp_path / "checkpoints"
    run_ranks(save_steps, 2, folder, [1, 2])
    told, elsewhere = run_ranks(_save_within, 2, folder, 5000)
    assert told == elsewhere
    assert told.startswith(f"rank 1: OSError: [Errno {errno.EFBIG}] File too large")
    assert "rank_00001.safetensors" in told
    assert run_ranks(resume, 2, folder) == [(2, [])] * 2
    assert listing(folder) == ["step_00000001", "step_00000002"]


def test_a_save_that_cannot_fit_is_not_begun_and_one_that_fits_takes_no_more(tmp_path, monkeypatch):
    save_steps(tmp_path, [1, 2])
    engine = fp16_engine()
    fill(engine, 3)
    largest = take_snapshot(engine, RunRecord(config="[model]\n")).largest_size
    monkeypatch.setattr(Files, "free_space", lambda files, path: largest - 1)
    with pytest.raises(SomeRankFailed, match=r"a checkpoint takes \d MiB, \d MiB are free"):
        save_now(tmp_path, engine)
    assert listing(tmp_path) == ["step_00000001", "step_00000002"]
    monkeypatch.setattr(Files, "free_space", lambda files, path: largest)
    assert sum(file.stat().st_size for file in save_now(tmp_path, engine).iterdir()) <= largest


class _RoomForFour(Files):
    """A disk on which four checkpoints have room."""

    def free_space(self, path):
        return (4 - len(checkpoints(path))) * 2**30


def test_a_full_disk_loses_those_beyond_a_smaller_keep_before_a_save(tmp_path):
    save_steps(tmp_path, [1, 2, 3, 4], keep=4)
    engine = fp16_engine()
    fill(engine, 5)
    saver = make_saver(tmp_path, all_or_none_of(engine), _RoomForFour())
    saver.save(engine, RunRecord(config="[model]\n"))
    saver.finish()
    assert listing(tmp_path) == ["step_00000004", "step_00000005"]


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
            remove_with(FaultyFiles(at, KINDS[1]))
        (line,) = (record.getMessage() for record in caplog.records)
        assert line.startswith("an old checkpoint could not be removed: [Errno 30]")
        assert [path.name for path in checkpoints(tmp_path / "copy")][:2] == ["step_00000003", "step_00000002"]
