"""Whoever starts a job that is too large for the machine: a job that this machine's memory, control group, `ulimit -v`
or GPU cannot hold is refused at its start, and reported by `--check`; a job that runs out of memory ends with status 4,
and the launcher prints the bytes that its ranks hold. No lower bound is too high.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from megamix import machine
from megamix.cli import main
from megamix.config import config_to_toml, load_config
from megamix.machine import kernel_kills, memory_for_each
from megamix.mixed_precision.settings import Shard
from megamix.model.family import parameter_count
from megamix.model.sizes import fewest_params
from megamix.run import least_memory
from megamix.run.least_memory import least_held, memory_problem
from megamix.tools.plan.memory_plan import held_memory
from tests.builders import tiny_job, write_data
from tests.conftest import FULL

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
HUGE = {"hidden_size": 12288, "num_layers": 960, "num_heads": 96}  # its 26 TB fit no machine


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_parameters_are_nearly_all_counted_and_none_too_many(path):
    model = load_config(path).model
    count = parameter_count(model)
    assert 0.985 * count < fewest_params(model) <= count  # type: ignore[arg-type]  # all have one section


@pytest.mark.parametrize("shard", get_args(Shard))
@pytest.mark.parametrize(
    ("optimizer", "dtype", "grads"),
    [
        ({"name": "adamw"}, "fp16", "half"),
        ({"name": "adamw", "adamw": {"state_dtype": "bf16"}}, "bf16", "fp32"),
        ({"name": "nag"}, "fp32", "half"),
        ({"name": "muon"}, "bf16", "half"),
    ],
)
def test_no_category_is_more_than_the_plan_s(tmp_path, shard, optimizer, dtype, grads):
    config = tiny_job(
        tmp_path, hidden_size=256, optimizer=optimizer, dtype=dtype, grad_dtype=grads,
        shard=shard,
    )  # fmt: skip
    least, planned = least_held(config, 2), held_memory(config, 2, 0, "cpu")[0]
    for category, size in least.items():
        assert (size == 0) == (planned[category] == 0), category
        # Norms and padding are not counted, nor are Muon's second moments of tables.
        assert size <= planned[category] <= max(1.1, 1 + (optimizer["name"] == "muon")) * size, category


def test_ranks_that_divide_experts_hold_their_own(tmp_path):
    config = load_config(next(path for path in CONFIGS if path.stem == "qwen3-30b-a3b"), ["parallelism.ep_size=8"])
    least, planned = least_held(config, 8), held_memory(config, 8, 0, "gpu")[0]
    assert all(0.97 * planned[category] < size <= planned[category] for category, size in least.items() if size)


def _job(folder, **sections):
    write_data(folder / "data")
    config = tiny_job(folder, metrics={"tensorboard": False}, **sections)
    path = folder / "job.toml"
    path.write_text(config_to_toml(config))
    return path


def test_a_model_beyond_this_machine_is_refused_at_the_start_and_told_by_a_check(tmp_path, capsys):
    job = _job(tmp_path, model=HUGE)
    assert main(["train", str(job)]) == 2
    told = capsys.readouterr().err
    assert "memory: a rank holds 25,920" in told
    assert "half parameters 3,240.00 GiB, half gradients 3,240.00 GiB, FP32 masters 6,480.00 GiB" in told
    assert "write" in told or "megamix plan CONFIG --world 1" in told
    assert not (tmp_path / "run").exists()
    assert main(["train", str(job), "--check"]) == 0  # this may be a login node
    printed = capsys.readouterr().out
    assert printed.startswith("note: memory: a rank holds 25,920")
    assert "no problems" in printed


def test_ranks_of_a_machine_share_it_and_a_gpu_counts_for_itself(tmp_path, monkeypatch):
    config = load_config(_job(tmp_path, model={"hidden_size": 8192, "num_layers": 8}))
    held = sum(least_held(config, 4).values())
    assert held > least_memory._GIB
    monkeypatch.setattr(least_memory, "memory_for_each", lambda ranks: (3.9 * held / ranks, "this machine's memory"))
    monkeypatch.setattr(least_memory, "has_gpu", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "this machine's memory" in str(memory_problem(config))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory_problem(config) is None
    gpu = type("Properties", (), {"total_memory": 0.9 * held})
    monkeypatch.setattr(least_memory, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    assert "of its GPU it has" in str(memory_problem(config))


@pytest.mark.parametrize(
    ("told", "controller", "limit", "events"),
    [
        ("0::/job\n", "", "memory.max", "memory.events"),
        ("4:memory:/job\n0::/\n", "memory", "memory.limit_in_bytes", "memory.oom_control"),
    ],
)
def test_what_limits_memory_and_whom_the_kernel_killed_is_read_of_every_group(
    tmp_path, monkeypatch, told, controller, limit, events
):
    job, own = tmp_path / "sys/fs/cgroup" / controller / "job", tmp_path / "proc/self/cgroup"
    for folder in (job, own.parent):
        folder.mkdir(parents=True)
    own.write_text(told)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(total=8000 << 10))
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 1\n")
    unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: unlimited)
    assert memory_for_each(2, tmp_path) == (4000 << 10, "this machine's memory")
    assert kernel_kills(tmp_path) == 1
    (job / limit).write_text(f"{6000 << 10}\n")
    assert memory_for_each(2, tmp_path) == (3000 << 10, f"what {job / limit} allows")
    (job / events).write_text("oom 4\noom_kill 2\n")
    assert kernel_kills(tmp_path) == 3
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (2000 << 10, -1))
    assert memory_for_each(2, tmp_path) == (2000 << 10, "what ulimit -v allows")  # each for itself


@pytest.mark.skipif(not FULL, reason="--full: fills 4 GiB; test_watchdog has a rank that lacks memory")
@pytest.mark.uncounted
def test_a_rank_without_memory_is_told_by_the_launcher_with_what_to_change(tmp_path):
    many = {"micro_batch_size": 2**17, "global_batch_size": 2**17, "eval_interval": 0}
    job = _job(tmp_path, model={"num_layers": 1}, training=many, data={"valid": None})
    limit = 3_900_000 << 10  # torch maps half of it
    launch = [sys.executable, "-m", "megamix.supervise.launch", "--standalone", "-m", "megamix", "train", str(job)]
    ended = subprocess.run(
        launch, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert ended.returncode == 4, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "DefaultCPUAllocator" not in ended.stderr
    said, _, table = ended.stderr.partition("1 rank(s), each on a CPU")
    assert "megamix train: ran out of memory: can't allocate memory: you tried to allocate" in said
    assert "  activations of the blocks " in table
    assert "does NOT fit: " in table
    assert ", fits, " in table
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["exit_status"]) == ("failed", 4)
