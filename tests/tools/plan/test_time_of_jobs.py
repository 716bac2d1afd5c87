"""The time model against jobs of a CPU machine: ten jobs after two that calibrate it, and the order of layouts by the
processor time of more ranks than cores.
"""

import json

import numpy as np
import pytest

from tests.conftest import FULL
from tests.tools.plan.measured_jobs import CALIBRATED, FILE, Measurements, main


def judge(file):
    measurements = Measurements.of(json.loads(file.read_text(encoding="utf-8")))
    off = [abs(share) for name, share in measurements.off().items() if name not in CALIBRATED]
    assert len(off) == 10
    assert np.mean(off) <= 0.10
    pairs = [pair for ranks in (4, 8) for pair in measurements.pairs(ranks)]
    assert len(pairs) > 50
    assert np.mean([(seen > 1) == (foreseen > 1) for seen, foreseen in pairs]) >= 0.9


def test_jobs_that_were_measured_once_are_predicted():
    judge(FILE)


@pytest.mark.skipif(not FULL, reason="--full: 32 jobs on a machine where nothing else computes, 15 minutes")
def test_jobs_of_this_machine_are_predicted(tmp_path):
    main([str(tmp_path / "measured.json")])
    judge(tmp_path / "measured.json")
