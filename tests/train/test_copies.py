"""Finished checkpoints are taken elsewhere beside training, each once, and a run goes on from them; a target that is
full, hung or another run's is told, ends no run and changes none of its bits. Checkpoints of every keep_every-th update
are saved and stay, beside the newest, over stops and damage; the log says so.
"""

import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megamix.base.durable import write_text
from megamix.checkpoint.folder import applied_updates, checkpoints
from megamix.cli.verbs import main
from megamix.config import ConfigError
from megamix.launch.exit_status import PreemptedError
from megamix.launch.run_folder import checkpoint_words
from megamix.launch.run_lock import run_lock
from megamix.launch.run_status import read_status
from megamix.train import checkpointing, copies
from megamix.train.check import check
from megamix.train.copies import Copier, takes_of
from megamix.train.judge import describe_start
from megamix.train.trainer import Trainer
from tests.builders import run_on_ranks, tiny_job
from tests.checkpoint.state import save_steps
from tests.train.broken_disk import FULL, broken_disk
from tests.train.outcome import differences, end_of
from tests.train.recorded import run_recorded

WAIT_S = 60.0
NOT_FINISHED = "copies of checkpoints are NOT finished; `megamix checkpoint copy` makes the rest"


class Elsewhere:
    """A place that takes the checkpoints of a folder, or fails. `begun` and `tried` are released at either end of each
    try.
    """

    def __init__(self):
        self.fault = None
        self.lines = []
        self.begun, self.tried = threading.Semaphore(0), threading.Semaphore(0)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def take(self, path):
        self.begun.release()
        try:
            self.may_go_on.wait(WAIT_S)
            if self.fault is not None:
                raise self.fault
            return f"took {path.name}"
        finally:
            self.tried.release()

    def copier(self, folder, *steps):
        self.folder = folder
        self.save(*steps)
        return Copier(folder, self.take, self.lines.append)

    def save(self, *steps):
        for step in steps:
            (self.folder / f"step_{step:08d}").mkdir()


def _wait(for_one):
    assert for_one.acquire(timeout=WAIT_S)


def _ends(copier):
    copier.close()
    return copier.ends_within(WAIT_S)


def test_the_newest_is_taken_first_and_each_once(tmp_path):
    elsewhere = Elsewhere()
    elsewhere.may_go_on.clear()
    copier = elsewhere.copier(tmp_path, 1, 2)
    _wait(elsewhere.begun)
    elsewhere.save(3)
    elsewhere.may_go_on.set()
    _wait(elsewhere.tried)
    copier.wake()
    assert _ends(copier)
    assert elsewhere.lines == [f"took step_0000000{step}" for step in (2, 3, 1)]


def test_a_failure_is_told_once_and_tried_again_until_it_succeeds(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "RETRY_S", 0.001)
    elsewhere = Elsewhere()
    elsewhere.fault = OSError("the target is away")
    copier = elsewhere.copier(tmp_path, 1)
    for _ in range(3):
        _wait(elsewhere.tried)
    elsewhere.fault = None
    assert _ends(copier)
    told = "checkpoint NOT copied, which is tried again: the target is away"
    assert elsewhere.lines == [told, "took step_00000001"]


def test_a_damaged_one_is_left_out_and_a_removed_one_is_no_failure(tmp_path):
    elsewhere = Elsewhere()
    elsewhere.fault = ValueError("its checksum")
    copier = elsewhere.copier(tmp_path, 1)
    _wait(elsewhere.tried)
    elsewhere.may_go_on.clear()
    elsewhere.fault = FileNotFoundError("gone")
    elsewhere.save(2)
    copier.wake()
    _wait(elsewhere.begun)
    _wait(elsewhere.begun)
    shutil.rmtree(tmp_path / "step_00000002")
    elsewhere.may_go_on.set()
    assert _ends(copier)
    assert elsewhere.lines == ["checkpoint NOT copied: its checksum"]


