"""Real runs that are killed, stopped, hung, starved of data or of disk space, and started again: each bucket of their
goodput is what a clock outside says, and the cause of each stop is right.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from megamix.data.loader import BatchLoader
from megamix.report.goodput import STALE, STALE_S, read_goodput
from megamix.report.journal import KILLED
from megamix.run.checkpointing import RunCheckpoints
from megamix.tools.ranks import DEADLINE_S
from megamix.train.trainer import Trainer
from tests.builders import tiny_job
from tests.conftest import FULL
from tests.train.broken_disk import FULL as FULL_DISK
from tests.train.broken_disk import broken_disk
from tests.train.fresh_ranks import FreshRanks

STEPS, SAVE_EVERY, STRIKE_AT = (60, 20, 33) if FULL else (12, 4, 7)
TIMEOUT_S = 12.0
STOPPED_AT, STOPPED_S = 25, 9.0
DATA_AT, DATA_S = range(10, 15), 0.6
DOWN_S = 3.0  # between two starts
MOST_APART = 1.0, 0.03  # seconds, and share of the bucket
UNTIL_THE_END = ExitStack()  # of a rank's process


def _kill(*victims):
    return lambda rank, folder: os.kill(os.getpid(), signal.SIGKILL) if rank in victims else None


def _send(number, victim):
    return lambda rank, folder: os.kill(os.getpid(), number) if rank == victim else None


def _hang(victim):
    return lambda rank, folder: threading.Event().wait(1e6) and None if rank == victim else None


def _raise(rank, folder):
    if rank == 1:
        raise ArithmeticError("planted")


def _fill_the_disk(rank, folder):
    UNTIL_THE_END.enter_context(broken_disk(folder / "run")).fault = FULL_DISK


class Trouble(NamedTuple):
    """A trouble of a run's first start before attempt STRIKE_AT, and the end that the journal must tell."""

    strike: Callable[[int, Path], None]  # takes the rank, and the job's folder
    state: str
    reason: str  # a pattern


NO_PROGRESS = rf"no progress for {TIMEOUT_S:g} s \(parallelism.timeout_s\): "
TROUBLES = {
    "all killed": Trouble(_kill(0, 1), KILLED, "killed without a word while training"),
    "second killed": Trouble(_kill(1), "failed", "rank 1 died"),
    "first killed": Trouble(_kill(0), "failed", "rank 0 died"),
    "asked": Trouble(_send(signal.SIGTERM, 1), "preempted", r"asked to stop \(SIGTERM\)"),
    "raised": Trouble(_raise, "failed", "rank 1 failed in .*planted"),
    "second hung": Trouble(_hang(1), "failed", f"{NO_PROGRESS}rank 1 fell behind"),
    "first hung": Trouble(_hang(0), "failed", f"{NO_PROGRESS}rank 0 fell behind"),
    "second stopped": Trouble(_send(signal.SIGSTOP, 1), "failed", f"{NO_PROGRESS}no sign of life from rank 1"),
    "first stopped": Trouble(_send(signal.SIGSTOP, 0), "failed", f"{NO_PROGRESS}no sign of life from rank 0"),
    "disk full": Trouble(_fill_the_disk, "failed", "the last checkpoint could not be saved: .*No space left on device"),
}


class Watch(NamedTuple):
    """Called on every rank before each attempt: strikes, and writes down by a clock of its own what the first rank
    does.
    """

    folder: Path
    start: int
    trouble: str

    def __call__(self, rank, number):
        if rank == 0 and not hasattr(Trainer, "is_watched"):
            Trainer.is_watched = True  # type: ignore[attr-defined]  # this process is the rank's own
            self._note_within(Trainer, "_validate", "validation")
            self._note_within(RunCheckpoints, "save", "saving")
            self._note_within(Trainer, "save_last", "saving")
            self._note_within(BatchLoader, "load", "waiting")
        if rank == 0:
            self._note(f"{number}")
        if self.start == 0 and FULL and rank == 1 and number == STOPPED_AT:
            subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.start == 0 and number == STRIKE_AT:
            TROUBLES[self.trouble].strike(rank, self.folder)

    def _note(self, what):
        with (self.folder.parent / f"{self.folder.name}_{self.start}.txt").open("a") as file:
            file.write(f"{time.time()} {what}\n")

    def _note_within(self, kind, name, what):
        call = vars(kind)[name]

        def noted(*args, **kwargs):
            self._note(f"{what} begins")
            late = what == "waiting" and FULL and self.start == 0 and self.attempt() in DATA_AT
            threading.Event().wait(DATA_S if late else 0)
            result = call(*args, **kwargs)
            self._note(f"{what} ends")
            return result

        setattr(kind, name, noted)

    def attempt(self):
        """Return the attempt of the first rank that was noted last."""
        return max(int(what) for _, what in self.notes() if what.isdecimal())

    def notes(self):
        lines = (self.folder.parent / f"{self.folder.name}_{self.start}.txt").read_text().splitlines()
        return [(float(t), what) for t, _, what in (line.partition(" ") for line in lines)]


