"""A tracker gets every row and text in order, in a thread of its own; if it raises, is slow or hangs, this is reported
once, with the rows it lost, and no run ends; the real wandb writes offline.
"""

import logging
import sys
import threading

import pytest

from megamix.report import trackers
from megamix.report.metrics import MetricsWriter
from megamix.report.trackers import TrackerThread, WandbTracker
from tests.conftest import FULL


class Notes:
    """Tracker that keeps everything it gets, after doing something."""

    def __init__(self, before=lambda call: None):
        self.before, self.told = before, []

    def log(self, step, values):
        self.before("log")
        self.told.append((step, dict(values), threading.current_thread().name))

    def text(self, name, text):
        self.before("text")
        self.told.append((name, text))

    def close(self):
        self.before("close")
        self.told.append("closed")


def _fails(call):
    def before(now):
        if now == call:
            raise ConnectionError("no network")

    return before


def _write(folder, thread, rows=3):
    with MetricsWriter(folder, tensorboard=False, trackers=[thread]) as writer:
        for step in range(rows):
            writer.write(step, {"valid_loss": 1.0 + step, "loss_scale": None}, {"mine": 2.0})
        writer.text(rows, "sample", "def f")


def test_a_tracker_gets_all_in_order_in_its_own_thread(tmp_path, caplog):
    notes = Notes()
    _write(tmp_path, TrackerThread("notes", lambda: notes))
    rows = [(step, {"train/tokens": 0, "valid/loss": 1.0 + step, "mine": 2.0}, "tracker notes") for step in range(3)]
    assert notes.told == [*rows, ("sample", "def f"), "closed"]
    assert not caplog.records


RAISING = [
    ("log", "ConnectionError: no network", 3),
    ("text", "ConnectionError: no network", 1),
    ("close", "ConnectionError: no network", 0),
    ("build", "ValueError: no account", 4),
]


@pytest.mark.parametrize(("call", "reason", "lost"), RAISING)
def test_one_that_raises_is_told_once(tmp_path, caplog, call, reason, lost):
    def build():
        if call == "build":
            raise ValueError("no account")
        return Notes(_fails(call))

    with caplog.at_level(logging.WARNING, "megamix"):
        _write(tmp_path, TrackerThread("notes", build))
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == f"tracker notes: {reason}; the run goes on, and the rows that it does not take are lost"
    assert told[1:] == ([f"tracker notes: {lost} of 4 rows are lost"] if lost else [])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("call", ["log", "close", "build"])
def test_one_that_hangs_is_left_behind(tmp_path, caplog, monkeypatch, call):
    monkeypatch.setattr(trackers, "CLOSE_S", 0.1)
    monkeypatch.setattr(trackers, "MOST_WAITING", 2)
    entered, leave = threading.Event(), threading.Event()

    def hang(now):
        if now == call:
            entered.set()
            leave.wait()

    def build():
        hang("build")
        return Notes(hang)

    thread = TrackerThread("notes", build)
    try:
        if call != "close":
            thread.tell(lambda tracker: tracker.log(0, {}))
            entered.wait()
        with caplog.at_level(logging.WARNING, "megamix"):
            _write(tmp_path, thread, rows=1 if call == "close" else 5)
    finally:
        leave.set()
    told = [record.getMessage() for record in caplog.records]
    if call == "close":
        assert told[0].startswith("tracker notes: it does not end within 0 s; the run goes on")
    else:
        assert told[0].startswith("tracker notes: 2 rows wait for it; the run goes on")
        assert told[-1] == "tracker notes: 7 of 7 rows are lost"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == (1 if call == "close" else 5)


def test_a_missing_package_is_told_with_its_fix(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING, "megamix"):
        _write(tmp_path, TrackerThread("wandb", lambda: WandbTracker(project="p", folder=tmp_path, config={})))
    assert "run pip install -e '.[wandb]' in the checkout of megamix; the run goes on" in caplog.records[0].getMessage()


@pytest.mark.skipif(not FULL, reason="MEGAMIX_FULL=1 only")
def test_the_real_wandb_writes_offline(tmp_path, caplog, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {"model": {"hidden_size": 8}}
    _write(tmp_path, TrackerThread("wandb", lambda: WandbTracker(project="p", folder=tmp_path, config=config)))
    assert [path for path in tmp_path.glob("wandb/offline-run-*/*.wandb") if path.stat().st_size]
    assert not caplog.records
