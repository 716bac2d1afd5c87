"""A run's journal is only ever continued: a killed start is closed by the next one with its last sign of life, a cut
line harms no other, a full disk loses no row, and a start that was taken for dead, or whose end another rank has
written, adds nothing. Folders from before the journal are read, and go on. Its ledger counts each second into one
bucket: attempts by their outcome, the wait for data, compiling, and an attempt that stood still.
"""

import errno
import json
import os
import threading
from unittest import mock

import pytest

from megamix.base import log_file
from megamix.cli.verbs import main
from megamix.launch.exit_status import EndedEarlyError, PreemptedError, StuckError
from megamix.launch.journal import BEAT_S, JOURNAL, KILLED, Journal, Reached, read_rows
from megamix.launch.ledger import COMPILE, SAVING, START, TRAINED, VALIDATION, Ledger, age_s, boot_s
from megamix.launch.run_status import read_status, refuse_if_stuck
from megamix.log.report.page import PAGE
from tests.builders import make_journal

SIGN_BYTES = 4096  # of a journal's first line


def _begun(folder, starts=1):
    """Return the journal of a start that loads its checkpoint, `starts` starts into the run."""
    for _ in range(starts):
        journal = make_journal(folder, 40)
        journal.open(ranks=2, steps=100)
    return journal


def _kinds(folder):
    return [(row["starts"], row["kind"]) for row in read_rows(folder)]


def _parts(folder):
    """Return the sign of life and the events, as they are in the file."""
    journal = (folder / JOURNAL).read_bytes()
    return journal[:SIGN_BYTES], journal[SIGN_BYTES:]


def test_a_killed_start_is_closed_by_the_next_one_as_of_its_last_sign_of_life(tmp_path):
    journal = _begun(tmp_path)
    with journal.beating():
        journal.ledger.enter(COMPILE)
    beat, before = read_rows(tmp_path)[-1], _parts(tmp_path)[1]
    assert beat == json.loads(_parts(tmp_path)[0])  # always as long, so that it needs no new space
    assert _kinds(tmp_path) == [(1, "start"), (1, "beat")]
    _begun(tmp_path)
    assert _parts(tmp_path)[1].startswith(before)
    assert _kinds(tmp_path) == [(1, "start"), (1, "end"), (2, "start")]
    end = read_rows(tmp_path)[1]
    doing = {"start": "starting", "compile": "compiling"}[beat["phase"]]
    assert (end["state"], end["reason"]) == (KILLED, f"killed without a word while {doing}")
    assert end["at"] == pytest.approx(beat["at"] + BEAT_S / 2)
    assert end["t"] == pytest.approx(beat["t"] + BEAT_S / 2)


def test_a_start_whose_end_another_rank_wrote_is_closed_with_that(tmp_path):
    _begun(tmp_path, starts=3)
    other = make_journal(tmp_path, 45)  # of the second rank, since the first one is dead
    other.end(EndedEarlyError("rank 0 died"))
    status = read_status(tmp_path)
    assert (status.starts, status.start, status.update, status.exit_status) == (3, 40, 45, 1)
    _begun(tmp_path)
    end = read_rows(tmp_path)[-2]
    assert (end["starts"], end["state"], end["reason"], end["exit_status"]) == (3, "failed", "rank 0 died", 1)


def test_a_first_rank_that_was_stopped_while_another_wrote_the_end_cannot_take_it_back(tmp_path):
    first = _begun(tmp_path)
    with first.beating():
        make_journal(tmp_path, 45).end(EndedEarlyError("no sign of life from rank 0"))
        ended = read_rows(tmp_path)
    with first.beating():  # its disk has more room than its word has weight
        first.tell("save_end", saved=45)
        first.end(None)
    assert json.loads(_parts(tmp_path)[0])["state"] == "finished"
    assert read_status(tmp_path).reason == "no sign of life from rank 0"
    assert read_rows(tmp_path)[-1] == ended[-1]
    _begun(tmp_path)
    assert [row["state"] for row in read_rows(tmp_path) if "state" in row] == ["failed"]


def test_a_rank_whose_disk_has_no_such_run_writes_the_end_there(tmp_path):
    make_journal(tmp_path / "run", 45).end(EndedEarlyError("rank 0 died"))
    assert read_status(tmp_path / "run").reason == "rank 0 died"


def test_a_start_that_says_how_it_ended_is_not_closed_again(tmp_path):
    _begun(tmp_path).end(PreemptedError("asked to stop"))
    _begun(tmp_path)
    assert _kinds(tmp_path) == [(1, "start"), (1, "end"), (2, "start")]
    assert read_rows(tmp_path)[1]["exit_status"] == 75


@pytest.mark.parametrize("torn", [b'{"t": 3, "starts": 1, "ki', b"\0\0\0"])
def test_a_last_line_that_was_cut_harms_no_other(tmp_path, torn):
    journal = _begun(tmp_path)
    journal.tell("joined")
    with journal.beating():
        pass
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(torn)
    assert _kinds(tmp_path) == [(1, "start"), (1, "joined"), (1, "beat")]  # the sign of life is whole
    _begun(tmp_path).tell("joined")
    assert _kinds(tmp_path) == [(1, "start"), (1, "joined"), (1, "end"), (2, "start"), (2, "joined")]


@pytest.mark.parametrize("size", [0, 100, SIGN_BYTES])
def test_a_sign_of_life_that_was_cut_harms_no_event(tmp_path, size):
    _begun(tmp_path)
    with (tmp_path / JOURNAL).open("r+b") as file:
        file.write(b"x" * (size - 1) + b"\n" if size == SIGN_BYTES else b"x" * size)
    assert _kinds(tmp_path) == [(1, "start")]


