"""Named spans add up, inner spans are subtracted from outer ones, and nothing is measured unless asked."""

import pytest
import torch

from megamix.base import clock as clock_module
from megamix.base.clock import Clock


@pytest.fixture
def now(monkeypatch):
    """A clock that the test moves by hand."""
    time = {"s": 0.0}
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: time["s"])
    return time


def test_spans_add_up_without_what_lies_inside_them(now):
    clock = Clock(torch.device("cpu"))
    clock.enabled = True
    for _ in range(2):
        with clock.span("outer"):
            now["s"] += 1.0
            with clock.span("inner"):
                now["s"] += 0.25
    with clock.span("inner"):
        now["s"] += 0.5
    assert clock.read() == {"outer": 2.0, "inner": 1.0}
    assert clock.read() == {}


def test_a_clock_that_is_off_measures_nothing(now):
    clock = Clock(torch.device("cpu"))
    with clock.span("outer"):
        now["s"] += 1.0
    assert clock.read() == {}


def test_an_error_inside_a_span_leaves_the_clock_usable(now):
    clock = Clock(torch.device("cpu"))
    clock.enabled = True
    with pytest.raises(ValueError, match="planted"), clock.span("outer"):
        raise ValueError("planted")
    with clock.span("next"):
        now["s"] += 1.0
    assert clock.read() == {"next": 1.0}


def test_a_gpus_spans_are_counted_when_it_has_passed_them_and_not_waited_for(monkeypatch):
    class Event:
        """Of a device that passes an event each second; whoever waits for one fails."""

        recorded = passed = 0

        def __init__(self, enable_timing):
            pass

        def record(self):
            Event.recorded += 1
            self.at = Event.recorded

        def query(self):
            return self.at <= Event.passed

        def elapsed_time(self, end):
            return 1000.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = Clock(torch.device("cuda"))
    clock.enabled = True
    for _ in range(2):
        with clock.span("outer"), clock.span("inner"):
            pass
    Event.passed = 6  # all of the first, and half of what is inside the second
    assert clock.read() == {"outer": 2.0, "inner": 1.0}
    assert clock.read() == {}
    Event.passed = 7  # what is inside, but not yet what it is inside of
    assert clock.read() == {}
    Event.passed = 8
    assert clock.read() == {"outer": 2.0, "inner": 1.0}
