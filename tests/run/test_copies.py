"""Finished checkpoints are taken elsewhere beside training, each once, and a run goes on from them; a target that is
full, gone, hung or another run's is told, ends no run and changes none of its bits.
"""

import json
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from megamix.checkpoint.folder import applied_updates, checkpoints
from megamix.cli import main
from megamix.config import ConfigError, config_to_toml
from megamix.durable import write_text
from megamix.run import checkpointing, copies
from megamix.run.copies import Copier, takes_of
from megamix.run.run_folder import check, checkpoint_words, copy_problems
from megamix.supervise.run_lock import run_lock
from tests.builders import run_on_ranks, tiny_job
from tests.checkpoint.state import save_steps
from tests.train.broken_disk import FULL, broken_disk
from tests.train.outcome import differences, end_of

WAIT_S = 60.0
NOT_FINISHED = "copies of checkpoints are NOT finished; `megamix checkpoint copy` makes the rest"


class Elsewhere:
    """A place that takes checkpoints, or fails. `begun` and `tried` are released at either end of each try."""

    def __init__(self):
        self.fault = None
        self.names = []
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
            self.names.append(path.name)
            return f"took {path.name}"
        finally:
            self.tried.release()


def _wait(for_one):
    assert for_one.acquire(timeout=WAIT_S)


@pytest.fixture
def elsewhere():
    return Elsewhere()


def _save(folder, *steps):
    for step in steps:
        (folder / f"step_{step:08d}").mkdir(parents=True)


def _ends(copier):
    copier.close()
    return copier.ends_within(WAIT_S)


def test_the_newest_is_taken_first_and_each_once(tmp_path, elsewhere):
    elsewhere.may_go_on.clear()
    _save(tmp_path, 1, 2)
    copier = Copier(tmp_path, elsewhere.take, elsewhere.lines.append)
    _wait(elsewhere.begun)
    _save(tmp_path, 3)
    elsewhere.may_go_on.set()
    _wait(elsewhere.tried)
    copier.wake()
    assert _ends(copier)
    assert elsewhere.names == ["step_00000002", "step_00000003", "step_00000001"]
    assert elsewhere.lines == [f"took {name}" for name in elsewhere.names]


def test_a_failure_is_told_once_and_tried_again_until_it_succeeds(tmp_path, elsewhere, monkeypatch):
    monkeypatch.setattr(copies, "RETRY_S", 0.001)
    elsewhere.fault = OSError("the target is away")
    _save(tmp_path, 1)
    copier = Copier(tmp_path, elsewhere.take, elsewhere.lines.append)
    for _ in range(3):
        _wait(elsewhere.tried)
    elsewhere.fault = None
    assert _ends(copier)
    told = "checkpoint NOT copied, which is tried again: the target is away"
    assert elsewhere.lines == [told, "took step_00000001"]


def test_a_damaged_one_is_left_out_and_a_removed_one_is_no_failure(tmp_path, elsewhere):
    elsewhere.fault = ValueError("its checksum")
    _save(tmp_path, 1)
    copier = Copier(tmp_path, elsewhere.take, elsewhere.lines.append)
    _wait(elsewhere.tried)
    elsewhere.may_go_on.clear()
    elsewhere.fault = FileNotFoundError("gone")
    _save(tmp_path, 2)
    copier.wake()
    _wait(elsewhere.begun)
    _wait(elsewhere.begun)
    shutil.rmtree(tmp_path / "step_00000002")
    elsewhere.may_go_on.set()
    assert _ends(copier)
    assert elsewhere.lines == ["checkpoint NOT copied: its checksum"]


def _config(folder, data, own=None, **checkpoint):
    return tiny_job(
        folder,
        own or {"model": {"num_layers": 1}},
        tokens=data,
        steps=12,
        eval_interval=0,
        checkpoint={"save_interval": 3, **checkpoint},
        precision_interval=0,
    )


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    run_on_ranks(_config(folder, data))
    return end_of(folder)


def _updates(folder):
    return [applied_updates(path) for path in checkpoints(folder / "checkpoints")]


def test_a_run_goes_on_bit_for_bit_from_the_copies_of_a_lost_one(tmp_path, data, run_ranks):
    copied = tmp_path / "elsewhere/copies"
    own = {"model": {"num_layers": 2}, "parallelism": {"pp_size": 2}}
    config = _config(tmp_path, data, own, copy_to=str(copied), copy_keep=1, keep_every=6)
    assert checkpoint_words(config).endswith(f"; copied to {copied}")
    run_ranks(run_on_ranks, 2, config)
    whole = end_of(tmp_path)
    assert _updates(copied) == [12, 6]
    shutil.rmtree(tmp_path / "run/checkpoints")
    shutil.copytree(copied / "checkpoints/step_00000006", tmp_path / "run/checkpoints/step_00000006")
    run_ranks(run_on_ranks, 2, config)
    assert json.loads((tmp_path / "run/status.json").read_text())["start"] == 6
    assert differences(end_of(tmp_path), whole) == []
    assert not (copied / "run.lock").exists()


