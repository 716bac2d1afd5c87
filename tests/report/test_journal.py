"""A run's events.jsonl is only ever continued: a killed start is closed by the next one with its last sign of life, a
cut line harms no other, a full disk loses no row, and a start that was taken for dead adds nothing.
"""

import errno
import json
import os
import threading
from unittest import mock

import pytest

from megamix.report import log_file
from megamix.report.journal import BEAT_S, KILLED, Journal, Reached, read_beat, read_rows
from megamix.report.ledger import COMPILE, Ledger, boot_s
from megamix.run.run_folder import EVENTS, HEARTBEAT
from megamix.supervise.status import RunStatus


def _begun(folder, starts=1):
    """Return the journal of a start that loads its checkpoint, `starts` starts into the run."""
    for _ in range(starts):
        journal = Journal(folder, Ledger(boot_s()), lambda: Reached(40, 4000))
        journal.open(ranks=2, steps=100)
    return journal


def _kinds(folder):
    return [(row["starts"], row["kind"]) for row in read_rows(folder)]


def test_a_killed_start_is_closed_by_the_next_one_as_of_its_last_sign_of_life(tmp_path):
    journal = _begun(tmp_path)
    with journal.beating():
        journal.ledger.enter(COMPILE)
    beat = read_beat(tmp_path)
    before = (tmp_path / EVENTS).read_bytes()
    _begun(tmp_path)
    assert (tmp_path / EVENTS).read_bytes().startswith(before)
    assert _kinds(tmp_path) == [(1, "start"), (1, "end"), (2, "start")]
    end = read_rows(tmp_path)[1]
    doing = {"start": "starting", "compile": "compiling"}[beat["phase"]]
    assert (end["state"], end["reason"]) == (KILLED, f"killed without a word while {doing}")
    assert end["at"] == pytest.approx(beat["at"] + BEAT_S / 2)
    assert end["t"] == pytest.approx(beat["t"] + BEAT_S / 2)


def test_a_start_whose_end_another_rank_wrote_is_closed_with_that(tmp_path):
    journal = _begun(tmp_path, starts=3)
    RunStatus(tmp_path, 100).begin(40, 9, journal.starts)
    other = RunStatus(tmp_path, 100)  # of the second rank, since the first one is dead
    other.write("failed", "rank 0 died")
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["starts"], status["start"], status["exit_status"]) == (3, 40, 1)
    _begun(tmp_path)
    end = read_rows(tmp_path)[-2]
    assert (end["starts"], end["state"], end["reason"], end["exit_status"]) == (3, "failed", "rank 0 died", 1)


def test_a_start_that_says_how_it_ended_is_not_closed_again(tmp_path):
    journal = _begun(tmp_path)
    RunStatus(tmp_path, 100, ended=lambda **end: journal.tell("end", **end)).write("preempted", "asked to stop")
    _begun(tmp_path)
    assert _kinds(tmp_path) == [(1, "start"), (1, "end"), (2, "start")]
    assert read_rows(tmp_path)[1]["exit_status"] == 75


@pytest.mark.parametrize("torn", [b'{"t": 3, "starts": 1, "ki', b"\0\0\0"])
def test_a_last_line_that_was_cut_harms_no_other(tmp_path, torn):
    _begun(tmp_path).tell("joined")
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(torn)
    _begun(tmp_path).tell("joined")
    kinds = [(1, "start"), (1, "joined"), (1, "end"), (2, "start"), (2, "joined")]
    assert _kinds(tmp_path) == kinds


def test_rows_that_a_full_disk_does_not_take_are_written_later(tmp_path, caplog):
    journal = _begun(tmp_path)
    with mock.patch.object(log_file.os, "write", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        journal.tell("joined")
    assert _kinds(tmp_path) == [(1, "start")]
    journal.tell("loaded")
    assert _kinds(tmp_path) == [(1, "start"), (1, "joined"), (1, "loaded")]


def test_an_end_on_a_full_disk_is_known_to_the_next_start(tmp_path):
    journal = _begun(tmp_path)
    with journal.beating():
        pass
    with (
        mock.patch.object(log_file.os, "write", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        journal.beating(),
    ):
        journal.tell("end", state="failed", reason="a checkpoint could not be saved\nand more", exit_status=1)
    _begun(tmp_path)
    end = read_rows(tmp_path)[1]
    assert (end["kind"], end["state"], end["reason"]) == ("end", "failed", "a checkpoint could not be saved")


def test_a_save_that_tells_its_end_while_the_run_ends_writes_its_row_once(tmp_path, caplog):
    """Whoever saves beside training, and whose run fails meanwhile."""
    journal = _begun(tmp_path)
    teller = threading.Thread(target=journal.tell, args=("save_end",))
    writes, goes_on, write = threading.Event(), threading.Event(), os.write

    def slow(descriptor, data):
        if threading.current_thread() is teller:
            writes.set()
            goes_on.wait()
        return write(descriptor, data)

    with mock.patch.object(log_file.os, "write", slow):
        with journal.beating():
            teller.start()
            writes.wait()
        goes_on.set()
        teller.join()
    assert (_kinds(tmp_path), caplog.messages) == ([(1, "start"), (1, "save_end")], [])


def test_a_start_that_was_taken_for_dead_adds_nothing(tmp_path):
    first = _begun(tmp_path)
    _begun(tmp_path).tell("joined")
    first.tell("loaded")
    first.tell("end", state="finished", reason="", exit_status=0)
    assert _kinds(tmp_path) == [(1, "start"), (1, "end"), (2, "start"), (2, "joined")]
    _begun(tmp_path)
    assert _kinds(tmp_path)[-1] == (3, "start")


def test_another_rank_writes_nothing(tmp_path):
    Journal(tmp_path, Ledger(boot_s()), lambda: Reached(0, 0)).tell("joined")
    assert [*tmp_path.iterdir()] == []


def test_a_heartbeat_has_one_length(tmp_path):
    journal = _begun(tmp_path)
    with journal.beating():
        pass
    assert (tmp_path / HEARTBEAT).stat().st_size == 1024
