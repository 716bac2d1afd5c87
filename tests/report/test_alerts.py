"""An alert reaches the user's program as one JSON object, at a run's end by each way that a rank lives to tell, and in
a storm of overflows; a program that fails, hangs or is missing is told and holds up nothing.
"""

import json
import logging
import sys
import threading

import pytest

from megamix.inspect.overflows import GaveUpError
from megamix.report import alerts
from megamix.report.alerts import STORM, AlertTracker, send
from megamix.report.metrics import TAGS
from tests.builders import run_on_ranks, tiny_job
from tests.train.recorded import run_recorded

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
    (["a\0b"], "alert end: embedded null byte"),
    ([sys.executable, "-c", "raise SystemExit(3)"], "alert end: the program ended with 3"),
    ([sys.executable, "-c", "import time; time.sleep(999)"], "alert end: the program took more than 0 s and is ended"),
]


@pytest.mark.parametrize(("command", "words"), PROGRAMS)
def test_a_program_in_trouble_is_told_and_raises_nothing(tmp_path, caplog, monkeypatch, command, words):
    monkeypatch.setattr(alerts, "LIMIT_S", WAIT_S if "3" in words else 0.1)
    with caplog.at_level(logging.WARNING, "megamix"):
        send(command, tmp_path, "end", reason="\N{GRINNING FACE}" * 10**5)  # more than a pipe holds
        _told(tmp_path)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(words)


def test_a_run_tells_how_it_ended(tmp_path, data):
    config = tiny_job(
        tmp_path,
        tokens=data,
        num_layers=1,
        steps=3,
        eval_interval=0,
        metrics={"precision_interval": 0, "alert": {"command": _command(tmp_path)}},
        max_overflows_in_a_row=2,
    )
    run_on_ranks(config)
    (alert,) = _told(tmp_path)
    assert (alert["event"], alert["state"], alert["exit_status"], alert["update"]) == ("end", "finished", 0, 3)
    assert (alert["run"], alert["reason"]) == (config.checkpoint.folder, "")
    longer = config.model_copy(update={"training": config.training.model_copy(update={"steps": 30})})
    with pytest.raises(GaveUpError):
        run_recorded(longer, bad_attempts=frozenset(range(100)))
    alert = _told(tmp_path)[-1]
    assert (alert["state"], alert["exit_status"]) == ("gave_up", 3)
    assert "overflow" in alert["reason"]