@pytest.mark.parametrize("letter", ["x", "\N{SNOWMAN}", "\0"])
def test_an_end_on_a_full_disk_is_known_to_the_next_start(tmp_path, letter):
    journal = _begun(tmp_path)
    full = mock.patch.object(log_file.os, "write", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with journal.beating():
        pass
    with full, journal.beating():
        journal.end(EndedEarlyError(f"a checkpoint could not be saved{900 * letter}\nand more"))
        journal.tell("save_end")
    assert (tmp_path / JOURNAL).read_bytes().count(b"\n") == 2  # of the sign of life and the start
    assert read_status(tmp_path).state == "failed"
    _begun(tmp_path)
    end = read_rows(tmp_path)[1]
    reason = f"a checkpoint could not be saved{900 * letter}"[:500]
    assert (end["kind"], end["state"], end["reason"]) == ("end", "failed", reason)


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
    told = [kind for _, kind in _kinds(tmp_path) if kind != "beat"]
    assert (told, caplog.messages) == (["start", "save_end"], [])


def test_a_save_that_outlives_the_run_s_end_is_known(tmp_path):
    journal = _begun(tmp_path)
    journal.end(EndedEarlyError("rank 1 died"))
    journal.tell("save_end", saved=40)
    assert _kinds(tmp_path) == [(1, "start"), (1, "save_end"), (1, "end")]


def test_a_start_that_was_taken_for_dead_adds_nothing(tmp_path):
    first = _begun(tmp_path)
    _begun(tmp_path).tell("joined")
    with first.beating():
        first.tell("loaded")
        first.end(None)
    assert _kinds(tmp_path) == [(1, "start"), (1, "end"), (2, "start"), (2, "joined")]
    _begun(tmp_path)
    assert _kinds(tmp_path)[-1] == (3, "start")


def test_another_rank_writes_nothing(tmp_path):
    Journal(tmp_path, Ledger(boot_s()), lambda: Reached(0, 0)).tell("joined")
    assert [*tmp_path.iterdir()] == []


def _as_before(folder, *, ended_by_another):
    """Write the folder of a run that was killed twice at update 40, by the code before journal.jsonl."""
    row = {"tokens": 4000, "step": 40, "phase": "trained", "seconds": {"start": 20.0, "trained": 60.0}}
    starts = [[{**row, "t": t, "starts": number, "kind": "start", "at": 0.0, "host": "n1", "steps": 100, "ranks": 2},
               {**row, "t": t + 30, "starts": number, "kind": "loaded", "at": 30.0}]
              for number, t in ((1, 1e9), (2, 1e9 + 200))]  # fmt: skip
    closed = {**starts[0][1], "kind": "end", "state": "failed", "reason": "rank 1 died", "exit_status": 1}
    events = [*starts[0], closed, *starts[1]]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events) + '{"t": 3, "sta')
    beat = {**row, "t": 1e9 + 280, "starts": 2, "kind": "beat", "at": 80.0, "step": 43}
    (folder / "heartbeat.json").write_text(json.dumps(beat).ljust(1023) + "\n")
    ended = {"state": "failed", "exit_status": 1, "reason": "rank 0 died", "update": 45}
    status = {"state": "running", "exit_status": None, "reason": "", "update": 40} | (ended if ended_by_another else {})
    counts = {"steps": 100, "start": 40, "restarts": 1, "starts": 2, "time": "2001-09-09T01:51:30.000+00:00"}
    (folder / "status.json").write_text(json.dumps({**status, **counts, "host": "n2", "pid": 7}, indent=2))


@pytest.mark.parametrize("ended_by_another", [False, True])
def test_a_folder_from_before_the_journal_is_read_and_its_restarts_count_on(tmp_path, capsys, ended_by_another):
    _as_before(tmp_path, ended_by_another=ended_by_another)
    status = read_status(tmp_path)
    reached = ("failed", "rank 0 died", 45) if ended_by_another else ("running", "", 43)
    assert (status.state, status.reason, status.update) == reached
    assert (status.start, status.restarts, status.starts) == (40, 1, 2)
    assert main(["status", str(tmp_path)]) == 0
    assert f"{reached[2]}/100" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    stops = "2 stops, 2 failed" if ended_by_another else "2 stops, 1 failed, 1 stale"
    assert stops in (tmp_path / PAGE).read_text()
    before = [row for row in read_rows(tmp_path) if row["kind"] != "beat"]
    journal = _begun(tmp_path)
    after = read_rows(tmp_path)
    assert after[: len(before)] == before
    assert (after[-2]["kind"], after[-1]["kind"], read_status(tmp_path).restarts) == ("end", "start", 2)
    assert {path.name for path in tmp_path.iterdir()} == {JOURNAL, PAGE}  # what would say that it has ended is gone
    with pytest.raises(StuckError, match="started 3 times from update 40 without progress"):
        refuse_if_stuck(journal, 1)


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
    at_s, phase, seconds = ledger.after(1).read().values()
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
    seconds = ledger.read()["seconds"]
    usual_s = 0.9 * (0.9 * 2 + 0.1 * 11) + 0.1 * 2
    assert seconds["stalled"] == round(32 - usual_s, 3)
    assert seconds["trained"] == round(4 + 2 + 11 + 2 + usual_s, 3)


def test_the_first_outcome_of_a_loop_that_waits_for_each_is_no_measure_of_an_attempt():
    ledger = _ByHand()
    ledger.enter(COMPILE)
    for took_s in (8.0, 7.0):
        ledger.after(took_s).launched(took_s)
        ledger.settle(applied=True, waited_s=0.0)
    assert "stalled" not in ledger.read()["seconds"]


def test_a_start_is_as_old_as_its_process():
    age = age_s(os.getpid())
    assert 0 < age < boot_s()
    assert age_s(2**22 + 1) == 0.0
