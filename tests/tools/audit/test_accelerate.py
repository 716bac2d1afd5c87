"""`megamix.audit` reads accelerate's wrappers, and names the versions that keep no FP32 masters under FSDP2, because
they give the optimizer BF16 parameters.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
accelerate = pytest.importorskip("accelerate", reason="needs accelerate: install it into an environment of its own")
UPCAST_IS_LOST = accelerate.__version__.startswith("1.13.")  # 1.12 has the upcast in another way, 1.14 has it again


@pytest.mark.parametrize(
    ("wrapper", "dtype", "wrong"),
    [
        ("ddp", "float32", False),
        ("ddp", "bfloat16", True),
        ("fsdp2", "float32", False),
        ("fsdp2", "bfloat16", UPCAST_IS_LOST),
    ],
)
def test_masters_that_are_not_there_are_named(wrapper, dtype, wrong, tmp_path):
    program, output = str(ROOT / "tests/tools/audit/accelerate_loop.py"), tmp_path / "report.json"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run([*run, wrapper, dtype, str(output)], check=True, env=settings, timeout=300, cwd=tmp_path)
    told = json.loads(output.read_text())
    masters = {row["dtypes"]["master"] for row in told["rows"]}
    assert masters == ({"bf16"} if wrong else {"fp32"})
    harms = [one["what"] for one in told["warnings"] if one["harms"]]
    assert any(what.startswith("no FP32 master; 100% of this step's updates") for what in harms) == wrong
