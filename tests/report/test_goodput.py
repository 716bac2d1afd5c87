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

import pytest

from megamix.cli import main
from megamix.report.goodput import RUNNING, STALE, STALE_S, read_goodput, verdict
from megamix.report.metrics import TAGS, MetricsWriter
from megamix.report.page import NUMBERS, PAGE
from megamix.run.run_folder import CONFIG, EVENTS, HEARTBEAT, METRICS, SAMPLE
from tests.conftest import FULL

T = 1.7e9  # when the story begins


class _Story:
    """Writes the events of a run, one start after another."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self.folder, self.starts, self.t = folder, 0, T

    def start(self, t, step=0, host="n1", **facts):
        self.starts, self.t = self.starts + 1, T + t
        self.row("start", 0, step, host=host, steps=1000, **facts)

    def row(self, kind, at, step, phase="trained", seconds=(), **more):
        self._write(EVENTS, "a", kind, at, step, phase, {**dict(seconds)}, more)

    def beat(self, at, step, phase="trained", **seconds):
        self._write(HEARTBEAT, "w", "beat", at, step, phase, seconds, {})

    def _write(self, name, mode, kind, at, step, phase, seconds, more):
        row = {"t": self.t + at, "starts": self.starts, "kind": kind, "step": step, "tokens": step, "at": at}
        with (self.folder / name).open(mode) as file:
            file.write(json.dumps({**row, "phase": phase, "seconds": seconds, **more}) + "\n")

    def trains(self, first, last):
        """Write the rows of a start that loads `first` after 30 s, and saves `last` and no more, at 1 s an update."""
        self.row("joined", 10, first, "start")
        self.row("loaded", 30, first, "start", {"start": 20.0, "compile": 10.0})
        trained = {"start": 20.0, "compile": 10.0, "trained": float(last - first)}
        at = 30.0 + last - first
        self.row("first_step", 31, first + 1, seconds=trained | {"trained": 1.0})
        self.row("save_begin", at, last, "saving", trained)
        self.row("save_end", at + 2, last, seconds=trained | {"saving": 2.0}, saved=last)


COMPARED = "time | a step: planned 6.46 s within 14%, measured 6.81 s (+5.4%)"


@pytest.fixture
def story(tmp_path):
    return _Story(tmp_path / "mine")


def _adds_up(goodput, **seconds):
    assert {bucket: value for bucket, value in goodput.seconds.items() if value} == pytest.approx(seconds)


def test_updates_after_the_checkpoint_that_the_run_went_on_from_are_redone(story):
    story.start(0)
    story.trains(0, 100)
    trained = {"start": 20.0, "compile": 10.0, "trained": 140.0, "saving": 2.0}
    story.row(
        "end", 172.5, 140, "trained", trained, state="failed", reason="rank 1 died\nrank 1: last in", exit_status=1
    )
    story.start(200, 100, "n2")
    story.trains(100, 150)
    trained = {"start": 20.0, "compile": 10.0, "trained": 50.0, "saving": 3.0}
    story.row("end", 83, 150, "saving", trained, state="finished", reason="", exit_status=0)
    goodput = read_goodput(story.folder)
    # The attempt under way at the end, half a second old, is redone as well.
    _adds_up(goodput, trained=150, redone=40.5, start=40, compile=20, saving=5, down=27.5)
    assert goodput.wall_s == pytest.approx(283)
    assert [(one.first, one.last, one.kept) for one in goodput.starts] == [(0, 140, 100), (100, 150, 150)]
    assert verdict(goodput) == (
        "finished at update 150 of 1,000, after 4 min 43 s in 2 starts: 53.0% of that time trained"
    )


def test_a_restart_from_an_older_checkpoint_makes_earlier_starts_redo(story):
    for t, step in ((0, 0), (200, 100)):
        story.start(t, step)
        story.trains(step, step + 100)
        trained = {"start": 20.0, "compile": 10.0, "trained": 100.0, "saving": 2.0}
        story.row("end", 132, step + 100, "saving", trained, state="preempted", reason="", exit_status=75)
    story.start(400, 50)  # both newer checkpoints were damaged
    story.trains(50, 60)
    trained = {"start": 20.0, "compile": 10.0, "trained": 10.0, "saving": 2.0}
    story.row("end", 42, 60, "saving", trained, state="finished", reason="", exit_status=0)
    goodput = read_goodput(story.folder)
    assert [one.kept for one in goodput.starts] == [50, 50, 60]
    assert goodput.starts[0].seconds["redone"] == pytest.approx(50, abs=1.1)  # between two rows, by their line
    assert goodput.starts[1].seconds["redone"] == 100


def test_a_run_that_goes_on_has_trained_all_so_far_and_a_dead_one_what_it_saved(story):
    story.start(0)
    story.trains(0, 100)
    story.beat(182, 150, start=20, compile=10, trained=150, saving=2)
    for silent_s, state in ((STALE_S - 1, RUNNING), (STALE_S + 1, STALE)):
        goodput = read_goodput(story.folder, T + 182.5 + silent_s)
        assert goodput.starts[-1].state == state
        expected = {"start": 20, "compile": 10, "saving": 2}
        if state == RUNNING:  # nobody knows yet what becomes of the attempt under way
            _adds_up(goodput, trained=151, stalled=silent_s - 0.5, **expected)
        else:
            _adds_up(goodput, trained=100, redone=50.5, **expected)
            assert goodput.starts[-1].reason.startswith("no sign of life for 61 s")
    assert not (story.folder / PAGE).exists()


def test_an_attempt_that_hung_until_the_end_is_stalled(story):
    story.start(0)
    story.trains(0, 100)
    trained = {"start": 20.0, "compile": 10.0, "trained": 100.0, "saving": 2.0}
    story.row("end", 732, 100, "trained", trained, state="failed", reason="no progress for 600 s", exit_status=1)
    _adds_up(read_goodput(story.folder), trained=100, start=20, compile=10, saving=2, stalled=599, redone=1)


def test_a_run_that_stands_still_though_it_lives_says_for_how_long(story):
    story.start(0)
    story.trains(0, 100)
    trained = {"start": 20.0, "compile": 10.0, "trained": 100.0, "saving": 2.0}
    for at, reason in ((135, ""), (432, "no update for 5 min 00 s")):
        story.beat(at, 100, **trained)
        (last,) = read_goodput(story.folder, T + at).starts
        assert (last.state, last.reason) == (RUNNING, reason)


def test_hosts_whose_clocks_differ_are_never_down_for_less_than_nothing(story):
    for t, step in ((0, 0), (50, 100)):  # the second host is behind by minutes
        story.start(t, step)
        story.trains(step, step + 100)
        trained = {"start": 20.0, "compile": 10.0, "trained": 100.0, "saving": 2.0}
        story.row("end", 132, step + 100, "saving", trained, state="preempted", reason="", exit_status=75)
    _adds_up(read_goodput(story.folder), trained=200, start=40, compile=20, saving=4)


@pytest.fixture
def run(story):
    """Return a run with 200 restarts, the last of which goes on, and with a row that nobody wrote."""
    for number in range(201):
        story.start(number * 200, number * 100)
        story.trains(number * 100, number * 100 + 100)
        trained = {"start": 20.0, "compile": 10.0, "trained": 110.0, "saving": 2.0}
        if number < 200:
            reason = f"<b>rank {number} died"
            story.row("end", 142, number * 100 + 110, "trained", trained, state="failed", reason=reason, exit_status=1)
    story.row("compared", 140, 20100, "trained", trained, words=COMPARED)
    story.beat(142, 20100, start=20, compile=10, trained=110, saving=2)
    with (story.folder / METRICS).open("w") as file:
        for step in range(1, 20100 if not FULL else 100_000):
            values = {"step": step, TAGS["time"]: T + 2 * step, TAGS["loss"]: 2 + 9 / step, TAGS["tokens_per_s"]: 1e5}
            file.write(json.dumps(values | {TAGS["eta_s"]: 7200.0}) + "\n")
        file.write('{"step": 20100, "train/loss": nul')
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
    assert "&lt;b&gt;rank 199 died" in page
    assert "201 stops, 200 failed, 1 stale" in page
    assert "The last 50 of 201 starts" in page
    assert sum(numbers["seconds"].values()) == pytest.approx(numbers["wall_s"])
    assert numbers["starts"][1]["seconds"]["down"] == 58
    assert numbers["starts"][0]["seconds"]["redone"] == 10


def test_the_page_tells_what_trained_where_with_what_and_what_it_writes(story):
    facts = {"parameters": 2164416, "ranks": 2, "machine": "8 cores of <x>", "versions": "torch 2.13"}
    story.start(0, **facts)
    story.trains(0, 100)
    (story.folder / CONFIG).write_text('[optimizer]\nname = "nag"\n[data]\ntrain = "<mine>"\n')
    (story.folder / SAMPLE).write_text("if a < b:\n\n")
    with MetricsWriter(story.folder, tensorboard=False) as writer:
        writer.write(10, {"loss": 7.0, "loss_scale": None, "skipped_steps": 0})
        writer.write(10, {"valid_loss": 6.5})
    assert main(["report", str(story.folder)]) == 0
    page = (story.folder / PAGE).read_text()
    for part in (
        "2,164,416",
        "8 cores of &lt;x&gt;",
        "torch 2.13",
        "name nag",
        "6.500 nats a token at step 10",
        "&lt;mine&gt;",
    ):
        assert part in page
    assert "<pre>if a &lt; b:</pre>" in page
    assert page.count("data:image/png;base64,iVBOR") == page.count("<figcaption>") == 2
    assert not re.search("overflow|loss scale", page.partition("<details>")[0].partition("</style>")[2])
    assert [*story.folder.glob("*.png")] == []


def test_a_run_that_has_left_nothing_but_its_start_has_a_page_without_empty_parts(story):
    story.start(0)
    (story.folder / SAMPLE).write_text(" \n\n")
    assert main(["report", str(story.folder)]) == 0
    page = (story.folder / PAGE).read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == ["Facts", "Where the time went", "Starts and stops"]


def test_without_matplotlib_the_page_lacks_the_pictures_alone_and_a_line_says_how_to_get_them(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(run)]) == 0
    *_, told, page = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"no pictures: .*'matplotlib' is not installed; run pip install -e '\.\[plot\]' .*", told)
    assert "<table>" in Path(page).read_text()
    assert "<img" not in Path(page).read_text()


@pytest.mark.parametrize("there", [True, False])
def test_the_page_is_opened_where_there_is_a_browser(story, monkeypatch, capsys, there):
    story.start(0)
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or there)
    assert main(["report", "--open", str(story.folder)]) == 0
    assert opened == [(story.folder / PAGE).as_uri()]
    assert (f"no browser; open {story.folder / PAGE}" in capsys.readouterr().out) is not there


@pytest.mark.parametrize("verb", ["report", "status", "plot"])
def test_to_look_at_runs_needs_no_torch_and_no_screen(run, verb):
    code = (
        "import sys; from megamix.cli import main; main(sys.argv[1:]); "
        "print({'torch', 'matplotlib.pyplot'} & {*sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", code, verb, str(run)], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "set()"


def test_the_status_of_runs_is_a_line_each(run, story, tmp_path, capsys, monkeypatch):
    other = _Story(tmp_path / "other")
    other.start(0)
    other.row("end", 5, 0, "start", state="gave_up", reason="started 4 times\nand more", exit_status=3)
    monkeypatch.setattr(time, "time", lambda: story.t + 143)
    assert main(["status", str(run), str(other.folder)]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "step", "loss", "tokens/s", "eta", "goodput", "reason"]
    assert first.split() == [
        "mine",
        "running",
        "20,100/1,000",
        f"{2 + 9 / (99_999 if FULL else 20_099):.4f}",
        "100,000",
        *("2", "h", "00", "min"),
        "50.1%",
    ]
    assert second.split() == ["other", "gave_up", "0/1,000", "0.0%", "started", "4", "times"]


def test_a_folder_that_has_no_start_yet_hides_no_run(run, tmp_path, capsys):
    begun = tmp_path / "begun"
    begun.mkdir()
    assert main(["status", str(begun), str(run)]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["begun", "none"]
    assert f"{begun} has no start in events.jsonl" in first
    assert second.startswith("mine")


@pytest.mark.parametrize("cut", ["", "\0\0\0", '{"t": 1', '{"t": 1, "seconds": {"trai'])
def test_a_row_that_a_kill_has_cut_is_left_out_and_so_are_losses_that_are_none(story, cut):
    story.start(0)
    story.trains(0, 100)
    page = _page_of(story)
    with (story.folder / EVENTS).open("a") as file:
        file.write(cut)
    (story.folder / HEARTBEAT).write_text(cut)
    assert _page_of(story) == page
    assert main(["status", str(story.folder)]) == 0


def _page_of(story):
    (story.folder / METRICS).write_text('{"step": 1, "train/loss": NaN}\n{"step": 2, "train/loss": Infinity}\n')
    assert main(["report", str(story.folder)]) == 0
    return (story.folder / PAGE).read_text().partition("no sign of life for")[0]


def test_a_state_and_a_lost_row_break_no_page(story):
    for t in (0, 200):
        story.start(t)
        story.row("first_step", 31, 1, seconds={"start": 20.0, "compile": 10.0, "trained": 1.0})
        story.row("end", 142, 110, "trained", {"start": 20.0}, state="<b>", reason="", exit_status=1)
    story.start(400)
    story.start(600)  # nobody has ended the one before
    assert "<b>" not in _page_of(story)
    assert read_goodput(story.folder).starts[2].state == "killed"


def test_a_run_that_was_stopped_and_went_on_elsewhere_says_so_on_its_page(story):
    for ranks, step in ((2, 0), (1, 100)):
        story.start(2 * step, step, ranks=ranks)
        story.trains(step, step + 100)
        trained = {"start": 20.0, "compile": 10.0, "trained": 100.0}
        story.row("end", 132, step + 100, "saving", trained, state="preempted", reason="asked to stop", exit_status=75)
    page = _page_of(story)
    assert "2 stops, 2 stopped on request" in page
    assert "preempted" not in page
    assert re.findall(r'<td title="ranks">(.*?)</td>', page) == ["1", "2"]  # the last start first


@pytest.mark.parametrize("verb", ["report", "status"])
def test_a_folder_that_is_no_run_is_named_with_the_fix(tmp_path, capsys, verb):
    assert main([verb, str(tmp_path)]) == 2
    assert (
        f"RUN: {tmp_path} has no start in events.jsonl; give the checkpoint.folder of a run" in capsys.readouterr().err
    )
    assert main([verb, str(tmp_path / "mien")]) == 2
    assert f"RUN: {tmp_path}/mien is no folder; give" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "x", "1e9"])
def test_a_watch_of_no_time_is_refused(tmp_path, capsys, seconds):
    with pytest.raises(SystemExit):
        main(["status", str(tmp_path), "--watch", seconds])
    assert "--watch" in capsys.readouterr().err
