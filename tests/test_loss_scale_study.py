"""docs/studies/loss_scales.py runs, and shows what headroom is for: overflow is rare."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from megamix import HeadroomLossScale

STUDY = runpy.run_path(str(Path(__file__).parents[1] / "docs/studies/loss_scales.py"), run_name="study")


@pytest.mark.parametrize("world", ["drift", "drift and noise"])
def test_headroom_overflows_in_under_a_fiftieth_of_a_percent_of_20_000_steps(world: str) -> None:
    outcome = STUDY["run"](HeadroomLossScale(), STUDY["worlds"](20_000)[world])
    assert outcome.share < 0.0002
    assert 2 <= outcome.octaves_below < 6  # the price of it


def test_every_other_rule_begins_with_overflows() -> None:
    findings = STUDY["measure"](300)
    search = {rule: by_world["fixed"].search for rule, by_world in findings.items()}
    assert search == {
        "headroom": 0, "dynamic": 9, "torch": 1, "MXNet": 2, "deepspeed": 2, "deepspeed, consecutive": 2,
        "megatron": 18,
    }  # fmt: skip
    assert len(STUDY["text"](findings).splitlines()) == 2 + len(findings)