@pytest.mark.parametrize("trouble", ["full", "gone", "held"])
def test_a_target_in_trouble_is_told_and_ends_no_run(tmp_path, data, plain, capsys, trouble):
    target = tmp_path / "copies"
    target.mkdir()
    config = _config(tmp_path, data, copy_to=str(target))
    if trouble == "full":
        with broken_disk(target) as disk:
            disk.fault = FULL
            run_on_ranks(config)
    elif trouble == "gone":
        target.rmdir()
        target.write_text("no folder")
        run_on_ranks(config)
    else:
        with run_lock(target, lambda line: None):
            run_on_ranks(config)
    told = capsys.readouterr().out
    lines = [line for line in told.splitlines() if "checkpoint NOT copied" in line]
    why = {"full": "No space left on device", "gone": "copies", "held": f"{target} is in use by pid"}
    assert len(lines) == 1
    assert told.count(NOT_FINISHED) == 1
    assert why[trouble] in lines[0]
    assert differences(end_of(tmp_path), plain) == []
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"


def test_a_target_that_hangs_is_left_behind_at_the_end(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(checkpointing, "COPIES_S", 0.01)
    elsewhere = Elsewhere()
    elsewhere.may_go_on.clear()
    monkeypatch.setattr(checkpointing, "takes_of", lambda *arguments: [elsewhere.take])
    run_on_ranks(_config(tmp_path, data, copy_command=["unused"]))
    elsewhere.may_go_on.set()
    assert NOT_FINISHED in capsys.readouterr().out
    assert len(checkpoints(tmp_path / "run/checkpoints")) == 3, "one is not removed, as it is being copied"


def test_the_verb_refuses_a_folder_with_copies_of_another_run(tmp_path, capsys):
    target = tmp_path / "copies"
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
        save_steps(tmp_path / name / "run/checkpoints", [1])
        write_text(tmp_path / name / "run/config.toml", config_to_toml(tiny_job(tmp_path / name)))
    words = ["checkpoint", "copy"]
    assert main([*words, str(tmp_path / "a/run"), str(target)]) == 0
    for source in ("b/run", "b/run/checkpoints", "b/run/checkpoints/step_00000001"):
        assert main([*words, str(tmp_path / source), str(target)]) == 2
        assert f"{target} has copies of another run, {tmp_path / 'a/run'}" in capsys.readouterr().err
    assert [path.name for path in checkpoints(target / "checkpoints")] == ["step_00000001"]
    other = tiny_job(tmp_path / "b", copy_to=str(target))
    assert "has copies of another run" in "".join(copy_problems(other))
    assert main([*words, str(target), str(tmp_path / "back")]) == 0  # a lost run comes back


def _take(config):
    (take,) = takes_of(config, lambda path: False, lambda line: None)
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


def test_the_folder_of_another_run_is_refused(tmp_path, data, checkpoint, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    shared = str(tmp_path / "copies")
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies/config.toml.partial-0").touch()  # of a start that was killed
    _take(_config(tmp_path, data, copy_to=shared))(checkpoint)
    assert {path.name for path in (tmp_path / "copies").iterdir()} == {"checkpoints", "config.toml"}
    check(_config(tmp_path / "new", data, copy_to=str(tmp_path / "no copies yet")))
    other = _config(tmp_path / "two", data, copy_to=shared)
    told = f"copy_to: {shared} has copies of another run, {tmp_path}/run; write another folder"
    with pytest.raises(ConfigError, match=told):
        check(other)
    with pytest.raises(OSError, match=told):
        _take(other)(checkpoint)
    with pytest.raises(ConfigError, match=r"copy_to: .* is checkpoint.folder itself; write another folder"):
        check(_config(tmp_path / "two", data, copy_to=str(tmp_path / "two/run")))


def test_a_target_whose_file_system_is_gone_gets_no_copies_in_its_place(tmp_path, data, checkpoint):
    mounted, empty, target = Path(tempfile.mkdtemp(dir="/dev/shm")), tmp_path / "empty", tmp_path / "copies"
    try:
        if mounted.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("one file system")
        empty.mkdir()
        target.symlink_to(mounted)
        take = _take(_config(tmp_path, data, copy_to=str(target)))
        take(checkpoint)
        target.unlink()
        target.symlink_to(empty)
        with pytest.raises(OSError, match=f"{target} lies on another file system than before; mount it again"):
            take(checkpoint)
        assert checkpoints(empty / "checkpoints") == []
    finally:
        shutil.rmtree(mounted)
