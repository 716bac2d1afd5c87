"""Jobs of a CPU machine, measured for the time model: `python -m tests.tools.plan.measured_jobs FILE [NAME ...]`.

FILE gets another measurement of the jobs that are named, or of all, and of the machine. Let nothing else compute
meanwhile. What was measured on one machine is in measured_jobs.json.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from megamix.config import axis_key, data_parallel_size, load_config
from megamix.tools.plan.calibrate import MeasuredStep, calibrate, measured_step
from megamix.tools.plan.time_constants import fitted_constants
from megamix.tools.plan.time_hardware import load_hardware, measured_hardware
from megamix.tools.plan.time_job import timed_job
from megamix.tools.plan.time_model import step_time
from tests.programs import with_settings

ROOT = Path(__file__).resolve().parents[3]
JOB, FILE = Path(__file__).with_name("measured_job.toml"), Path(__file__).with_suffix(".json")
RATES = ("cores", "wire", "products", "copy")  # doctor's checks that the time model reads
LARGE = "model.hidden_size=512 model.num_heads=8"
PIPELINE = "parallelism.pipeline"

# Overrides by name, which begins with the number of ranks.
SHORT = {"mb": "training.micro_batch_size"} | {axis: f"parallelism.{axis_key(axis)}" for axis in ("tp", "pp", "cp")}
FEW = {
    "1 small": "mb=2",
    "1 large": f"mb=4 {LARGE}",
    "2 dp2 states": "mb=4",
    "2 dp2 gradients": "mb=2 parallelism.shard=gradients",
    "2 dp2 parameters": "mb=2 parallelism.shard=parameters",
    "2 dp2 recompute": f"mb=2 model.recompute=full {LARGE}",
    "2 tp2": "mb=4 tp=2",
    "2 tp2 whole positions": f"mb=2 tp=2 parallelism.tensor.sequence_parallel=false {LARGE}",
    "2 pp2 1f1b": "mb=1 pp=2",
    "2 pp2 interleaved": f"mb=2 pp=2 {PIPELINE}.schedule=interleaved_1f1b {PIPELINE}.stages_per_rank=2",
    "2 cp2 gather": "mb=4 cp=2",
    "2 cp2 heads": "mb=2 training.global_batch_size=4 cp=2 parallelism.context.method=heads model.seq_len=512",
}
MANY = {  # more ranks than cores
    "4 dp4": "mb=2",
    "4 dp4 parameters": "mb=1 parallelism.shard=parameters",
    "4 dp4 recompute": "mb=2 model.recompute=full",
    "4 dp2 tp2": "mb=2 tp=2",
    "4 tp4": "mb=1 tp=4 model.num_heads=4",
    "4 pp4": "mb=1 pp=4",
    "4 dp2 pp2": "mb=1 pp=2",
    "4 dp2 cp2": "mb=4 cp=2",
    "4 cp4": "mb=2 cp=4",
    "4 tp2 pp2 recompute": "mb=2 tp=2 pp=2 model.recompute=full",
    "8 dp8": "mb=1",
    "8 dp8 parameters": "mb=1 parallelism.shard=parameters",
    "8 dp8 recompute": "mb=1 model.recompute=full",
    "8 dp4 tp2": "mb=1 tp=2",
    "8 dp2 tp4": "mb=1 tp=4 model.num_heads=4",
    "8 dp4 pp2": "mb=1 pp=2",
    "8 dp4 cp2": "mb=2 cp=2",
    "8 dp2 cp4": "mb=4 cp=4",
    "8 dp2 tp2 pp2": "mb=1 tp=2 pp=2",
    "8 cp2 tp2 pp2 recompute": "mb=2 cp=2 tp=2 pp=2 model.recompute=full",
}
JOBS = FEW | MANY
CALIBRATED = ("1 large", "2 dp2 states")


def overrides_of(name):
    pairs = (word.split("=", 1) for word in JOBS[name].split())
    return [f"{SHORT.get(key, key)}={value}" for key, value in pairs]


def job_of(name):
    config = load_config(JOB, overrides_of(name))
    return timed_job(config, data_parallel_size(config.parallelism, int(name.split()[0])))


def compared(measured):
    """Return by job (predicted, measured) seconds of a step, of `measured`, the content of a file: medians.

    With more ranks than cores it is the processor time of all ranks, as if each had a core of its own. Ranks of a
    pipeline together compute what a rank with all layers does, and do not wait.
    """
    machines = [measured_hardware(report["checks"], load_hardware("cpu")) for report in measured["doctor"]]
    rates = ("dense_flops", "memory_bytes_per_s", "link_bytes_per_s")
    machine = replace(machines[0], **{rate: median(getattr(one, rate) for one in machines) for rate in rates})
    taken = {name: median(one["seconds" if name in FEW else "processor"] for one in measured[name]) for name in JOBS}
    steps = [
        MeasuredStep(job_of(name), machine, taken[name], median(one["computing"] for one in measured[name]))
        for name in CALIBRATED
    ]
    constants = calibrate(steps, fitted_constants()).values
    foreseen = {}
    for name in JOBS:
        job = job_of(name)
        if name in FEW:
            foreseen[name] = step_time(job, machine, constants).seconds
        else:
            alone = step_time(replace(job, pp=1, stages=1), replace(machine, cores=0), constants)
            foreseen[name] = job.gpus / job.pp * alone.seconds
    return {name: (foreseen[name], taken[name]) for name in JOBS}


def measure(name):
    """Train a job, and return the medians of its steps: seconds, computing, and processor seconds of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        settings = with_settings(
            NPROC_PER_NODE=name.split()[0], MEGAMIX_PYTHON=sys.executable, PROCESSOR_TIME=folder, PYTHONPATH=ROOT
        )
        settings.pop("OMP_WAIT_POLICY", None)  # of the tests; a user's threads spin for a while
        command = ["launch/pretrain.sh", str(JOB), *overrides_of(name), f"checkpoint.folder={folder}/run"]
        done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
        steps = load_config(JOB, overrides_of(name)).training.steps
        assert f"step {steps}/{steps} |" in done.stdout, done.stdout + done.stderr
        step = measured_step(Path(folder) / "run/metrics.jsonl", job_of(name), load_hardware("cpu"))
        processor = 0
        for path in Path(folder).glob("rank*"):
            noted = [float(line) for line in path.read_text().split()]
            begun = noted[:: len(noted) // steps]
            processor += (begun[-1] - begun[2]) / (len(begun) - 3)  # without the rank's first steps
        return {"seconds": step.seconds, "computing": step.computing, "processor": processor}


def main(arguments):
    path, names = Path(arguments[0]), arguments[1:] or ["doctor", *JOBS]
    measured = json.loads(path.read_text()) if path.is_file() else {}
    for name in names:
        measured.setdefault(name, []).append(measure(name) if name in JOBS else _doctor())
        path.write_text(json.dumps(measured, indent=1))
    if not JOBS.keys() - measured.keys():
        print("| job | predicted | measured | % |")
        for name, (foreseen, taken) in compared(measured).items():
            print(f"| {name} | {foreseen:.2f} s | {taken:.2f} s | {100 * (foreseen / taken - 1):+.0f} |")


def _doctor():
    """Return what doctor says of this machine's rates."""
    command = [sys.executable, "-m", "megamix", "doctor", "--json", "--folder", tempfile.gettempdir()]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    return {"checks": [check for check in map(json.loads, told) if check.get("check") in RATES]}


if __name__ == "__main__":
    main(sys.argv[1:])
