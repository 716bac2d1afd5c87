"""The quickstart runs as a user starts it, with real torchrun ranks; a run that gives up says so by its status."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from megamix.cli.verbs import main
from tests.builders import tiny_job, write_data
from tests.conftest import FULL
from tests.programs import with_settings

ROOT = Path(__file__).resolve().parents[2]
# In the launcher and in ranks: a thread that is in torch when Python ends. That would abort the process.
SITECUSTOMIZE = """
import atexit, pathlib, sys, threading

begun = threading.Event()

def compute():
    ones = sys.modules["torch"].ones(64, 64)
    while True:
        ones @ ones
        begun.set()

def end():
    if pathlib.Path(sys.argv[0]).name in ("__main__.py", "pretrain.py") and "torch" in sys.modules:
        threading.Thread(target=compute, daemon=True).start()
        begun.wait(60)

atexit.register(end)
"""


def test_the_quickstart_trains_in_fp16_on_real_text(tmp_path):
    # A shorter run in a folder of its own; data is prepared once per clone, beside the user's.
    overrides = ["training.steps=30", "lr_schedule.warmup_steps=10", "training.eval_batches=2"]
    overrides += [f'checkpoint.folder="{tmp_path / "run"}"', "optimizer.compile=false"]
    if not FULL:
        overrides += ["training.micro_batch_size=2", "training.global_batch_size=4"]
        overrides += ["model.num_layers=2", "model.seq_len=64"]
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    environment = with_settings(MEGAMIX_PYTHON=sys.executable, NPROC_PER_NODE="2", PYTHONPATH=str(tmp_path))
    command = ["launch/quickstart.sh", *overrides]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # Until the first step the launcher and one rank print the phases of the start, in order; the log is as it was.
    phases = [line for line in result.stderr.splitlines() if re.match("megamix train: (?!still )", line)]
    assert [phase.removeprefix("megamix train: ") for phase in phases] == [
        "checking the job", "no problems; starting 2 ranks", "loading torch", "meeting all 2 ranks",
        "building the model",
    ]  # fmt: skip
    assert "2 rank(s)" in result.stdout
    assert result.stdout.count("valid loss") == 1  # at the end, said by one rank
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    scales = [row["optim/loss_scale"] for row in rows if "optim/loss_scale" in row]
    assert scales[0] == 2.0**24
    assert scales[-1] < 2.0**22
    assert rows[-1]["valid/loss"] < math.log(2048) - 1.2
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"metrics.jsonl", "config.toml", "weights.safetensors", "sample.txt", "tensorboard"}


def test_a_run_that_gives_up_ends_with_a_status_of_its_own(tmp_path, capsys):
    write_data(tmp_path / "data")
    config = tmp_path / "job.toml"
    # A step so long that the second forward is not finite, in every batch.
    precision = {"dtype": "bf16", "max_overflows_at_floor": 3}
    config.write_text(tiny_job(tmp_path, lr=1e30, min_lr=1e30, precision=precision).text)
    status, said = main(["train", str(config), "lr_schedule.warmup_steps=0"]), capsys.readouterr().err
    assert status == 3, said
    assert said.count("megamix train: gave up after 4 attempts and 1 updates") == 1
    assert (tmp_path / "run/gave_up.txt").read_text() in said
    assert load_file(tmp_path / "run/weights.safetensors")
