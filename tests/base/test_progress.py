"""No verb is silent while it works: lines on stderr show share and time left; stdout has only the results."""

import argparse
import io
import threading
from types import SimpleNamespace

import pytest

from megamix.base import progress
from megamix.base.progress import LongWork, ProgressLine, duration
from megamix.cli.parser import lines_told
from megamix.cli.verbs import main
from megamix.data.prepare.corpus import input_corpus
from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
from megamix.data.prepare.tokenizer_choice import TokenizerChoice

DEADLINE_S = 60.0


class Watched(io.StringIO):
    """A stream that tells when something was written."""

    def __init__(self):
        super().__init__()
        self._written = threading.Condition()

    def write(self, text):
        with self._written:
            written = super().write(text)
            self._written.notify_all()
        return written

    def wait(self, text="megamix"):
        with self._written:
            assert self._written.wait_for(lambda: text in self.getvalue(), DEADLINE_S), f"{text} was not said"


@pytest.fixture
def impatient(monkeypatch):
    """Return a function that takes stderr's place, where the first line comes at once."""

    def make():
        stream = Watched()
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(progress, "SILENT_S", 0.0)
        monkeypatch.setattr(progress, "_TICK_S", 0.001)
        return stream

    return make


def test_the_time_left_follows_from_the_speed_so_far():
    assert LongWork("x", begun_s=10.0).told(now_s=22.0) == "x, 12 s"
    assert LongWork("x", begun_s=10.0, total=100.0).told(now_s=22.0) == "x, 12 s"
    assert LongWork("x", begun_s=10.0, total=100.0, done=25.0).told(now_s=22.0) == "x, 25 %, 12 s, about 36 s left"
    resumed = LongWork("x", begun_s=10.0, total=100.0, begun_at=50.0, done=75.0)
    assert resumed.told(now_s=22.0) == "x, 75 %, 12 s, about 12 s left"


def test_more_work_than_was_known_has_no_estimate():
    assert LongWork("x", begun_s=0.0, total=100.0, done=101.0).told(now_s=5.0) == "x, 5 s"


def test_times_are_said_as_people_say_them():
    told = [duration(seconds) for seconds in (0, 0.25, 42.4, 99, 200, 5 * 3600 + 420, 51 * 3600)]
    assert told == ["0 s", "0.2 s", "42 s", "99 s", "3 min 20 s", "5 h 07 min", "2 d 03 h"]


def test_stderr_gets_a_line_of_the_present_work(impatient):
    log = impatient()
    with ProgressLine("megamix evaluate") as told:
        told.begin("tokens", total=4)
        log.wait("megamix evaluate: tokens, 0 s\n")


def test_nothing_is_said_while_the_verb_prints(impatient, monkeypatch):
    log = impatient()
    told, looks = ProgressLine("megamix evaluate"), iter([False, False, True])
    monkeypatch.setattr(told, "_ended", SimpleNamespace(wait=lambda seconds: next(looks)))
    with told.aside():
        told._tell()
    assert log.getvalue() == ""


def test_the_first_rank_alone_speaks(impatient, monkeypatch):
    log = impatient()
    monkeypatch.setenv("RANK", "1")
    with ProgressLine("megamix doctor") as told:
        assert not told.speaks
    assert log.getvalue() == ""


def test_a_verb_of_lines_speaks_while_it_works(impatient, capsys):
    log = impatient()

    def lines(arguments):
        arguments.progress.begin("thinking")
        log.wait()
        yield "42"

    assert lines_told(lines)(argparse.Namespace(verb="plan")) == 0
    assert log.getvalue().startswith("megamix plan: ")
    assert capsys.readouterr().out == "42\n"


@pytest.mark.parametrize(
    ("verb", "function"),
    [
        (["verify", "configs/quickstart.toml"], "cli.verify._config_lines"),
        (["doctor"], "cli.doctor.examine"),
    ],
    ids=str,
)
def test_verify_and_doctor_speak_while_they_work(verb, function, impatient, monkeypatch):
    log = impatient()

    def lines(*_):
        log.wait()
        yield from ()

    monkeypatch.setattr(f"megamix.{function}", lines)
    assert main(verb) == 0
    assert log.getvalue().startswith(f"megamix {verb[0]}: at work, ")


class Noted(ProgressLine):
    """Progress line that keeps all its works."""

    def __init__(self):
        self.works = []
        super().__init__()

    def begin(self, what, total=0.0, done=0.0):
        super().begin(what, total, done)
        self.works.append(self.work)


def test_prepare_counts_all_its_bytes(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(8):
        (texts / f"{number}.txt").write_text(f"text {number} of a few words\n" * 9)
    noted = Noted()
    request = Request(tokenizer=TokenizerChoice("train", 260), valid_fraction=0.1, num_workers=1)
    prepare_corpus(input_corpus([str(texts)]), tmp_path / "out", request, noted)
    size = sum(path.stat().st_size for path in texts.iterdir())
    full = {work.what: work.done for work in noted.works if work.total}
    assert full == {"checksums of 8 file(s)": size, f"encoding {size:,} bytes": size}