def _config(folder, data, steps=12, **settings):
    own = {"num_layers": 1, "steps": steps, "eval_interval": 0, "save_interval": 3, "precision_interval": 0}
    return tiny_job(folder, tokens=data, **own | settings)


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    run_on_ranks(_config(folder, data))
    return end_of(folder)


def _updates(folder):
    return [applied_updates(path) for path in checkpoints(folder / "checkpoints")]


def test_a_run_goes_on_bit_for_bit_from_the_copies_of_a_lost_one(tmp_path, data, run_ranks):
    copied = tmp_path / "elsewhere/copies"
    pipeline = {"num_layers": 2, "pipeline": {"size": 2}}
    config = _config(tmp_path, data, 6, **pipeline, copies={"folder": str(copied), "keep": 1}, keep_every=3)
    assert checkpoint_words(config.checkpoint, config.pace.steps).endswith(f"; copied to {copied}")
    run_ranks(run_on_ranks, 2, config)
    whole = end_of(tmp_path)
    assert _updates(copied) == [6, 3]
    shutil.rmtree(tmp_path / "run/checkpoints")
    shutil.copytree(copied / "checkpoints/step_00000003", tmp_path / "run/checkpoints/step_00000003")
    run_ranks(run_on_ranks, 2, config)
    assert read_status(tmp_path / "run").start == 3
    assert differences(end_of(tmp_path), whole) == []
    assert not (copied / "run.lock").exists()


@pytest.mark.parametrize("why", ["No space left on device", "is in use by pid"])
def test_a_target_in_trouble_is_told_and_ends_no_run(tmp_path, data, plain, capsys, why):
    target = tmp_path / "copies"
    target.mkdir()
    with run_lock(target, lambda line: None) if "pid" in why else broken_disk(target) as disk:
        if disk is not None:
            disk.fault = FULL
        run_on_ranks(_config(tmp_path, data, copies={"folder": str(target)}))
    told = capsys.readouterr().out
    (line,) = (line for line in told.splitlines() if "checkpoint NOT copied" in line)
    assert why in line
    assert str(target) in line
    assert told.count(NOT_FINISHED) == 1
    assert differences(end_of(tmp_path), plain) == []
    assert read_status(tmp_path / "run").state == "finished"


