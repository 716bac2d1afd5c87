"""Whoever starts the same job twice: a run folder has one job at a time: a second job is refused with the holder's
name, and the lock of a dead job is taken over.
"""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from megamix.config import ConfigError
from megamix.supervise.run_lock import LOCK, refuse_held, run_lock


def _no_line(line):
    raise AssertionError(line)


def _leave(folder, **holder):
    path = folder / LOCK
    path.write_text(json.dumps({"host": os.uname().nodename, "pid": 1, "start": "0", "since": "noon"} | holder))
    return path


def _dead_pid():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def _hold(folder, pipe):
    try:
        with run_lock(folder, _no_line):
            pipe.send("held")
            pipe.recv()
    except ConfigError as error:
        pipe.send(str(error))


@pytest.fixture
def without_flock(monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.EOPNOTSUPP, "no flock here")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_second_job_is_refused_with_the_holder_s_name(tmp_path):
    with run_lock(tmp_path, _no_line), pytest.raises(ConfigError) as refused, run_lock(tmp_path, _no_line):
        pass
    (line,) = refused.value.problems
    assert refused.value.exit_status == 75  # the same start may succeed later
    assert line.startswith(
        f"checkpoint.folder: {tmp_path} is in use by pid {os.getpid()} on {os.uname().nodename} since 20"
    )
    assert line.endswith("; end that job first, or write another folder")
    with run_lock(tmp_path, _no_line):  # the refusal has not touched the lock, and its end leaves nothing
        pass
    assert list(tmp_path.iterdir()) == []


def test_who_only_looks_refuses_a_holder_and_nobody_who_looks_as_well(tmp_path):
    with run_lock(tmp_path, _no_line), pytest.raises(ConfigError, match=f"in use by pid {os.getpid()} "):
        refuse_held(tmp_path)
    with _leave(tmp_path, pid=_dead_pid()).open() as looking:  # as another node's start does in this very moment
        fcntl.flock(looking, fcntl.LOCK_SH)
        refuse_held(tmp_path)


def test_a_holder_that_is_stopped_is_said_to_be(tmp_path):
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    holder = context.Process(target=_hold, args=(tmp_path, theirs))
    holder.start()
    assert mine.recv() == "held"
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)
    with (
        pytest.raises(
            ConfigError, match=rf"pid {holder.pid} .*, which is stopped: kill -CONT continues it; end that job"
        ),
        run_lock(tmp_path, _no_line),
    ):
        pass
    holder.kill()
    holder.join()


def test_of_two_that_start_at_once_one_is_refused(tmp_path):
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for _ in range(4):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_hold, args=(tmp_path, theirs)))
        pipes.append(mine)
    for process in processes:
        process.start()
    answers = [pipe.recv() for pipe in pipes]
    assert sorted(answer == "held" for answer in answers) == [False, False, False, True]
    assert all("is in use by" in answer for answer in answers if answer != "held")
    pipes[answers.index("held")].send("done")
    for process in processes:
        process.join()


def test_the_lock_of_a_job_that_failed_is_gone(tmp_path):
    with pytest.raises(OSError, match="disk"), run_lock(tmp_path, _no_line):
        raise OSError("disk")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flock", ["with flock", "without"])
def test_the_lock_of_a_dead_pid_is_taken_over_with_one_line(tmp_path, flock, request):
    if flock == "without":
        request.getfixturevalue("without_flock")
    dead = _dead_pid()
    path = _leave(tmp_path, pid=dead)
    lines = []
    with run_lock(tmp_path, lines.append):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert lines == [f"{path}: taken over from pid {dead} on {os.uname().nodename}, which left it behind"]


def test_a_pid_that_now_belongs_to_another_process_is_dead(tmp_path, without_flock):
    _leave(tmp_path, pid=os.getpid(), start="1")
    lines = []
    with run_lock(tmp_path, lines.append):
        assert len(lines) == 1


def test_a_file_cut_short_by_the_death_of_its_writer_is_taken(tmp_path):
    (tmp_path / LOCK).write_text('{"host": "a", "p')
    with run_lock(tmp_path, _no_line):
        pass


@pytest.mark.usefixtures("without_flock")
def test_a_living_holder_is_respected_without_flock(tmp_path):
    with run_lock(tmp_path, _no_line), pytest.raises(ConfigError, match="is in use by pid"), run_lock(tmp_path, print):
        pass


def test_a_holder_on_another_host_is_stale_once_it_has_not_touched_the_file_for_a_while(tmp_path):
    _leave(tmp_path, host="node7", pid=12)
    lines = []
    start_s = time.monotonic()
    with run_lock(tmp_path, lines.append, stale_s=0.2):
        assert time.monotonic() - start_s > 0.2
    assert lines == [f"{tmp_path / LOCK}: taken over from pid 12 on node7, which left it behind"]


@pytest.mark.usefixtures("without_flock")
def test_a_holder_on_another_host_that_touches_the_file_is_respected(tmp_path, monkeypatch):
    with run_lock(tmp_path, _no_line, stale_s=0.3):
        monkeypatch.setattr("socket.gethostname", lambda: "node8")
        with pytest.raises(ConfigError, match="is in use by pid"), run_lock(tmp_path, print, stale_s=30.0):
            pass


@pytest.mark.parametrize("junk", ['{"host": "HOST", "pid": "x", "start": "1", "since": "now"}', '{"host": "no'])
def test_what_no_holder_has_written_is_taken(tmp_path, junk):
    (tmp_path / "run.lock").write_text(junk.replace("HOST", socket.gethostname()))
    with run_lock(tmp_path, print):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
