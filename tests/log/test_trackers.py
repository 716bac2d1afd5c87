"""A tracker gets every row and text in order, in a thread of its own; if it raises, is slow or hangs, this is reported
once, with the rows it lost, and no run ends; the real wandb writes offline. An alert reaches the user's program as one
JSON object, at a run's end by each way that a rank lives to tell, and in a storm of overflows; a program that fails,
hangs or is missing is told. The client of Prometheus reads its file, with names, types and units; it says when the run
has ended.
"""

import json
import math
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from megamix.log import alerts, trackers
from megamix.log.alerts import STORM, AlertTracker, send
from megamix.log.metrics import TAGS, MetricsWriter
from megamix.log.overflows import GaveUpError
from megamix.log.prometheus import PrometheusTracker
from megamix.log.trackers import TrackerThread, WandbTracker
from tests.builders import run_on_ranks, tiny_job
from tests.conftest import FULL
from tests.train.recorded import run_recorded


class Notes:
    """Tracker that keeps everything it gets, after doing something."""

    def __init__(self, before=lambda call: None):
        self.before, self.told = before, []

    def log(self, step, values):
        self._take("log", step, dict(values), threading.current_thread().name)

    def text(self, name, text):
        self._take("text", name, text)

    def close(self):
        self._take("close")

    def _take(self, call, *told):
        self.before(call)
        self.told.append(told)


def _write(folder, thread, rows=3):
    with MetricsWriter(folder, tensorboard=False, trackers=[thread]) as writer:
        for step in range(rows):
            writer.write(step, {"valid_loss": 1.0 + step, "loss_scale": None}, {"mine": 2.0})
        writer.text(rows, "sample", "def f")


def test_a_tracker_gets_all_in_order_in_its_own_thread(tmp_path, caplog):
    notes = Notes()
    _write(tmp_path, TrackerThread("notes", lambda: notes))
    rows = [(step, {"train/tokens": 0, "valid/loss": 1.0 + step, "mine": 2.0}, "tracker notes") for step in range(3)]
    assert notes.told == [*rows, ("sample", "def f"), ()]
    assert not caplog.records


@pytest.mark.parametrize(("call", "lost"), [("log", 3), ("text", 1), ("close", 0), ("build", 4)])
def test_one_that_raises_is_told_once(tmp_path, caplog, call, lost):
    def fails(now):
        if now == call:
            raise ConnectionError("no network")

    _write(tmp_path, TrackerThread("notes", lambda: fails("build") or Notes(fails)))
    reason = "ConnectionError: no network; the run goes on, and the rows that it does not take are lost"
    counted = [f"tracker notes: {lost} of 4 rows are lost"] if lost else []
    assert caplog.messages == [f"tracker notes: {reason}", *counted]
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

    thread = TrackerThread("notes", lambda: hang("build") or Notes(hang))
    rows = 1 if call == "close" else 5
    try:
        if call != "close":
            thread.tell(lambda tracker: tracker.log(0, {}))
            entered.wait()
        _write(tmp_path, thread, rows)
    finally:
        leave.set()
    if call == "close":
        assert caplog.messages[0].startswith("tracker notes: it does not end within 0 s; the run goes on")
    else:
        assert caplog.messages[0].startswith("tracker notes: 2 rows wait for it; the run goes on")
        assert caplog.messages[-1] == "tracker notes: 7 of 7 rows are lost"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == rows