def test_a_target_that_hangs_is_left_behind_at_the_end(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(checkpointing, "COPIES_S", 0.01)
    elsewhere = Elsewhere()
    elsewhere.may_go_on.clear()
    monkeypatch.setattr(checkpointing, "takes_of", lambda *arguments: [elsewhere.take])
    run_on_ranks(_config(tmp_path, data, copy_command=["unused"]))
    elsewhere.may_go_on.set()
    assert NOT_FINISHED in capsys.readouterr().out
    assert len(checkpoints(tmp_path / "run/checkpoints")) == 3, "one is not removed, as it is being copied"


def _take(config):
    (take,) = takes_of(config.checkpoint, config.text, lambda path: False, lambda line: None)
    return take


def test_a_program_takes_checkpoints_and_its_last_line_says_why_it_failed(tmp_path, data):
    program = [sys.executable, "-c", "import sys; open(sys.argv[1] + '/' + sys.argv[2], 'x')", "{path}", "{name}"]
    take = _take(_config(tmp_path, data, copy_command=program))
    assert take(tmp_path) == f"copied {tmp_path.name} by {sys.executable}"
    assert (tmp_path / tmp_path.name).exists()
    with pytest.raises(OSError, match=r"ended with 1: FileExistsError: \[Errno 17\]"):
        take(tmp_path)
    with pytest.raises(OSError, match="no such program"):
        _take(_config(tmp_path, data, copy_command=["no such program"]))(tmp_path)


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    save_steps(tmp_path / "run/checkpoints", [1])
    return tmp_path / "run/checkpoints/step_00000001"


def test_the_folder_of_another_run_is_refused(tmp_path, data, checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")
    shared, two = tmp_path / "copies", tmp_path / "two"
    shared.mkdir()
    (shared / "config.toml.partial-0").touch()  # of a start that was killed
    _take(_config(tmp_path, data, copies={"folder": str(shared)}))(checkpoint)
    assert {path.name for path in shared.iterdir()} == {"checkpoints", "config.toml"}
    check(_config(two, data, copies={"folder": str(tmp_path / "no copies yet")}))
    told = f"{shared} has copies of another run, {tmp_path}/run"
    other = _config(two, data, copies={"folder": str(shared)})
    with pytest.raises(ConfigError, match=f"copies.folder: {told}; write another folder"):
        check(other)
    with pytest.raises(OSError, match=told):
        _take(other)(checkpoint)
    with pytest.raises(ConfigError, match=r"copies.folder: .* is checkpoint.folder itself; write another folder"):
        check(_config(two, data, copies={"folder": str(two / "run")}))
    shutil.copytree(tmp_path / "run", two / "run")
    write_text(two / "run/config.toml", other.text)
    for source in ("run", "run/checkpoints", "run/checkpoints/step_00000001"):
        assert main(["checkpoint", "copy", str(two / source), str(shared)]) == 2
        assert told in capsys.readouterr().err
    assert _updates(shared) == [1]
    assert main(["checkpoint", "copy", str(shared), str(tmp_path / "back")]) == 0  # a lost run comes back


def test_a_target_whose_file_system_is_gone_gets_no_copies_in_its_place(tmp_path, data, checkpoint):
    target = tmp_path / "copies"
    take = _take(_config(tmp_path, data, copies={"folder": str(target)}))
    take(checkpoint)
    shutil.rmtree(target)
    target.mkdir()  # empty, as where nothing is mounted any more
    stat, other = Path.stat, SimpleNamespace(st_dev=target.stat().st_dev + 1)
    told = f"{target} lies on another file system than before; mount it again"
    with (
        mock.patch.object(Path, "stat", lambda path, **keys: other if path == target else stat(path, **keys)),
        pytest.raises(OSError, match=told),
    ):
        take(checkpoint)
    assert checkpoints(target / "checkpoints") == []


def test_kept_ones_stay_over_a_stop_and_damage_and_change_no_bit(tmp_path, data, plain, capsys):
    config = _config(tmp_path, data, save_interval=5, keep_every=4)
    run_recorded(config, leave_at=4)
    words = "checkpoints: one after every 4 updates stays, 3 by update 12, beside the newest 2"
    assert words in capsys.readouterr().out
    newest, *_ = checkpoints(tmp_path / "run/checkpoints")
    assert 5 < applied_updates(newest) < 8
    (newest / "manifest.json").write_text("{}")
    run_on_ranks(config)
    assert "after update 5" in capsys.readouterr().out
    assert _updates(tmp_path / "run") == [12, 10, 8, 4]
    assert differences(end_of(tmp_path), plain) == []


def test_kept_ones_are_the_only_ones_beside_the_last_where_no_other_save_is_due(tmp_path, data):
    config = _config(tmp_path, data, 7, save_interval=0, keep_every=3, async_save=False)
    run_on_ranks(config)
    assert _updates(tmp_path / "run") == [7, 6, 3]
    assert describe_start(config)[0].endswith(f"\n  {checkpoint_words(config.checkpoint, config.pace.steps)}")
    assert checkpoint_words(_config(tmp_path, data).checkpoint, 8) == ""


def test_of_two_after_one_update_only_the_last_stays(tmp_path, data):
    config = _config(tmp_path, data, 9, keep_every=3, eval_interval=3)
    asked = Trainer._leave_if_asked

    def in_validation(trainer, leave):
        leave.ask(signal.SIGTERM)
        asked(trainer, leave)

    with mock.patch.object(Trainer, "_leave_if_asked", in_validation), pytest.raises(PreemptedError):
        run_on_ranks(config)
    run_on_ranks(config)  # it validates after update 3, and saves once more
    names = [path.name for path in checkpoints(tmp_path / "run/checkpoints")]
    assert names == ["step_00000009", "step_00000006", "step_00000003.1"]
