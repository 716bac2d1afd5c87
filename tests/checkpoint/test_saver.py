"""A save beside training holds the state of one instant; saves run one at a time, and all ranks learn the same
outcome.
"""

import errno
import os
import threading
from unittest import mock

import pytest

from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import Files
from megamix.checkpoint.load import load, read_on_all
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import Saver
from tests.checkpoint.faults import FaultyFiles, listing
from tests.checkpoint.state import all_or_none_of, alone, differences, fill, fp16_engine, load_newest, make_saver
from tests.conftest import FULL

REPEATS = 200 if FULL else 8


def _record(step):
    return RunRecord(progress={"consumed_samples": step})


def _changed_right_after(folder):
    """Return for each save the differences from the state that was to be saved."""
    engine, target = fp16_engine(), fp16_engine()
    saver = make_saver(folder, all_or_none_of(engine))
    wrong = []
    for number in range(REPEATS):
        fill(engine, 3)
        saver.start(engine, _record(number))
        fill(engine, 31)
        saver.finish()
        checkpoint = load_newest(folder, target)
        assert checkpoint.manifest.run == _record(number), "of several saves after one update the last is the newest"
        wrong.append(differences(target, 3))
    return wrong


def test_what_changes_right_after_the_start_is_not_saved(run_ranks, tmp_path):
    for wrong in run_ranks(_changed_right_after, 2, tmp_path / "checkpoints"):
        assert wrong == [[]] * REPEATS


def test_the_second_save_waits_for_the_first(tmp_path):
    engine = fp16_engine()
    saved, waits = [], threading.Event()
    files = FaultyFiles(at=3, fault=lambda name, arguments: waits.wait(60.0))  # the first file is begun
    saver = Saver(tmp_path, 2, alone(), lambda path: saved.append(path), _never, files)
    fill(engine, 1)
    saver.start(engine, _record(1))
    finish = saver.finish
    saver.finish = lambda: (waits.set(), finish())  # the caller begins to wait
    fill(engine, 2)
    saver.start(engine, _record(2))  # into the memory that the first one is written from
    saver.finish()
    assert [path.name for path in saved] == ["step_00000001", "step_00000002"]
    for step, path in enumerate(saved, start=1):
        load(read_on_all(path, alone()), engine, alone())
        assert differences(engine, step) == []


def test_what_is_no_longer_kept_is_removed_while_training_goes_on(tmp_path):
    engine = fp16_engine()
    goes_on, saved = threading.Event(), []

    class Slow(Files):
        def remove_file(self, path):
            assert goes_on.wait(60.0)
            super().remove_file(path)

    saver = Saver(tmp_path, 2, alone(), lambda path: saved.append(path.name), _never, Slow())
    for step in (1, 2, 3):
        fill(engine, step)
        saver.save(engine, _record(step))
    assert saved[-1] == "step_00000003", "told, and training has gone on, before anything is removed"
    goes_on.set()
    saver.finish()
    assert listing(tmp_path) == saved[1:]


@pytest.mark.parametrize("keep", [1, 2.5])
def test_fewer_than_two_are_never_kept_nor_a_part_of_one(keep, tmp_path):
    with pytest.raises(ValueError, match=f"keep must be a whole number, at least 2, got {keep}:"):
        Saver(tmp_path, keep, alone(), lambda path: None, _never)


def _tell(lengths):
    all_or_none = all_or_none_of(fp16_engine())
    return [all_or_none.every(lambda length=length: "x" * (length if all_or_none.rank else 7)) for length in lengths]


def test_answers_of_any_length_arrive_whole(run_ranks):
    lengths = [0, 7, 900, 1024, 5000]
    want = [["x" * 7, "x" * length] for length in lengths]
    assert run_ranks(_tell, 2, lengths) == [want] * 2


def _never(error):
    raise AssertionError(error)


def _fails_on_rank_1(folder, beside):
    """Return the outcomes of a save that fails and of the save after it."""
    engine = fp16_engine()
    all_or_none = AllOrNone.apart(engine.topology.world, timeout_s=60.0)
    told = []
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    files = FaultyFiles(at=1 if all_or_none.rank == 1 else None, fault=full)
    saver = Saver(folder, 2, all_or_none, lambda path: told.append(path.is_dir()), lambda e: told.append(str(e)), files)
    for step in (1, 2):
        fill(engine, step)
        (saver.start if beside else saver.save)(engine, _record(step))
        saver.finish()
    return told


def test_a_failure_is_told_alike_on_all_ranks_and_the_next_save_is_tried(run_ranks, tmp_path):
    for beside in (False, True):
        folder = tmp_path / str(beside)
        told, elsewhere = run_ranks(_fails_on_rank_1, 2, folder, beside)
        assert told == elsewhere
        assert told[0].startswith("rank 1: OSError: [Errno 28] No space left on device")
        assert told[1:] == [True]
        assert listing(folder) == ["step_00000002"]


def _uses_both_groups(folder):
    """Run collectives of training while a save's own are under way: each matches its own kind."""
    engine = fp16_engine()
    saver = make_saver(folder, AllOrNone.apart(engine.topology.world, timeout_s=60.0))
    sums = []
    for step in range(5):
        fill(engine, step)
        saver.start(engine, _record(step))
        for number in range(20):
            mine = engine.applied_updates.new_tensor([number + engine.topology.dp.rank])
            sums.append(float(engine.world.table(mine).sum()))
    saver.finish()
    return sums


def test_training_talks_beside_a_save(run_ranks, tmp_path):
    want = [2.0 * number + 1 for _ in range(5) for number in range(20)]
    assert run_ranks(_uses_both_groups, 2, tmp_path) == [want] * 2
    assert listing(tmp_path) == ["step_00000003", "step_00000004"]
