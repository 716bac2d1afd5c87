"""On simulated GPUs whole jobs wait for the device only in the readout, in steady steps, and each of twelve planted
waits is reported. A run that a signal ends resumes to the bits of an uninterrupted one, and can be planned, evaluated
and exported. A rank that hangs is named; a job that saves and profiles uses only its own GPU. A step
with experts in BF16 reads nothing on the host; where ranks exchange tokens it reads the numbers of rows once for each
layer and micro-batch, and not again where backward repeats a forward. In FP16 a layer reads them once.
"""

import json
import shutil
import signal
from collections import Counter
from itertools import pairwise
from unittest import mock

import pytest
import torch

from megamix.cli.verbs import main
from megamix.train.trainer import Trainer
from tests.builders import run_on_ranks, tiny_job
from tests.gpu.pools import processes_with_gpus
from tests.launch import test_signals, test_watchdog
from tests.model.grouped import grouped_products
from tests.train import test_mirror
from tests.train.outcome import differences, end_of
from tests.train.recorded import Record, attempts_recorded

FIRST, STEADY = 4, 10
READOUT = "synchronize of an event at megamix/mixed_precision/step.py"


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


def noting(seen, attempts):
    """Return what notes, before each of these attempts, all that has made the host wait for the device, and where."""
    from tests.gpu import simulated

    def note(plan):
        if plan.launched in attempts:
            seen.append(Counter({f"{what} at {place}": count for (what, place), count in simulated.waits.items()}))

    return note


def _waits(config):
    """Return the waits of STEADY attempts of a job, and of as many more as there are plants, one in each."""
    right, begins, seen = Trainer._note, (FIRST, FIRST + STEADY, FIRST + STEADY + len(PLANTS)), []

    def plant(self, attempt, result):
        right(self, attempt, result)
        if attempt.number >= begins[1]:
            [*PLANTS.values()][(attempt.number - begins[1]) % len(PLANTS)](torch.ones(3, device=self.device))

    with attempts_recorded(Record(), noting(seen, begins)), mock.patch.object(Trainer, "_note", plant):
        run_on_ranks(config)
    return [behind - before for before, behind in pairwise(seen)]


def _job(folder, tokens, **settings):
    return tiny_job(folder, tokens=tokens, valid=None, eval_interval=0, **settings)


def test_steady_steps_make_the_host_wait_in_the_readout_alone(gpu_ranks, data, tmp_path):
    rule = {"rule": "static", "init_scale": 2.0**8}
    steps = FIRST + STEADY + len(PLANTS) + 1
    config = _job(tmp_path, data, loss_scale=rule, steps=steps, log_interval=1000)
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
    dense = {"model": {"experts": None}, "parallelism": {"expert": None}}  # a format for such experts is missing
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
    assert test_watchdog._verdict(test_watchdog._asleep, 1) in end.status.reason


def test_a_job_that_saves_beside_training_and_profiles_steps_keeps_to_its_own_gpu(gpu_ranks, data, tmp_path):
    gpu_ranks(run_on_ranks, 2, _job(tmp_path, data, steps=4, save_interval=2, start_step=1, num_steps=2))
    assert (tmp_path / "run/checkpoints/step_00000002").is_dir()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {row["communication/attempt"] for row in rows if "communication/bucket" in row} == {1, 2}


EXPERTS = {
    "num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "balance_loss": 0.01,
    "z_loss": 0.001,
}  # fmt: skip
FEW = 2  # steady attempts of a job with experts


def _waits_of_experts(config):
    seen = []
    with grouped_products(), attempts_recorded(Record(), noting(seen, (FIRST, FIRST + FEW))):
        run_on_ranks(config)
    ((before, behind),) = pairwise(seen)
    return behind - before


@pytest.mark.parametrize(
    ("dtype", "place", "recompute", "reads"),
    [
        ("bf16", {}, "full", 0),
        ("bf16", {"expert": {"size": 2}}, "full", 1),
        ("bf16", {"expert": {"size": 2, "method": "gather"}}, "full", 0),
        ("fp16", {}, "none", 1),
    ],
)
def test_a_step_reads_the_numbers_of_rows_where_ranks_exchange_them_and_nothing_else(
    gpu_ranks, data, tmp_path, dtype, place, recompute, reads
):
    rule = {"bf16": {"rule": "off"}, "fp16": {"rule": "static", "init_scale": 1024.0}}[dtype]
    settings = {"dtype": dtype, "loss_scale": rule, "recompute": recompute, "parallelism": place}
    config = _job(tmp_path, data, experts=EXPERTS, steps=FIRST + FEW + 1, log_interval=1000, **settings)
    layers, micro_batches = 2, 2
    reader = "parallel/expert_parallel" if place else "model/ops"
    for waits in gpu_ranks(_waits_of_experts, 2, config):
        others = {at: count for at, count in waits.items() if not at.startswith(READOUT) and " tests/" not in at}
        assert sum(others.values()) == reads * layers * micro_batches * FEW, others
        assert all(f"copy_ to the host at megamix/{reader}.py" in wait for wait in others), others


def _waits_of_mirrored(config):
    seen = []
    with attempts_recorded(Record(), noting(seen, (FIRST, FIRST + STEADY))):
        run_on_ranks(config)
    ((before, behind),) = pairwise(seen)
    return behind - before


def test_a_mirror_waits_for_the_outcome_and_its_counters_and_beside_the_loop_for_the_copy(gpu_ranks, data, tmp_path):
    config = _job(tmp_path, data, steps=FIRST + STEADY + 1, log_interval=1000, mirror=1)
    for waits in gpu_ranks(_waits_of_mirrored, 2, config):
        by_place = Counter()
        for wait, count in waits.items():
            by_place[wait.partition(" at megamix/")[2].partition(":")[0]] += count
        copies = by_place.pop("checkpoint/mirror.py")  # a thread waits for them, the last one perhaps not yet
        assert STEADY - 1 <= copies <= STEADY + 1
        assert by_place == {"mixed_precision/step.py": STEADY, "checkpoint/snapshot.py": 5 * STEADY}


def test_a_run_goes_on_from_the_copies_that_a_gpu_has_made(gpu_ranks, tmp_path):
    dies, whole = (test_mirror._made(tmp_path / name) for name in ("dies", "whole"))
    gpu_ranks(test_mirror._start, 2, test_mirror._config(whole, "dp 2", mirror=0), whole)
    config = test_mirror._config(dies, "dp 2", async_save=False)
    gpu_ranks(test_mirror._crash, 2, config, dies)
    shutil.rmtree(dies / "run/checkpoints")
    said, _ = gpu_ranks(test_mirror._start, 2, config, dies)
    assert "goes on from memory" in said
    assert test_mirror._differences(dies, whole) == []
