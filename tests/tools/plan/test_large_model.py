"""A model of 500 M parameters, of which a rank would otherwise hold more than 3 GiB, trains in 3 GiB a rank with `shard
= "parameters"`, as `train --check --memory` says.
"""

import resource

import pytest
import torch

from megamix.builders.objects import build_engine, build_runner
from megamix.cli import main
from megamix.comm.topology import Topology
from megamix.config import config_to_toml
from megamix.data.loader import Batch
from megamix.parallel.build import build_model, drawn
from megamix.parallel.micro_batch_runner import MicroBatch
from megamix.tools.plan.memory_plan import plan_memory
from megamix.tools.ranks import RankPool
from tests.builders import tiny_job, write_data
from tests.conftest import FULL

RANKS, STEPS, LIMIT = 4, 10, 3 * 2**30


def large_job(folder, shard):
    return tiny_job(
        folder,
        vocab_size=16384, seq_len=128, hidden_size=1280, num_layers=24, num_heads=20, tie_embeddings=False,
        optimizer={"compile": False, "lr": 1e-3},
        dtype="bf16",
        shard=shard,
        steps=STEPS, micro_batch_size=1, global_batch_size=RANKS,
    )  # fmt: skip


def _train(config):
    """Return the loss of each step, and the peak of this rank's resident memory in bytes.

    malloc gives freed memory back here; that of a job on CPUs keeps it for speed.
    """
    torch.set_num_threads(1)
    topology, cpu = Topology.connect(), torch.device("cpu")
    model, placements = build_model(config.model, config.parallelism, topology, cpu)
    engine = build_engine(config, model, model.units, 1, topology, placements, drawn(model, seed=0))
    runner, losses = build_runner(config, engine, model, []), []
    generator = torch.Generator().manual_seed(topology.dp.rank)
    samples = torch.randint(config.model.vocab_size, (1, config.model.seq_len + 1), generator=generator)
    tokens, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    for _ in range(STEPS):  # all steps have one batch, which the model learns
        runner.forward_backward(iter([MicroBatch(Batch(tokens, targets, None, targets.numel()))]))
        losses.append(float(engine.step().loss))
    return losses, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_check_names_the_setting_in_which_a_large_model_fits(tmp_path, monkeypatch, capsys):
    write_data(tmp_path / "data")
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    for shard in ("states", "parameters"):
        (tmp_path / f"{shard}.toml").write_text(config_to_toml(large_job(tmp_path, shard)))
    check = ["--check", "--memory"]
    for limit, shard in (("3.1GiB", "gradients"), ("2.5GiB", "parameters")):  # the first setting that fits
        assert main(["train", str(tmp_path / "states.toml"), *check, limit]) == 2
        assert f'; write parallelism.shard = "{shard}", which needs ' in capsys.readouterr().err
    assert main(["train", str(tmp_path / "parameters.toml"), *check, "2.5GiB"]) == 0
    assert capsys.readouterr().out.endswith(", which fits 2.50 GiB\n")


@pytest.mark.skipif(not FULL, reason="--full: 4 ranks of 3 GiB, minutes")
def test_a_large_model_trains_in_what_was_planned(tmp_path):
    config = large_job(tmp_path, "parameters")
    assert plan_memory(config, RANKS, "cpu").parameters > 500e6
    with RankPool(RANKS, environment={"OMP_NUM_THREADS": "1"}, deadline_s=1500.0) as ranks:
        told = ranks.call(_train, config)
    for losses, resident in told:
        assert losses == told[0][0]
        assert losses[-1] < losses[0] - 1
        assert resident <= LIMIT
