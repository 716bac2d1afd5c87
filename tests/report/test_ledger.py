"""The ledger of a start counts each second into one bucket: attempts by their outcome, the wait for data, compiling,
and an attempt that stood still.
"""

import os

from megamix.report.ledger import COMPILE, SAVING, START, TRAINED, VALIDATION, Ledger, age_s, boot_s


class _Story:
    """A ledger whose time passes by hand."""

    def __init__(self):
        self.now_s = 100.0
        self.ledger = Ledger(90.0, lambda: self.now_s)

    def passes(self, seconds):
        self.now_s += seconds
        return self.ledger

    def first_attempts(self):
        """Ten seconds of start, attempts of 5 s and 2 s, and the outcome of one of them."""
        self.ledger.enter(COMPILE)
        for took_s in (5.0, 2.0):
            self.passes(took_s).launched(took_s)
        self.ledger.settle(applied=True, waited_s=0.0)


def test_each_second_is_in_one_bucket():
    story = _Story()
    story.passes(2).enter(START)
    story.ledger.move(4.0, of=START, to=COMPILE)
    story.first_attempts()
    story.passes(2).settle(applied=False, waited_s=0.5)
    story.passes(2).settle(applied=True, waited_s=0.75)
    story.ledger.enter(VALIDATION)
    story.passes(3).enter(TRAINED)
    story.ledger.enter(SAVING)
    at_s, phase, seconds = story.passes(1).read()
    assert (at_s, phase) == (27.0, SAVING)
    # The first attempt took 3 s longer than the second. Its 5 s were compiling until that was known.
    assert seconds == {
        "start": 8.0, "compile": 7.0, "trained": 4.0 + 1.75, "overflow": 1.5, "waiting": 0.75, "validation": 3.0
    }  # fmt: skip
    assert sum(seconds.values()) == at_s - 1.0  # which belongs to the save under way


def test_an_attempt_that_stood_still_is_told_apart_from_a_slow_one():
    story = _Story()
    story.first_attempts()
    for took_s in (2, 11, 2, 32):  # up to three times the usual and 5 s are no stall
        story.passes(took_s).settle(applied=True, waited_s=0.0)
    seconds = story.ledger.read().seconds
    usual_s = 0.9 * (0.9 * 2 + 0.1 * 11) + 0.1 * 2
    assert seconds["stalled"] == round(32 - usual_s, 3)
    assert seconds["trained"] == round(4 + 2 + 11 + 2 + usual_s, 3)


def test_the_first_outcome_of_a_loop_that_waits_for_each_is_no_measure_of_an_attempt():
    story = _Story()
    story.ledger.enter(COMPILE)
    for took_s in (8.0, 7.0):
        story.passes(took_s).launched(took_s)
        story.ledger.settle(applied=True, waited_s=0.0)
    assert "stalled" not in story.ledger.read().seconds


def test_a_start_is_as_old_as_its_process():
    age = age_s(os.getpid())
    assert 0 < age < boot_s()
    assert age_s(2**22 + 1) == 0.0
