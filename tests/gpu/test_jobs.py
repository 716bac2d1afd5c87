"""On simulated GPUs whole jobs wait for the device only in the readout, in 50 steady steps, and each of twelve planted
waits is reported. A run that a signal ends resumes to the bits of an uninterrupted one, and can be planned, evaluated
and exported. A rank that hangs is named; a job that saves and profiles uses only its own GPU.
"""

import json
import signal
from collections import Counter
from itertools import pairwise
from unittest import mock

import torch

from megamix.cli import main
from megamix.train.trainer import Trainer
from tests.builders import run_on_ranks, tiny_job
from tests.gpu.pools import processes_with_gpus
from tests.supervise import test_signals, test_watchdog
from tests.train.outcome import differences, end_of
from tests.train.recorded import Record, attempts_recorded

FIRST, STEADY = 4, 50
READOUT = "synchronize of an event at megamix/report/interval_report.py"


def _synchronize():
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


PLANTS = {
    "host read: _local_scalar_dense": lambda t: t.sum().item(),
    "host read: nonzero": lambda t: t.nonzero(),
    "host read: index by a mask": lambda t: t[t > 0],
    "host read: masked_select": lambda t: t.masked_select(t > 0),
    "host read: equal": lambda t: torch.equal(t, t),
    "host read: _unique2": lambda t: t.unique(),
    "host read: copy_ to the host": lambda t: t.tolist(),
    "copy from pageable memory: copy_ to the device": lambda t: t.copy_(torch.zeros(3), non_blocking=True),
    "copy from pageable memory: an index": lambda t: t[torch.tensor([0, 2])],
    "blocking copy: copy_ to the device": lambda t: torch.zeros(3, pin_memory=True).to(t.device),
    "synchronize of an event": lambda t: _synchronize(),
    "synchronize of a device": lambda t: torch.cuda.synchronize(),
}


def _waits(config):
    """Return what has made the host wait for the device, and where, in STEADY attempts of a job, and in as many more as
    there are plants, one in each.
    """
    from tests.gpu import simulated

    right, begins, seen = Trainer._note, (FIRST, FIRST + STEADY, FIRST + STEADY + len(PLANTS)), []

    def note(plan):
        if plan.launched in begins:
            seen.append(Counter({f"{what} at {place}": count for (what, place), count in simulated.waits.items()}))

    def plant(self, attempt, result):
        right(self, attempt, result)
        if attempt.number >= begins[1]:
            [*PLANTS.values()][(attempt.number - begins[1]) % len(PLANTS)](torch.ones(3, device=self.device))

    with attempts_recorded(Record(), note), mock.patch.object(Trainer, "_note", plant):
        run_on_ranks(config)
    return [behind - before for before, behind in pairwise(seen)]


def test_steady_steps_make_the_host_wait_in_the_readout_alone(gpu_ranks, data, tmp_path):
    config = tiny_job(
        tmp_path,
        tokens=data,
        valid=None,
        loss_scale={"rule": "static", "init_scale": 2.0**8},
        steps=FIRST + STEADY + len(PLANTS) + 1,
        eval_interval=0,
        log_interval=1000,
    )
    for steady, planted in gpu_ranks(_waits, 2, config):
        assert [(wait.startswith(READOUT), count) for wait, count in steady.items()] == [(True, STEADY)], steady
        assert [kind for kind in PLANTS if not any(wait.startswith(f"{kind} at tests/") for wait in planted)] == []


def _use(run, out):
    """Return the exit statuses of what is done with a run behind its end."""
    verbs = f"plan {run}/config.toml", f"evaluate {run} --stride 32", f"export {run} --to hf {out}"
    return [main(verb.split()) for verb in verbs]


def test_a_run_that_a_signal_ends_goes_on_to_the_bits_of_one_that_none_ended(gpu_ranks, data, tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "asked").mkdir()
    dense = {"model": {"experts": None}, "parallelism": {"ep_size": 1}}  # a format for such experts is missing
    whole, asked = (test_signals._config(tmp_path / name, data).with_keys(**dense) for name in ("whole", "asked"))
    assert gpu_ranks(test_signals._outcome, 2, whole) == ["finished"] * 2
    said = gpu_ranks(test_signals._asked, 2, asked, "validating", 1, 0, signal.SIGTERM, seed=1)
    assert all("(SIGTERM): ended after update" in each.outcome for each in said)
    assert gpu_ranks(test_signals._outcome, 2, asked, seed=2) == ["finished"] * 2
    assert differences(end_of(tmp_path / "asked"), end_of(tmp_path / "whole")) == []
    assert gpu_ranks(_use, 1, tmp_path / "asked/run", tmp_path / "hf") == [[0, 0, 0]]


def test_a_rank_that_hangs_is_named_and_ends_all(gpu_ranks, data, tmp_path):
    with processes_with_gpus():
        ranks = test_watchdog._start(tmp_path / "hangs", data, test_watchdog._asleep, 1, 5.0)
    end = test_watchdog._ended(ranks)
    assert "NCCL" in ranks.said(0)
    assert end.statuses == [1, 1]
    assert test_watchdog._verdict(test_watchdog._asleep, 1) in end.status["reason"]


def test_a_job_that_saves_beside_training_and_profiles_steps_keeps_to_its_own_gpu(gpu_ranks, data, tmp_path):
    config = tiny_job(
        tmp_path, tokens=data, valid=None, steps=4, eval_interval=0, save_interval=2, start_step=1, num_steps=2
    )
    gpu_ranks(run_on_ranks, 2, config)
    assert (tmp_path / "run/checkpoints/step_00000002").is_dir()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {row["communication/attempt"] for row in rows if "communication/bucket" in row} == {1, 2}
