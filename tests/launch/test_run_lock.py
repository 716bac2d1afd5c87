"""Whoever starts the same job twice: a run folder has one job at a time: a second job is refused with the holder's
name, and the lock of a dead job is taken over.
"""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from megamix.config import ConfigError
from megamix.launch.run_lock import LOCK, refuse_held, run_lock

HOST = os.uname().nodename


def _no_line(line):
    raise AssertionError(line)


def _leave(folder, **holder):
    """Leave a lock in the folder. Return what another job says that takes it over."""
    holder = {"host": HOST, "pid": 1, "start": "0", "since": "noon"} | holder
    (folder / LOCK).write_text(json.dumps(holder))
    return f"{folder / LOCK}: taken over from pid {holder['pid']} on {holder['host']}, which left it behind"


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
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.EOPNOTSUPP, "no flock here")))


def test_a_second_job_is_refused_with_the_holder_s_name(tmp_path):
    with run_lock(tmp_path, _no_line), pytest.raises(ConfigError) as refused, run_lock(tmp_path, _no_line):
        pass
    (line,) = refused.value.problems
    assert refused.value.exit_status == 75  # the same start may succeed later
    assert line.startswith(f"checkpoint.folder: {tmp_path} is in use by pid {os.getpid()} on {HOST} since 20")
    assert line.endswith("; end that job first, or write another folder")
    # The refusal has not touched the lock, and its end leaves nothing, even by a failure.
    with pytest.raises(OSError, match="disk"), run_lock(tmp_path, _no_line):
        raise OSError("disk")
    assert list(tmp_path.iterdir()) == []


def test_who_only_looks_refuses_a_holder_and_nobody_who_looks_as_well(tmp_path):
    with run_lock(tmp_path, _no_line), pytest.raises(ConfigError, match=f"in use by pid {os.getpid()} "):
        refuse_held(tmp_path)
    _leave(tmp_path, pid=_dead_pid())
    with (tmp_path / LOCK).open() as looking:  # as another node's start does in this very moment
        fcntl.flock(looking, fcntl.LOCK_SH)
        refuse_held(tmp_path)


def _holders(folder, count):
    """Start processes that hold the folder's lock, or are refused. Return the processes, with a pipe to each."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=_hold, args=(folder, theirs)) for _, theirs in pipes]
    for process in processes:
        process.start()
    return processes, [mine for mine, _ in pipes]


def test_a_holder_that_is_stopped_is_said_to_be(tmp_path):
    (holder,), (pipe,) = _holders(tmp_path, 1)
    assert pipe.recv() == "held"
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)
    told = rf"pid {holder.pid} .*, which is stopped: kill -CONT continues it; end that job"
    with pytest.raises(ConfigError, match=told), run_lock(tmp_path, _no_line):
        pass
    holder.kill()
    holder.join()


def test_of_two_that_start_at_once_one_is_refused(tmp_path):
    processes, pipes = _holders(tmp_path, 4)
    answers = [pipe.recv() for pipe in pipes]
    assert sorted(answer == "held" for answer in answers) == [False, False, False, True]
    assert all("is in use by" in answer for answer in answers if answer != "held")
    pipes[answers.index("held")].send("done")
    for process in processes:
        process.join()


@pytest.mark.parametrize("has_flock", [True, False])
def test_the_lock_of_a_dead_process_is_taken_over_with_one_line(tmp_path, has_flock, request):
    holders = [{"pid": _dead_pid()}]
    if not has_flock:
        request.getfixturevalue("without_flock")
        holders.append({"pid": os.getpid(), "start": "1"})  # its pid now belongs to another process
    for holder in holders:
        line, lines = _leave(tmp_path, **holder), []
        with run_lock(tmp_path, lines.append):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        assert lines == [line]


def test_a_holder_on_another_host_is_stale_once_it_has_not_touched_the_file_for_a_while(tmp_path):
    line, lines = _leave(tmp_path, host="node7", pid=12), []
    start_s = time.monotonic()
    with run_lock(tmp_path, lines.append, stale_s=0.2):
        assert time.monotonic() - start_s > 0.2
    assert lines == [line]


@pytest.mark.usefixtures("without_flock")
@pytest.mark.parametrize("host", [HOST, "node8"])
def test_a_living_holder_is_respected_without_flock_on_another_host_if_it_touches_the_file(tmp_path, monkeypatch, host):
    with run_lock(tmp_path, _no_line, stale_s=0.3):
        monkeypatch.setattr("socket.gethostname", lambda: host)
        with pytest.raises(ConfigError, match="is in use by pid"), run_lock(tmp_path, print, stale_s=30.0):
            pass


def test_what_a_holder_has_written_that_died_amid_it_is_taken(tmp_path):
    (tmp_path / LOCK).write_text('{"host": "no')
    with run_lock(tmp_path, print):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
