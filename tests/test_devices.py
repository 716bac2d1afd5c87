"""`pytest --device` keeps its word: without it no test sees a GPU, `cuda` without a GPU is an error, and on the
simulated GPU exactly the tests of tests/gpu/cpu_only.txt fail, by which those for a real one are chosen.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import devices
from tests.conftest import FULL
from tests.gpu import library

ROOT = Path(__file__).parents[1]
# Without `--full`, files of few seconds, with tests that pass and tests that fail.
SAMPLE = ["tests/mixed_precision/test_schedules.py", "tests/model/test_windows.py"]


def test_no_test_sees_a_gpu_unasked():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(pytest.UsageError, match="--device cuda: torch sees no GPU here"):
        devices.prepare("cuda")


@pytest.mark.skipif(library.missing() is not None, reason=f"{library.missing()}")
def test_the_simulated_gpu_fails_the_tests_that_are_written_down_and_no_others():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "simulated"]
    done = subprocess.run([*command, *(devices.ROOMS if FULL else SAMPLE)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"python -m tests.gpu.cpu_only writes down what it cannot run\n{done.stdout[-4000:]}"
    assert " xfailed" in done.stdout


def test_what_is_written_down_is_there():
    for name in devices.cpu_only():
        file, _, test = name.partition("[")[0].partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), name
