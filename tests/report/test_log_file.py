"""A log holds whole rows in order, whatever its disk does; rows that can be kept are kept, lost ones are counted, and a
removed file is written anew.
"""

import itertools
import os
import random

import pytest

from megamix.report import log_file
from megamix.report.log_file import LogFile
from tests.conftest import FULL as MANY
from tests.train.broken_disk import BROKEN, FULL, NO_INODES, broken_disk

STORIES = 2000 if MANY else 20


def _log(folder):
    return LogFile(lambda: folder / "log")


def _rows(count):
    return [f"row {number}\n".encode() for number in range(count)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(log_file, "LAST_WAIT_S", 0.0)


def _full_for_a_while(disk, folder, story):
    disk.fault, disk.room = FULL, story.randrange(12)


def _broken(disk, folder, story):
    disk.fault = BROKEN


def _heal(disk, folder, story):
    disk.fault = None


@pytest.mark.parametrize("seed", range(0, STORIES, 20))
def test_no_row_is_lost_torn_or_doubled_by_a_disk_that_takes_it_later(tmp_path, seed):
    for number in range(seed, seed + 20):
        story, folder = random.Random(number), tmp_path / str(number)
        rows = _rows(20)
        with broken_disk(folder) as disk:
            log = _log(folder)
            for row in rows:
                story.choice([_full_for_a_while, _broken, _heal, _heal])(disk, folder, story)
                log.append(row)
                written = (folder / "log").read_bytes() if (folder / "log").exists() else b""
                # A reader finds whole rows at this moment, from the first on.
                assert written == b"".join(rows[: written.count(b"\n")])
                assert log.size() == len(b"".join(rows[: rows.index(row) + 1]))
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
        assert log.size() == 12
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


def _remove(path):
    path.unlink()


def _remove_folder(path):
    path.unlink()
    path.parent.rmdir()


def _move(path):
    path.rename(path.with_name("old"))


@pytest.mark.parametrize("vanish", [_remove, _remove_folder, _move])
def test_a_file_that_vanished_is_made_anew_and_told(tmp_path, caplog, vanish):
    path = tmp_path / "run/log"
    log = _log(path.parent)
    log.append(b"1\n")
    vanish(path)
    log.append(b"2\n")
    log.close()
    assert path.read_bytes() == b"2\n"
    assert caplog.messages == [f"{path} was removed while the run goes on; it is created again"]


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
    numbers = itertools.count()
    log = LogFile(lambda: tmp_path / str(next(numbers)), head=b"head ")
    log.append(b"1\n")
    log.append(b"2\n")
    log.path.unlink()
    log.append(b"3\n")
    log.close()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"head 3\n"]
