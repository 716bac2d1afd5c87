"""A `prepare` that is killed at any instant and run again, with any number of workers, ends with the bytes of an
uninterrupted one.
"""

import errno
import fcntl
import gzip
import json
import os
import random
import signal
import threading
import time
from unittest import mock

import pytest

from megamix.data.prepare import prepare_corpus as prepare_module
from megamix.data.prepare import workers
from megamix.data.prepare.pieces import encode_piece
from megamix.data.token_file import TokenFile
from megamix.tools.ranks import forkserver
from tests.conftest import FULL
from tests.data.prepare_job import encode_until_killed, prepare, prepare_apart

KILLS = 50 if FULL else 3


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write about 200 KB in files of every way to be cut, with bad records among them."""
    folder = tmp_path_factory.mktemp("source")
    pick = random.Random(5)

    def text(length):
        return " ".join(pick.choices(["alpha", "beta", "gamma", "delta", "omega\n", "naïve", "  ", "42"], k=length))

    lines = [json.dumps({"text": text(pick.randint(1, 30))}) for _ in range(1200)]
    lines[700] = "no JSON"
    (folder / "a.jsonl").write_text("\n".join(lines[:900]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[900:]).encode(), mtime=0))
    for number in range(60):
        (folder / f"c{number}.txt").write_text(text(200))
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(*arguments):
    process = forkserver().Process(target=prepare_apart, args=arguments)
    process.start()
    return process


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """Return what a run writes that nobody kills, its calls to the disk, and its seconds."""
    output, since = tmp_path_factory.mktemp("whole") / "out", time.perf_counter()
    start(source, output, 1).join()
    return contents(output), int(output.with_name("calls").read_text()), time.perf_counter() - since


@pytest.mark.parametrize("seed", range(KILLS))
def test_killed_at_a_random_instant_and_rerun_the_files_are_those_of_a_whole_run(source, whole, tmp_path, seed):
    want, calls, seconds = whole
    pick = random.Random(seed)
    output = tmp_path / "out"
    for _ in range(pick.randint(1, 2)):
        if seed % 3 == 0:  # with workers, which must not go on writing
            process = start(source, output, 2)
            time.sleep(pick.uniform(0, 2 * seconds))
            process.kill()
        else:  # before a call to the disk
            process = start(source, output, 1, pick.randint(1, calls))
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        assert not output.exists() or contents(output) == want
    prepare(source, output, num_workers=1)
    assert contents(output) == want


def test_neither_workers_nor_the_size_of_pieces_change_a_byte(source, whole, tmp_path, monkeypatch):
    for name, piece_bytes, num_workers in (("two", 2**14, 2), ("one", 2**40, 1)):
        monkeypatch.setattr("tests.data.prepare_job.PIECE_BYTES", piece_bytes)
        prepare(source, tmp_path / name, num_workers)
        assert contents(tmp_path / name) == whole[0]
    assert TokenFile(tmp_path / "one" / "valid").num_documents > 50


def test_finished_pieces_are_used_by_the_same_request_and_by_no_other(source, whole, tmp_path, monkeypatch):
    encoded = []
    disk_full = True

    def failing_encode(job, piece, number):
        encoded.append(number)
        if disk_full and number == 7:
            raise OSError("disk full")
        return encode_piece(job, piece, number)

    def encoded_until_full(source, output):
        encoded.clear()
        with pytest.raises(OSError, match="disk full"):
            prepare(source, output, num_workers=1)
        return encoded[:]

    monkeypatch.setattr(workers, "encode_piece", failing_encode)
    assert encoded_until_full(source, tmp_path / "out") == [*range(8)]
    assert encoded_until_full(source, tmp_path / "out") == [7]
    (tmp_path / "source").symlink_to(source)  # the same files by another name are another request
    assert encoded_until_full(source, tmp_path / "other") == [*range(8)]
    assert encoded_until_full(tmp_path / "source", tmp_path / "other") == [*range(8)]
    pieces = tmp_path / "out.partial" / "pieces"
    (pieces / "000003.0.npz").write_bytes(bytes((pieces / "000003.0.npz").stat().st_size))  # as after a power cut
    (pieces / "000005.0.npz").write_bytes(b"")
    disk_full = False
    encoded.clear()
    prepare(source, tmp_path / "out", num_workers=1)
    assert encoded[:4] == [3, 5, 7, 8]
    assert contents(tmp_path / "out") == whole[0]


def test_two_prepares_of_one_output_are_never_at_work_at_once(source, tmp_path):
    with (
        prepare_module._work_folder(tmp_path / "out.partial", {}),
        pytest.raises(ValueError, match=r"another prepare is at work in .*out.partial; wait for it"),
    ):
        prepare(source, tmp_path / "out", num_workers=1)


def test_a_worker_that_lost_its_prepare_is_waited_for_before_another_one_begins(tmp_path):
    def begin():
        with prepare_module._work_folder(tmp_path, {}):
            assert not _is_locked(tmp_path / workers._LOCK_NAME)

    waiting = threading.Thread(target=begin)
    with workers.worker_pool(tmp_path, 1) as pool:
        pool.submit(signal.pause)
        while not _is_locked(tmp_path / workers._LOCK_NAME):
            time.sleep(0.01)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()


def _is_locked(path):
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def test_a_worker_that_dies_ends_the_run_with_a_line_and_what_is_finished_is_kept(source, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "encode_piece", encode_until_killed)
    with pytest.raises(OSError, match=r"a worker was killed \(most often by .* memory.*\); finished pieces are kept"):
        prepare(source, tmp_path / "out", num_workers=2)
    monkeypatch.undo()
    assert list((tmp_path / "out.partial" / "pieces").glob("*.json"))
    prepare(source, tmp_path / "out", num_workers=1)
    assert contents(tmp_path / "out") == whole[0]


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_no_other_prepare(tmp_path, monkeypatch, caplog, error):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(error, os.strerror(error))))
    with prepare_module._work_folder(tmp_path / "out.partial", {}):
        pass
    assert "no locks on this file system: start no other prepare that writes to" in caplog.text
