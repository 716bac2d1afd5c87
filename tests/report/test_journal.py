"""A run's events.jsonl is only ever continued: a killed start is closed by the next one with its last sign of life, a
cut line harms no other, a full disk loses no row, and a start that was taken for dead adds nothing. Its ledger counts
each second into one bucket: attempts by their outcome, the wait for data, compiling, and an attempt that stood still.
"""

import errno
import json
import os
import threading
from unittest import mock

import pytest

from megamix import log_file
from megamix.report.journal import BEAT_S, KILLED, Journal, Reached, read_beat, read_rows
from megamix.run.run_folder import EVENTS, HEARTBEAT
from megamix.supervise.ledger import COMPILE, SAVING, START, TRAINED, VALIDATION, Ledger, age_s, boot_s
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
    assert (tmp_path / HEARTBEAT).stat().st_size == 1024  # always, so that it needs no new space
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
    assert _kinds(tmp_path) == [(1, "start"), (1, "joined"), (1, "end"), (2, "start"), (2, "joined")]


def test_an_end_on_a_full_disk_is_known_to_the_next_start(tmp_path):
    journal = _begun(tmp_path)
    full = mock.patch.object(log_file.os, "write", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with journal.beating():
        pass
    with full, journal.beating():
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


class _ByHand(Ledger):
    """A ledger whose time passes by hand."""

    def __init__(self):
        self.now_s = 100.0
        super().__init__(90.0, lambda: self.now_s)

    def after(self, seconds):
        self.now_s += seconds
        return self

    def first_attempts(self):
        """Ten seconds of start, attempts of 5 s and 2 s, and the outcome of one of them."""
        self.enter(COMPILE)
        for took_s in (5.0, 2.0):
            self.after(took_s).launched(took_s)
        self.settle(applied=True, waited_s=0.0)


def test_each_second_is_in_one_bucket():
    ledger = _ByHand()
    ledger.after(2).enter(START)
    ledger.move(4.0, of=START, to=COMPILE)
    ledger.first_attempts()
    ledger.after(2).settle(applied=False, waited_s=0.5)
    ledger.after(2).settle(applied=True, waited_s=0.75)
    ledger.enter(VALIDATION)
    ledger.after(3).enter(TRAINED)
    ledger.enter(SAVING)
    at_s, phase, seconds = ledger.after(1).read()
    assert (at_s, phase) == (27.0, SAVING)
    # The first attempt took 3 s longer than the second. Its 5 s were compiling until that was known.
    assert seconds == {
        "start": 8.0, "compile": 7.0, "trained": 4.0 + 1.75, "overflow": 1.5, "waiting": 0.75, "validation": 3.0
    }  # fmt: skip
    assert sum(seconds.values()) == at_s - 1.0  # which belongs to the save under way


def test_an_attempt_that_stood_still_is_told_apart_from_a_slow_one():
    ledger = _ByHand()
    ledger.first_attempts()
    for took_s in (2, 11, 2, 32):  # up to three times the usual and 5 s are no stall
        ledger.after(took_s).settle(applied=True, waited_s=0.0)
    seconds = ledger.read().seconds
    usual_s = 0.9 * (0.9 * 2 + 0.1 * 11) + 0.1 * 2
    assert seconds["stalled"] == round(32 - usual_s, 3)
    assert seconds["trained"] == round(4 + 2 + 11 + 2 + usual_s, 3)


def test_the_first_outcome_of_a_loop_that_waits_for_each_is_no_measure_of_an_attempt():
    ledger = _ByHand()
    ledger.enter(COMPILE)
    for took_s in (8.0, 7.0):
        ledger.after(took_s).launched(took_s)
        ledger.settle(applied=True, waited_s=0.0)
    assert "stalled" not in ledger.read().seconds


def test_a_start_is_as_old_as_its_process():
    age = age_s(os.getpid())
    assert 0 < age < boot_s()
    assert age_s(2**22 + 1) == 0.0