def test_a_missing_package_is_told_with_its_fix(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    _write(tmp_path, TrackerThread("wandb", lambda: WandbTracker(project="p", folder=tmp_path, config={})))
    assert "run pip install -e '.[wandb]' in the checkout of megamix; the run goes on" in caplog.messages[0]


@pytest.mark.skipif(not FULL, reason="MEGAMIX_FULL=1 only")
def test_the_real_wandb_writes_offline(tmp_path, caplog, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {"model": {"hidden_size": 8}}
    _write(tmp_path, TrackerThread("wandb", lambda: WandbTracker(project="p", folder=tmp_path, config=config)))
    assert [path for path in tmp_path.glob("wandb/offline-run-*/*.wandb") if path.stat().st_size]
    assert not caplog.records


WAIT_S = 60.0
KEEPS = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


def _command(folder):
    return [sys.executable, "-c", KEEPS, str(folder / "alerts.jsonl")]


def _told(folder):
    """Return the alerts, once their programs have ended."""
    for thread in threading.enumerate():
        if thread.name == "alert":
            thread.join(WAIT_S)
    path = folder / "alerts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_storm_of_overflows_is_told_once_and_a_search_for_the_first_scale_is_none(tmp_path):
    tracker = AlertTracker(command=_command(tmp_path), folder=tmp_path, config={})
    overflow = {TAGS["loss_scale"]: 4.0, TAGS["skipped_steps"]: 1}
    for _ in range(2 * STORM):
        tracker.log(1, overflow)
    for rounds in range(2):
        tracker.log(5 + rounds, {TAGS["loss"]: 3.0, TAGS["skipped_steps"]: 1})
        for _ in range(STORM - 1 + rounds):
            tracker.log(7, overflow)
    (alert,) = _told(tmp_path)
    assert alert.keys() == {"event", "run", "host", "time", "step", "overflows", "loss_scale"}
    assert (alert["event"], alert["run"], alert["overflows"], alert["loss_scale"]) == (
        "overflows", str(tmp_path), STORM, 4.0,
    )  # fmt: skip


PROGRAMS = [
    (["no such program"], "alert end: [Errno 2]"),
    ([sys.executable, "-c", "raise SystemExit(3)"], "alert end: the program ended with 3"),
    ([sys.executable, "-c", "import time; time.sleep(999)"], "alert end: the program took more than 0 s and is ended"),
]


@pytest.mark.parametrize(("command", "words"), PROGRAMS)
def test_a_program_in_trouble_is_told_and_raises_nothing(tmp_path, caplog, monkeypatch, command, words):
    monkeypatch.setattr(alerts, "LIMIT_S", WAIT_S if "3" in words else 0.1)
    send(command, tmp_path, "end", reason="\N{GRINNING FACE}" * 10**5)  # more than a pipe holds
    _told(tmp_path)
    (line,) = caplog.messages
    assert line.startswith(words)


def _fails_late(plan):
    if plan.launched == 6:
        raise RuntimeError("planted")


def test_a_run_tells_how_it_ended(tmp_path, data):
    metrics = {"precision_interval": 0, "alert": {"command": _command(tmp_path)}}
    short = tiny_job(tmp_path, tokens=data, num_layers=1, steps=3, eval_interval=0, metrics=metrics)
    run_on_ranks(short)
    (alert,) = _told(tmp_path)
    assert (alert["event"], alert["state"], alert["exit_status"], alert["update"]) == ("end", "finished", 0, 3)
    assert (alert["run"], alert["reason"]) == (short.checkpoint.folder, "")
    longer = short.with_keys(training={"steps": 30}, precision={"max_overflows_in_a_row": 2})
    with pytest.raises(GaveUpError):
        run_recorded(longer, bad_attempts=frozenset(range(100)))
    alert = _told(tmp_path)[-1]
    assert (alert["state"], alert["exit_status"]) == ("gave_up", 3)
    assert "overflow" in alert["reason"]
    for state, how in (("preempted", {"leave_at": 6}), ("failed", {"before": _fails_late})):
        with nullcontext() if state == "preempted" else pytest.raises(RuntimeError, match="planted"):
            run_recorded(longer.with_keys(checkpoint={"folder": str(tmp_path / state)}), **how)
        assert _told(tmp_path)[-1]["state"] == state


ROW = {
    TAGS["loss"]: 3.25,
    TAGS["memory_gib"]: 1.5,
    TAGS["tokens"]: 4096,
    TAGS["loss_scale"]: 1024.0,
    "time_share/data": 0.25,
    "time_share/update": 0.5,
    "valid/loss": 3.5,
    "valid/loss/web": 4.0,
    'mine "quoted" \\ and\nbroken': math.inf,
    "other": math.nan,
}


def _samples(folder):
    """Return the file's values, by metric and label, as the client of Prometheus reads them."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = [*parser.text_string_to_metric_families((folder / "run.prom").read_text())]
    assert {family.type for family in families} == {"gauge", "counter"}
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels.pop("run") for sample in samples} == {"runs/mine"}
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def test_the_client_of_prometheus_reads_values_with_units_and_labels_an_overflow_that_is_no_update_and_the_end(
    tmp_path,
):
    tracker = PrometheusTracker(file=str(tmp_path / "run.prom"), folder=Path("runs/mine"), config={})
    tracker.log(8, ROW)
    got = _samples(tmp_path)
    assert got.pop("megamix_last_row_timestamp_seconds") > 1e9
    assert math.isnan(got.pop("megamix_value other"))
    assert got == {
        "megamix_running": 1.0,
        "megamix_loss_nats": 3.25,
        "megamix_memory_peak_bytes": 1.5 * 2**30,
        "megamix_tokens_total": 4096.0,
        "megamix_loss_scale": 1024.0,
        "megamix_time_share_ratio data": 0.25,
        "megamix_time_share_ratio update": 0.5,
        "megamix_valid_loss_nats": 3.5,
        "megamix_valid_loss_nats web": 4.0,
        'megamix_value mine "quoted" \\ and\nbroken': math.inf,
        "megamix_updates_total": 8.0,
    }
    tracker.log(9, {TAGS["loss_scale"]: 512.0, TAGS["skipped_steps"]: 1})
    got = _samples(tmp_path)
    assert got["megamix_updates_total"] == 8.0
    assert got["megamix_overflows_total"] == 1.0
    assert got["megamix_loss_scale"] == 512.0
    tracker.close()
    assert _samples(tmp_path)["megamix_running"] == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"], "it is renamed into place"
