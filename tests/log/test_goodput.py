"""A run's goodput adds up to its wall time: what a restart lost is redone, what no process ran is down, an attempt that
stood still is stalled. `megamix report` and `megamix status` tell it, from events that were killed, cut, copied and
written by hosts whose clocks differ.
"""

import json
import re
import subprocess
import sys
import time
import webbrowser
from pathlib import Path
from types import SimpleNamespace

import pytest

from megamix.checkpoint import slots
from megamix.cli.verbs import main
from megamix.launch import journal
from megamix.launch.journal import JOURNAL, sign_line
from megamix.launch.ledger import Ledger
from megamix.launch.run_folder import CONFIG, METRICS, SAMPLE
from megamix.log.metrics import TAGS, MetricsWriter
from megamix.log.report.goodput import RUNNING, STALE, STALE_S, read_goodput, verdict
from megamix.log.report.page import NUMBERS, PAGE
from megamix.train import run as run_module
from megamix.train.batches import Validation
from megamix.train.checkpointing import RunCheckpoints
from tests.builders import tiny_job
from tests.conftest import FULL
from tests.train.recorded import run_recorded

T = 1.7e9  # when the story begins


BEGIN = {"start": 20.0, "compile": 10.0}  # seconds of a start until its first update


class _Story:
    """Writes the events of a run, one start after another."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / JOURNAL).write_bytes(sign_line({}))
        self.folder, self.starts, self.t = folder, 0, T

    def start(self, t, step=0, **facts):
        self.starts, self.t = self.starts + 1, T + t
        self.row("start", 0, step, host="n1", steps=1000, **facts)

    def row(self, kind, at, step, phase="trained", seconds=(), **more):
        row = {"t": self.t + at, "starts": self.starts, "kind": kind, "step": step, "tokens": step, "at": at}
        row |= {"phase": phase, "seconds": dict(seconds), **more}
        with (self.folder / JOURNAL).open("r+b" if kind == "beat" else "ab") as file:
            file.write(sign_line(row) if kind == "beat" else f"{json.dumps(row)}\n".encode())

    def beat(self, at, step, **seconds):
        self.row("beat", at, step, seconds=BEGIN | seconds)

    def end(self, at, step, state, phase="saving", reason="", **seconds):
        status = {"finished": 0, "preempted": 75, "gave_up": 3}.get(state, 1)
        self.row("end", at, step, phase, BEGIN | seconds, state=state, reason=reason, exit_status=status)

    def trains(self, t, first, last, **facts):
        """Write the rows of a start that loads `first` after 30 s, and saves `last` and no more, at 1 s an update."""
        self.start(t, first, **facts)
        self.row("joined", 10, first, "start")
        self.row("loaded", 30, first, "start", BEGIN)
        trained = BEGIN | {"trained": float(last - first)}
        at = 30.0 + last - first
        self.row("first_step", 31, first + 1, seconds=trained | {"trained": 1.0})
        self.row("save_begin", at, last, "saving", trained)
        self.row("save_end", at + 2, last, seconds=trained | {"saving": 2.0}, saved=last)

    def trains_until_asked(self, t, first, last, **facts):
        self.trains(t, first, last, **facts)
        self.end(last - first + 32, last, "preempted", trained=float(last - first), saving=2.0)


COMPARED = "time | a step: planned 6.46 s within 14%, measured 6.81 s (+5.4%)"


@pytest.fixture
def story(tmp_path):
    return _Story(tmp_path / "mine")


def _adds_up(goodput, **seconds):
    assert {bucket: value for bucket, value in goodput.seconds.items() if value} == pytest.approx(seconds)


def test_updates_after_the_checkpoint_that_the_run_went_on_from_are_redone(story):
    story.trains(0, 0, 100)
    story.end(172.5, 140, "failed", "trained", "rank 1 died\nrank 1: last in", trained=140.0, saving=2.0)
    story.trains(200, 100, 150)
    story.end(83, 150, "finished", trained=50.0, saving=3.0)
    goodput = read_goodput(story.folder)
    # The attempt under way at the end, half a second old, is redone as well.
    _adds_up(goodput, trained=150, redone=40.5, start=40, compile=20, saving=5, down=27.5)
    assert goodput.wall_s == pytest.approx(283)
    assert [(one.first, one.last, one.kept) for one in goodput.starts] == [(0, 140, 100), (100, 150, 150)]
    told = "finished at update 150 of 1,000, after 4 min 43 s in 2 starts: 53.0% of that time trained"
    assert verdict(goodput) == told


def test_a_restart_from_an_older_checkpoint_makes_earlier_starts_redo(story):
    story.trains_until_asked(0, 0, 100)
    story.trains_until_asked(200, 100, 200)
    story.trains_until_asked(400, 50, 60)  # both newer checkpoints were damaged
    goodput = read_goodput(story.folder)
    assert [one.kept for one in goodput.starts] == [50, 50, 60]
    assert goodput.starts[0].seconds["redone"] == pytest.approx(50, abs=1.1)  # between two rows, by their line
    assert goodput.starts[1].seconds["redone"] == 100


def test_a_run_that_goes_on_has_trained_all_so_far_and_a_dead_one_what_it_saved(story):
    story.trains(0, 0, 100)
    story.beat(182, 150, trained=150, saving=2)
    for silent_s, state in ((STALE_S - 1, RUNNING), (STALE_S + 1, STALE)):
        goodput = read_goodput(story.folder, T + 182.5 + silent_s)
        assert goodput.starts[-1].state == state
        if state == RUNNING:  # nobody knows yet what becomes of the attempt under way
            _adds_up(goodput, trained=151, stalled=silent_s - 0.5, start=20, compile=10, saving=2)
        else:
            _adds_up(goodput, trained=100, redone=50.5, start=20, compile=10, saving=2)
            assert goodput.starts[-1].reason.startswith("no sign of life for 61 s")


def test_an_attempt_that_hung_until_the_end_is_stalled(story):
    story.trains(0, 0, 100)
    story.end(732, 100, "failed", "trained", "no progress for 600 s", trained=100.0, saving=2.0)
    _adds_up(read_goodput(story.folder), trained=100, start=20, compile=10, saving=2, stalled=599, redone=1)


def test_a_run_that_stands_still_though_it_lives_says_for_how_long(story):
    story.trains(0, 0, 100)
    for at, reason in ((135, ""), (432, "no update for 5 min 00 s")):
        story.beat(at, 100, trained=100.0, saving=2.0)
        (last,) = read_goodput(story.folder, T + at).starts
        assert (last.state, last.reason) == (RUNNING, reason)


def test_hosts_whose_clocks_differ_are_never_down_for_less_than_nothing_and_both_are_on_the_page(story):
    story.trains_until_asked(0, 0, 100, ranks=2)
    story.trains_until_asked(50, 100, 200, ranks=1)  # the second host is behind by minutes
    _adds_up(read_goodput(story.folder), trained=200, start=40, compile=20, saving=4)
    page = _page_of(story)
    assert "2 stops, 2 stopped on request" in page
    assert "preempted" not in page
    assert re.findall(r'<td title="ranks">(.*?)</td>', page) == ["1", "2"]  # the last start first
    assert re.findall(r'<td title="from">(.*?)</td>', page) == ["disk", ""]


def test_a_job_s_seconds_are_counted_to_what_it_did(tmp_path, data, monkeypatch):
    now = T

    def passes(seconds):
        nonlocal now
        now += seconds

    def takes(kind, name, seconds):
        call = vars(kind)[name]
        monkeypatch.setattr(kind, name, lambda *args, **keys: (passes(seconds), call(*args, **keys))[1])

    for module in (run_module, journal):
        monkeypatch.setattr(module, "boot_s", lambda: now)
    monkeypatch.setattr(journal, "time", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr(run_module, "Ledger", lambda began_s: Ledger(began_s, lambda: now))
    monkeypatch.setattr(run_module, "age_s", lambda pid: 50.0)
    takes(Validation, "losses", 30)
    takes(RunCheckpoints, "save", 20)
    takes(RunCheckpoints, "save_last", 20)
    config = tiny_job(tmp_path, tokens=data, steps=8, eval_interval=5, save_interval=4, async_save=False)
    run_recorded(config, crash_at=6, before=lambda plan: passes(10))
    passes(200)
    run_recorded(config, before=lambda plan: passes(10))
    first, second = read_goodput(tmp_path / "run").starts
    # Its first attempt compiles. Update 5, the attempt behind it and the time until the crash are redone.
    want = {"start": 50, "compile": 10, "trained": 30, "redone": 30, "saving": 20, "validation": 30}
    assert {bucket: seconds for bucket, seconds in first.seconds.items() if seconds > 2} == pytest.approx(want, abs=2)
    want = {"down": 150, "start": 50, "trained": 40, "saving": 40, "validation": 60}
    assert {bucket: seconds for bucket, seconds in second.seconds.items() if seconds > 2} == pytest.approx(want, abs=2)


@pytest.fixture
def run(story):
    """Return a run with 60 restarts, the last of which goes on, and with a row that nobody wrote."""
    for number in range(61):
        first = number * 100
        story.trains(number * 200, first, first + 100)
        if number < 60:
            story.end(142, first + 110, "failed", "trained", f"<b>rank {number} died", trained=110.0, saving=2.0)
    story.row("compared", 140, 6100, words=COMPARED)
    story.beat(142, 6100, trained=110, saving=2)
    with (story.folder / METRICS).open("w") as file:
        for step in range(1, 100_000 if FULL else 6100):
            values = {"step": step, TAGS["time"]: T + 2 * step, TAGS["loss"]: 2 + 9 / step, TAGS["tokens_per_s"]: 1e5}
            file.write(json.dumps(values | {TAGS["eta_s"]: 7200.0}) + "\n")
        file.write('{"step": 6100, "train/loss": nul')
    return story.folder


def test_the_page_is_one_file_that_begins_with_the_verdict_and_needs_nothing_else(run, capsys):
    assert main(["report", "--json", str(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    page, numbers = (run / PAGE).read_text(), json.loads((run / NUMBERS).read_text())
    assert told == [numbers["verdict"], COMPARED, str(run / PAGE), str(run / NUMBERS)]
    assert "of that time trained" in told[0]
    assert page.index(told[0]) < page.index(COMPARED) < page.index("<img") < page.index("<table")
    assert len(page) < 500_000
    assert re.findall(r'https?:|src="(?!data:image/png)|href=|<script|@import|url\(', page) == []
    assert "<b>" not in page
    assert "&lt;b&gt;rank 59 died" in page
    assert "61 stops, 60 failed, 1 stale" in page
    assert "The last 50 of 61 starts" in page
    assert sum(numbers["seconds"].values()) == pytest.approx(numbers["wall_s"])
    assert numbers["starts"][1]["seconds"]["down"] == 58
    assert numbers["starts"][0]["seconds"]["redone"] == 10


def _page_of(story):
    assert main(["report", str(story.folder)]) == 0
    return (story.folder / PAGE).read_text()


def test_the_page_tells_what_trained_where_with_what_and_what_it_writes(story):
    story.trains(0, 0, 100, parameters=2164416, ranks=2, machine="8 cores of <x>", versions="torch 2.13")
    (story.folder / CONFIG).write_text('[optimizer]\nname = "nag"\n[data]\ntrain = "<mine>"\n')
    (story.folder / SAMPLE).write_text("if a < b:\n\n")
    with MetricsWriter(story.folder, tensorboard=False) as writer:
        writer.write(10, {"loss": 7.0, "loss_scale": None, "skipped_steps": 0})
        writer.write(10, {"valid_loss": 6.5})
    page = _page_of(story)
    facts = ("2,164,416", "8 cores of &lt;x&gt;", "torch 2.13", "name nag", "6.500 nats a token at step 10")
    for part in (*facts, "&lt;mine&gt;", "<pre>if a &lt; b:</pre>"):
        assert part in page
    assert page.count("data:image/png;base64,iVBOR") == page.count("<figcaption>") == 2
    assert not re.search("overflow|loss scale", page.partition("<details>")[0].partition("</style>")[2])
    assert [*story.folder.glob("*.png")] == []


@pytest.mark.parametrize("there", [True, False])
def test_a_run_with_nothing_but_its_start_has_a_page_without_empty_parts_which_is_opened(
    story, monkeypatch, capsys, there
):
    story.start(0)
    (story.folder / SAMPLE).write_text(" \n\n")
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or there)
    assert main(["report", "--open", str(story.folder)]) == 0
    page = story.folder / PAGE
    assert re.findall("<h2>(.*?)</h2>", page.read_text()) == ["Facts", "Where the time went", "Starts and stops"]
    assert opened == [page.as_uri()]
    assert (f"no browser; open {page}" in capsys.readouterr().out) is not there


def test_without_matplotlib_the_page_lacks_the_pictures_alone_and_a_line_says_how_to_get_them(
    story, monkeypatch, capsys
):
    story.start(0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(story.folder)]) == 0
    *_, told, page = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"no pictures: .*'matplotlib' is not installed; run pip install -e '\.\[plot\]' .*", told)
    assert "<table>" in Path(page).read_text()
    assert "<img" not in Path(page).read_text()


def test_to_look_at_runs_needs_no_torch_and_no_screen(story):
    story.start(0)
    with MetricsWriter(story.folder, tensorboard=False) as writer:
        writer.write(10, {"loss": 7.0})
    code = (
        "import sys; from megamix.cli.verbs import main; "
        "[main([verb, sys.argv[1]]) for verb in ('status', 'report', 'plot')]; "
        "print({'torch', 'matplotlib.pyplot'} & {*sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(story.folder)], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "set()"


def test_the_status_of_runs_is_a_line_each_and_a_folder_without_a_start_hides_none(
    run, story, tmp_path, capsys, monkeypatch
):
    other = _Story(tmp_path / "other")
    other.start(0)
    other.end(5, 0, "gave_up", "start", "started 4 times\nand more")
    begun = tmp_path / "begun"
    begun.mkdir()
    monkeypatch.setattr(time, "time", lambda: story.t + 143)
    monkeypatch.setattr(slots, "SHARED", tmp_path)  # another test's run may be in /dev/shm
    assert main(["status", str(begun), str(run), str(other.folder)]) == 0
    header, none, first, second = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["run", "state", "step", "loss", "tokens/s", "eta", "goodput", "reason"]
    assert none[:2] == ["begun", "none"]
    assert f"{begun} has no start in journal.jsonl" in " ".join(none)
    loss = f"{2 + 9 / (99_999 if FULL else 6099):.4f}"
    assert first == ["mine", "running", "6,100/1,000", loss, "100,000", "2", "h", "00", "min", "50.3%"]
    assert second == ["other", "gave_up", "0/1,000", "0.0%", "started", "4", "times"]


@pytest.mark.parametrize("cut", ["\0\0\0", '{"t": 1, "seconds": {"trai'])
def test_a_row_that_a_kill_has_cut_is_left_out_and_so_are_losses_that_are_none(story, cut):
    story.trains(0, 0, 100)
    (story.folder / METRICS).write_text('{"step": 1, "train/loss": null}\n')
    page = _page_of(story).partition("no sign of life for")[0]
    with (story.folder / JOURNAL).open("a") as file:
        file.write(cut)
    with (story.folder / JOURNAL).open("r+") as file:
        file.write(cut)
    assert _page_of(story).partition("no sign of life for")[0] == page
    assert main(["status", str(story.folder)]) == 0


def test_a_start_that_nobody_has_ended_was_killed_and_lost_rows_break_no_page(story):
    story.start(0)
    story.row("first_step", 31, 1, seconds=BEGIN | {"trained": 1.0})
    story.row("end", 142, 110, "trained", {"start": 20.0}, state="failed", reason="", exit_status=1)
    story.start(400)
    story.start(600)
    assert "1 killed" in _page_of(story)
    assert read_goodput(story.folder).starts[1].state == "killed"


@pytest.mark.parametrize("verb", ["report", "status"])
def test_a_folder_that_is_no_run_is_named_with_the_fix(tmp_path, capsys, verb):
    no_run = "has no start in journal.jsonl; give the checkpoint.folder of a run"
    for folder, told in ((tmp_path, no_run), (tmp_path / "mien", "is no folder; give")):
        assert main([verb, str(folder)]) == 2
        assert f"RUN: {folder} {told}" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["x", "1 s"])
def test_a_watch_of_no_number_is_refused(tmp_path, capsys, seconds):
    with pytest.raises(SystemExit):
        main(["status", str(tmp_path), "--watch", seconds])
    assert "--watch" in capsys.readouterr().err
