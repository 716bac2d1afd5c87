"""A disk that is full, broken or out of inodes for a while loses a run no row; if it stays so, the run ends at a save
with the true exit status. Removed logs are written anew; a later start doubles no row.
"""

import json
import math
import os
import random
import shutil
import time
from contextlib import contextmanager, suppress
from unittest import mock

import pytest

from megamix.config import ConfigError
from megamix.report import log_file
from megamix.report.log_file import LogFile
from megamix.supervise.status import SaveFailedError
from tests.builders import run_on_ranks, tiny_job
from tests.conftest import FULL as MANY
from tests.train.broken_disk import BROKEN, FULL, NO_INODES, broken_disk
from tests.train.outcome import differences, end_of, metrics_of
from tests.train.recorded import Crash, Record, attempts_recorded, crash_contained, overflows_injected

TRIALS = range(20 if MANY else 1)  # trials of each fault
FAULTS = [(FULL,), (BROKEN,), (NO_INODES,)] if MANY else [(FULL, BROKEN, NO_INODES)]  # one after the other
STEPS = 10
BAD_SAMPLE = 41  # in the sixth batch, which is set aside


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(log_file, "LAST_WAIT_S", 0.0)


def _config(folder, data, **sections):
    own = {
        "model": {"num_layers": 1},
        "precision": {"loss_scale": {"init_scale": 2.0**10}, "max_retries": 1},
        "training": {"steps": STEPS, "eval_interval": 4, "micro_batch_size": 8},
        "checkpoint": {"save_interval": 3, "async_save": False, "max_restarts": 1000},
        "metrics": {"precision_interval": 2, "log_interval": 1},
    }
    return tiny_job(folder, own, tokens=data, **sections)


def _run(config, before=lambda plan: None):
    """Run the job, with an overflow that sets a batch aside. `before`: called before each attempt."""
    record = Record()
    with attempts_recorded(record, before), overflows_injected(record, frozenset({2}), frozenset({BAD_SAMPLE})):
        run_on_ranks(config)


def _all_of(folder):
    """Return everything that must be equal to a run's on a disk that works."""
    return {**end_of(folder), "set aside": (folder / "run/set_aside.jsonl").read_text()}


def _status(folder):
    values = json.loads((folder / "run/status.json").read_text())
    return values


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("whole")
    _run(_config(folder, data))
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
        config = _config(tmp_path, data, metrics={"tensorboard": True})
        _run(config, _fails(disk, changes, room=rng.randrange(300)))
        assert disk.refused
    assert differences(_all_of(tmp_path), whole) == []
    assert _status(tmp_path)["state"] == "finished"


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_on_a_disk_that_is_full_for_good_it_goes_on_until_a_save_is_due(tmp_path, data, capsys, policy):
    config = _config(tmp_path, data, checkpoint={"on_save_failure": policy})
    with broken_disk(tmp_path / "run") as disk, pytest.raises(SaveFailedError):
        _run(config, _fails(disk, {4: FULL}, room=100))
    assert _status(tmp_path)["state"] == "running"  # the status from before the disk was full
    (words,) = [line for line in capsys.readouterr().err.splitlines() if "status.json NOT written" in line]
    updates = STEPS if policy == "continue" else 7  # asked to leave at the save after update 6
    assert f"NOT written: [Errno 28] No space left on device: '{tmp_path / 'run/status.json'}" in words
    assert f"the run ended as failed (exit status 1) after update {updates}: the last checkpoint could not be" in words
    assert f"No space left on device: '{tmp_path / 'run/checkpoints'}" in words


def _remove_tensorboard(run):
    shutil.rmtree(run / "tensorboard")


def _remove_metrics(run):
    (run / "metrics.jsonl").unlink()


def _remove_all(run):
    shutil.rmtree(run)


REMOVALS = [_remove_tensorboard, _remove_metrics, _remove_all]


@pytest.mark.parametrize("removals", [(remove,) for remove in REMOVALS] if MANY else [REMOVALS])
@pytest.mark.parametrize("trial", TRIALS)
def test_logs_that_somebody_removes_are_made_anew(tmp_path, data, whole, caplog, removals, trial):
    at = sorted(random.Random(trial).sample(range(3, STEPS), len(removals)))

    def before(plan):
        if plan.launched in at:
            removals[at.index(plan.launched)](tmp_path / "run")

    _run(_config(tmp_path, data, metrics={"tensorboard": True}), before)
    ended = end_of(tmp_path)
    rows = len(ended["metrics"])
    assert ended["metrics"] == whole["metrics"][-rows:]
    assert rows == len(whole["metrics"]) or removals != (_remove_tensorboard,)
    assert ended["files"] == whole["files"]
    assert list((tmp_path / "run/tensorboard").iterdir())
    assert any("was removed while the run goes on; it is created again" in line for line in caplog.messages)


