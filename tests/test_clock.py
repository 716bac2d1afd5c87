"""Named spans add up, inner ones are taken out of outer ones, and nothing is measured unless asked."""

from __future__ import annotations

import pytest
import torch

from megamix import clock as clock_module
from megamix.clock import Clock


@pytest.fixture
def now(monkeypatch):
    """A clock that the test moves by hand."""
    time = {"s": 0.0}
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: time["s"])
    return time


def test_spans_add_up_without_what_lies_inside_them(now) -> None:
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


def test_a_clock_that_is_off_measures_nothing(now) -> None:
    clock = Clock(torch.device("cpu"))
    with clock.span("outer"):
        now["s"] += 1.0
    assert clock.read() == {}


def test_an_error_inside_a_span_leaves_the_clock_usable(now) -> None:
    clock = Clock(torch.device("cpu"))
    clock.enabled = True
    with pytest.raises(ValueError, match="planted"), clock.span("outer"):
        raise ValueError("planted")
    with clock.span("next"):
        now["s"] += 1.0
    assert clock.read() == {"next": 1.0}