class Life(NamedTuple):
    """One start of a run, as seen from outside."""

    begin_t: float
    end_t: float
    watch: Watch


def _true_seconds(lives):
    """Return the seconds by bucket, by the notes of the first rank and the times of its processes."""
    seconds = defaultdict(float)
    last_try = {what: life.watch.start for life in lives for _, what in life.watch.notes() if what.isdecimal()}
    for life in lives:
        notes = life.watch.notes()
        seconds["start"] += notes[0][0] - life.begin_t
        attempts = defaultdict(float)
        attempt, within = "", [""]
        for (t, what), (next_t, _) in pairwise([*notes, (life.end_t, "")]):
            if what.isdecimal():
                attempt, within = what, [""]
            elif what.endswith("begins"):
                within.append(what.split()[0])
            else:
                within.pop()
            if within[-1] and not (within[-1] == "waiting" and "validation" in within):
                seconds[within[-1]] += next_t - t
            elif within[-1]:
                seconds["validation"] += next_t - t
            elif next_t == life.end_t and what == "saving ends":  # all is done but the end
                seconds["saving"] += next_t - t
            else:
                attempts[attempt] += next_t - t
        first, second, *_ = attempts
        if attempts[first] > attempts[second]:
            seconds["compile"] += attempts[first] - attempts[second]
            attempts[first] = attempts[second]
        usual_s = sorted(attempts.values())[len(attempts) // 2]
        for number, took_s in attempts.items():
            kept_s = took_s
            if took_s > TIMEOUT_S / 2 + usual_s:  # it was planted
                seconds["stalled"] += took_s - usual_s
                kept_s = usual_s
            seconds["trained" if last_try[number] == life.watch.start else "redone"] += kept_s
    seconds["down"] = sum(after.begin_t - before.end_t for before, after in pairwise(lives))
    return seconds


def _live(folder, data, trouble):
    """Start a run until it is finished."""
    config = tiny_job(
        folder,
        tokens=data,
        dtype="fp32",
        loss_scale={},
        steps=STEPS,
        eval_interval=SAVE_EVERY * 3 // 2,
        timeout_s=TIMEOUT_S,
        save_interval=SAVE_EVERY,
        async_save=False,
        on_save_failure="stop",
    )
    lives = []
    for start in range(2):
        if lives:
            threading.Event().wait(DOWN_S if FULL else 0)
        watch = Watch(folder, start, trouble)
        ranks = FreshRanks(config, 2, watch)
        begin_t = time.time()  # the first ranks of a test run wait for the process that forks them
        statuses = ranks.join(DEADLINE_S)
        lives.append(Life(begin_t, ranks.ended_s, watch))
        if start == 0 and trouble == "all killed":
            silent_s = STALE_S + 10
            assert read_goodput(folder / "run", ranks.ended_s + silent_s).starts[-1].state == STALE
    assert statuses == [0, 0], ranks.said(0)
    return lives


@pytest.mark.parametrize("trouble", TROUBLES if FULL else ["all killed"])
def test_each_bucket_is_that_of_a_clock_outside_and_the_cause_is_right(tmp_path, data, trouble):
    (tmp_path / "job").mkdir()
    lives = _live(tmp_path / "job", data, trouble)
    goodput, true = read_goodput(tmp_path / "job/run"), _true_seconds(lives)
    first, second = goodput.starts
    assert (first.state, second.state) == (TROUBLES[trouble].state, "finished")
    assert re.match(TROUBLES[trouble].reason, first.reason), first.reason
    wrong = {
        bucket: (round(seconds, 2), round(true[bucket], 2))
        for bucket, seconds in goodput.seconds.items()
        if abs(seconds - true[bucket]) > max(MOST_APART[0], MOST_APART[1] * true[bucket])
    }
    assert wrong == {}, (goodput.seconds, dict(true))
    assert goodput.wall_s == pytest.approx(lives[-1].end_t - lives[0].begin_t, abs=2 * MOST_APART[0])
