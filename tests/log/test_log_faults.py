"""A disk that is full, broken or out of inodes for a while loses a run no row; if it stays so, the run ends at a save
with the true exit status. A log holds whole rows in order, whatever its disk does; lost ones are counted, a removed
file is written anew, and a later start doubles no row.
"""

import os
import random
import shutil

import pytest

from megamix.base import log_file
from megamix.base.log_file import LogFile
from megamix.config import ConfigError
from megamix.launch.exit_status import SaveFailedError
from megamix.launch.run_status import read_status
from tests.builders import tiny_job
from tests.conftest import FULL as MANY
from tests.train.broken_disk import BROKEN, FULL, NO_INODES, broken_disk
from tests.train.outcome import differences, end_of
from tests.train.recorded import run_recorded

STORIES = 2000 if MANY else 20


def _log(folder):
    return LogFile(folder / "log")


def _rows(count):
    return [f"row {number}\n".encode() for number in range(count)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(log_file, "LAST_WAIT_S", 0.0)


@pytest.mark.parametrize("seed", range(0, STORIES, 20))
def test_no_row_is_lost_torn_or_doubled_by_a_disk_that_takes_it_later(tmp_path, seed):
    for number in range(seed, seed + 20):
        story, folder = random.Random(number), tmp_path / str(number)
        rows = _rows(20)
        with broken_disk(folder) as disk:
            log = _log(folder)
            for row in rows:
                disk.fault, disk.room = story.choice([FULL, BROKEN, None, None]), story.randrange(12)
                log.append(row)
                written = (folder / "log").read_bytes() if (folder / "log").exists() else b""
                # A reader finds whole rows at this moment, from the first on.
                assert written == b"".join(rows[: written.count(b"\n")])
            disk.fault = None
            log.close()
        assert (folder / "log").read_bytes() == b"".join(rows)


def test_a_trouble_is_told_once_with_its_file_and_again_when_it_is_over(tmp_path, caplog):
    with broken_disk(tmp_path) as disk:
        log = _log(tmp_path)
        log.append(b"0\n")
        disk.fault = FULL
        for row in (b"1\n", b"2\n", b"3\n"):
            log.append(row)
        disk.fault = None
        log.append(b"4\n")
        log.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/log NOT written: No space left on device; the run goes on, and its rows are held back",
        f"{tmp_path}/log is written again: 4 rows were late, 0 are lost",
    ]


def test_what_is_held_back_is_bounded_and_what_is_lost_is_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(log_file, "HELD_BYTES", 14)
    with broken_disk(tmp_path) as disk:
        log = _log(tmp_path)
        disk.fault = BROKEN
        for row in _rows(5):  # 6 bytes each
            log.append(row)
        disk.fault = None
        log.append(b"the last\n")
        assert caplog.messages[-1].endswith("log is written again: 6 rows were late, 3 are lost")
    assert (tmp_path / "log").read_bytes() == b"row 3\nrow 4\nthe last\n"


def test_what_the_disk_never_takes_is_counted_at_the_end(tmp_path, caplog):
    with broken_disk(tmp_path) as disk:
        log = _log(tmp_path)
        disk.fault = NO_INODES
        for row in _rows(3):
            log.append(row)
        log.close()
    assert caplog.messages[-1] == f"{tmp_path}/log: the last 3 rows could not be written and are lost"


@pytest.mark.parametrize("with_its_folder", [False, True])
def test_a_file_that_vanished_is_made_anew(tmp_path, with_its_folder):
    path = tmp_path / "run/log"
    log = _log(path.parent)
    log.append(b"1\n")
    shutil.rmtree(path.parent) if with_its_folder else path.unlink()
    log.append(b"2\n")
    log.close()
    assert path.read_bytes() == b"2\n"


def test_a_file_that_was_emptied_or_edited_goes_on(tmp_path):
    path = tmp_path / "log"
    log = _log(tmp_path)
    log.append(b"1\n")
    os.truncate(path, 0)
    log.append(b"2\n")
    edited = tmp_path / "edited"
    edited.write_bytes(b"2 and a note\n")
    edited.rename(path)  # editors save like this
    log.append(b"3\n")
    log.close()
    assert path.read_bytes() == b"2 and a note\n3\n"


def test_a_new_file_begins_with_its_head(tmp_path):
    log = LogFile(tmp_path / "log", head=b"head ")
    log.append(b"1\n")
    log.append(b"2\n")
    log.path.unlink()
    log.append(b"3\n")
    log.close()
    assert log.path.read_bytes() == b"head 3\n"


TRIALS = range(20 if MANY else 1)  # trials of each fault
FAULTS = [(FULL,), (BROKEN,), (NO_INODES,)] if MANY else [(FULL, BROKEN, NO_INODES)]  # one after the other
STEPS = 10


def _run(folder, data, before=lambda plan: None, crash_at=None, **settings):
    """Run the job, with an overflow, and with a sample of the sixth batch that sets it aside."""
    own = {"num_layers": 1, "max_retries": 1, "steps": STEPS, "eval_interval": 4, "micro_batch_size": 8}
    own |= {"save_interval": 3, "async_save": False, "max_restarts": 1000, "precision_interval": 2, "log_interval": 1}
    job = tiny_job(folder, tokens=data, **own | settings)
    run_recorded(job, frozenset({2}), frozenset({41}), before=before, crash_at=crash_at)