@contextmanager
def _killed():
    """Rows that are held back die with the process."""
    with mock.patch.object(LogFile, "close", lambda log, *, waits=True: None), crash_contained():
        yield


def test_rows_that_were_late_at_a_save_are_kept_by_the_next_start(tmp_path, data, whole):
    with broken_disk(tmp_path / "run", only=".jsonl") as disk, _killed():
        fails = _fails(disk, {4: FULL, 8: None}, room=50)  # the save after update 6 comes while rows wait

        def before(plan):
            fails(plan)
            if plan.launched == 10:
                raise Crash

        _run(_config(tmp_path, data), before)
    _run(_config(tmp_path, data))
    assert differences(_all_of(tmp_path), whole) == []


@pytest.mark.parametrize("how", ["lost", "removed", "never written"] if MANY else ["lost and removed"])
def test_a_start_after_rows_were_lost_doubles_none(tmp_path, data, whole, monkeypatch, how):
    if "lost" in how:
        monkeypatch.setattr(log_file, "HELD_BYTES", 700)

    with broken_disk(tmp_path / "run", only=".jsonl") as disk, _killed():
        fails = _fails(disk, {4: BROKEN} if how == "never written" else {4: BROKEN, 9: None})

        def before(plan):
            fails(plan)
            if plan.launched == 9 and "removed" in how:
                (tmp_path / "run/metrics.jsonl").unlink()
            if plan.launched == 11:
                raise Crash

        _run(_config(tmp_path, data), before)
    _run(_config(tmp_path, data))
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
            _run(_config(tmp_path, data))


def test_a_trace_that_cannot_be_written_is_told(tmp_path, data, capsys):
    config = _config(tmp_path, data, profiling={"start_step": 1, "num_steps": 1})
    (tmp_path / "run/trace_rank0.json").mkdir(parents=True)
    _run(config)
    assert f"{tmp_path / 'run/trace_rank0.json'} NOT written: [Errno 21] Is a directory" in capsys.readouterr().out
    assert _status(tmp_path)["state"] == "finished"


@pytest.fixture
def small_disk(tmp_path):
    """Yield a folder with a disk of its own, of 8 MB and 200 inodes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=8m,nr_inodes=200 megamix-test {folder} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    yield folder
    os.system(f"umount {folder}")


def _fill_bytes(ballast):
    with suppress(OSError), (ballast / "bytes").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _fill_inodes(ballast):
    with suppress(OSError):
        for number in range(1000):
            (ballast / str(number)).touch()


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize(
    ("fill", "seconds"), [(_fill_bytes, 0.2), (_fill_inodes, 0.2), *([(_fill_bytes, 2.0)] if MANY else [])]
)
def test_a_real_disk_that_is_full_for_a_while_costs_no_row(small_disk, tmp_path, data, whole, fill, seconds, trial):
    start = random.Random(trial).randrange(7)
    ballast = small_disk / "ballast"
    ballast.mkdir()
    full_s = math.inf  # time since when it is full

    def before(plan):
        nonlocal full_s
        if plan.launched == start:
            fill(ballast)
            full_s = time.monotonic()
        if plan.launched == start + 6:  # 6 of 13 attempts: all rows of several steps come while it is full
            time.sleep(max(0.0, full_s + seconds - time.monotonic()))
            shutil.rmtree(ballast)

    _run(_config(small_disk, data, metrics={"tensorboard": True}), before)
    assert differences(_all_of(small_disk), whole) == []


@pytest.mark.parametrize("trial", TRIALS)
def test_a_real_disk_that_is_full_for_good(small_disk, data, whole, capsys, trial):
    start = random.Random(trial).randrange(STEPS - 1)
    ballast = small_disk / "ballast"
    ballast.mkdir()

    def before(plan):
        if plan.launched >= start:
            _fill_bytes(ballast)

    with pytest.raises(SaveFailedError):
        _run(_config(small_disk, data, metrics={"tensorboard": True}), before)
    kept = metrics_of(small_disk)
    assert kept == whole["metrics"][: len(kept)]
    assert "the run ended as failed (exit status 1) after update 10: the last checkpoint" in capsys.readouterr().err
