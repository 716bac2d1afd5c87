"""The first light's smoke runs on two simulated GPUs: both halves fall as by hand, each shard has the bits of one
process, and a planted fault of NCCL is told. Its update and its profile: test_bench, test_jobs.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = """
import json, sys
from dataclasses import asdict, replace
import tests.gpu.simulated
import torch
from megamix.tools import ranks
from megamix.tools.doctor import first_parts
from tests.tools.bench.tiny import WORK
ranks.PRELOADED[:0] = ["tests.gpu.simulated", *sys.argv[1:]]
torch.cuda.device_count = lambda: 2
first_parts.SIZES = {"3M": replace(WORK, lr=3e-3)}
for finding in first_parts.smoke():
    print(json.dumps(asdict(finding)))
"""


@pytest.mark.parametrize("planted", [[], ["tests.gpu.loses_a_rank"]])
def test_the_smoke_of_two_cards(gpu_ranks, planted):
    run = subprocess.run([sys.executable, "-c", SMOKE, *planted], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    findings = [json.loads(line) for line in run.stdout.splitlines()]
    verdicts = {finding["check"]: finding["verdict"] for finding in findings}
    shards = dict.fromkeys((f"shards {shard}" for shard in ("states", "gradients", "parameters")), "ok")
    if planted:
        shards = dict.fromkeys(shards, "broken")
    assert verdicts == {"smoke bfloat16": "ok", "smoke float16": "ok", **shards}