def _all_of(folder):
    """Return everything that must be equal to a run's on a disk that works."""
    return {**end_of(folder), "set aside": (folder / "run/set_aside.jsonl").read_text()}


def _state(folder):
    return read_status(folder / "run").state


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("whole")
    _run(folder, data)
    ended = _all_of(folder)
    assert [row["step"] for row in ended["metrics"] if "train/loss" in row] == list(range(1, STEPS + 1))
    assert ended["set aside"].count("\n") == 1
    return ended


def _fails(disk, faults, room=0):
    """Return a function that puts the disk into the given state from each of these attempts on."""

    def before(plan):
        if plan.launched in faults:
            disk.fault, disk.room = faults[plan.launched], room

    return before


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("trial", TRIALS)
def test_a_disk_that_fails_for_a_while_costs_no_row(tmp_path, data, whole, faults, trial):
    rng = random.Random(trial)
    at = sorted(rng.sample(range(STEPS + 1), 2 * len(faults)))
    if len(faults) == 1:  # long enough for rows, and for a save, which needs a new file
        at = [start := rng.randrange(5), start + 6]
    changes = dict(zip(at, [change for fault in faults for change in (fault, None)], strict=True))
    with broken_disk(tmp_path / "run") as disk:
        _run(tmp_path, data, _fails(disk, changes, room=rng.randrange(300)), tensorboard=True)
        assert disk.refused
    assert differences(_all_of(tmp_path), whole) == []
    assert _state(tmp_path) == "finished"


@pytest.mark.parametrize(("policy", "updates"), [("continue", STEPS), ("stop", 7)])  # asked at the save after update 6
def test_on_a_disk_that_is_full_for_good_it_goes_on_until_a_save_is_due(tmp_path, data, capsys, policy, updates):
    with broken_disk(tmp_path / "run") as disk, pytest.raises(SaveFailedError):
        _run(tmp_path, data, _fails(disk, {4: FULL}, room=100), on_save_failure=policy)
    status = read_status(tmp_path / "run")  # in place, where it needs no new space
    assert (status.state, status.exit_status, status.update) == ("failed", 1, updates)
    assert status.reason.startswith("the last checkpoint could not be")
    assert f"No space left on device: '{tmp_path / 'run/checkpoints'}" in status.reason
    assert "journal.jsonl NOT written" not in capsys.readouterr().err


def test_on_a_disk_that_takes_nothing_the_end_is_told_on_the_console(tmp_path, data, capsys):
    with broken_disk(tmp_path / "run") as disk, pytest.raises(SaveFailedError):
        _run(tmp_path, data, _fails(disk, {4: BROKEN}))
    assert _state(tmp_path) == "running"  # the status from before the disk was broken
    (words,) = [line for line in capsys.readouterr().err.splitlines() if "journal.jsonl NOT written" in line]
    assert f"NOT written: [Errno 5] Input/output error: '{tmp_path / 'run/journal.jsonl'}" in words
    assert f"the run ended as failed (exit status 1) after update {STEPS}: the last checkpoint could not be" in words


def _killed(folder, data, monkeypatch, crash_at, faults, room=0, removed=False):
    """Run the job until it is killed, on a disk that fails: rows that are held back die with the process."""
    with broken_disk(folder / "run", only=".jsonl") as disk, monkeypatch.context() as dead:
        dead.setattr(LogFile, "close", lambda log, *, waits=True: None)
        fails = _fails(disk, faults, room)

        def before(plan):
            fails(plan)
            if plan.launched == 9 and removed:
                (folder / "run/metrics.jsonl").unlink()

        _run(folder, data, before, crash_at)


def test_rows_that_were_late_at_a_save_are_kept_by_the_next_start(tmp_path, data, whole, monkeypatch):
    # The save after update 6 comes while rows wait.
    _killed(tmp_path, data, monkeypatch, 10, {4: FULL, 8: None}, room=50)
    _run(tmp_path, data)
    assert differences(_all_of(tmp_path), whole) == []


@pytest.mark.parametrize("how", ["lost", "removed", "never written"] if MANY else ["lost and removed"])
def test_a_start_after_rows_were_lost_doubles_none(tmp_path, data, whole, monkeypatch, how):
    if "lost" in how:
        monkeypatch.setattr(log_file, "HELD_BYTES", 700)
    faults = {4: BROKEN} if how == "never written" else {4: BROKEN, 9: None}
    _killed(tmp_path, data, monkeypatch, 11, faults, removed="removed" in how)
    _run(tmp_path, data)
    ended = end_of(tmp_path)
    assert ended["files"] == whole["files"]
    left = iter(whole["metrics"])
    assert all(row in left for row in ended["metrics"])  # in order, each once
    assert [row["step"] for row in ended["metrics"] if "train/loss" in row][-4:] == [7, 8, 9, 10]


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path, data):
    (tmp_path / "run").mkdir()
    with broken_disk(tmp_path / "run") as disk:
        disk.fault = FULL
        with pytest.raises(ConfigError, match="No space left on device"):
            _run(tmp_path, data)


def test_a_trace_that_cannot_be_written_is_told(tmp_path, data, capsys):
    (tmp_path / "run/trace_rank0.json").mkdir(parents=True)
    _run(tmp_path, data, profiling={"start_step": 1, "num_steps": 1})
    assert f"{tmp_path / 'run/trace_rank0.json'} NOT written: [Errno 21] Is a directory" in capsys.readouterr().out
    assert _state(tmp_path) == "finished"
