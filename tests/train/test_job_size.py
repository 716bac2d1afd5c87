"""`--check` says a job's parameters, tokens and epochs, memory, and bytes of its checkpoints, which a saved checkpoint
has; `--check` and a start note that a disk has too little room for them. A job that this machine's memory, control
group, `ulimit -v` or GPU cannot hold is refused at its start, and reported by `--check`. No lower bound is too high.
"""

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
import torch

from megamix.base import machine
from megamix.base.machine import kernel_kills, memory_for_each
from megamix.checkpoint.folder import checkpoints
from megamix.cli.verbs import main
from megamix.config import load_config
from megamix.mixed_precision.settings import Shard
from megamix.model.family import parameter_count
from megamix.model.sizes import fewest_params
from megamix.tools.plan.memory_plan import held_memory
from megamix.train import job_size
from megamix.train.job_size import JobSize
from megamix.train.least_memory import GIB, amount
from tests.builders import EXPERTS, run_on_ranks, tiny_job

ROOT = Path(__file__).parents[2]
CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.toml"))}
# Twelve bytes a parameter with AdamW; eight of a matrix with Muon; buffers; a moment of two bytes; an average.
JOBS = [
    ({"average": {"decay": 0.9}}, 1),
    ({"optimizer": {"name": "muon"}}, 2),
    ({"optimizer": {"name": "nag", "nag": {"state_dtype": "bf16"}}}, 1),
    ({"experts": EXPERTS}, 2),
]


def _least(config, world_size):
    return JobSize(config)._least.by_category(world_size)


def _words(config):
    """Return the facts by name; those of corpora under the line of the tokens."""
    facts = {}
    name = ""
    for line in JobSize(config).lines():
        name = line[:13].strip() or name
        facts[name] = f"{facts[name]}\n{line[14:]}" if name in facts else line[14:]
    return facts


def _with_room(free):
    return mock.patch.object(job_size.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


@pytest.mark.parametrize(("settings", "ranks"), JOBS)
def test_a_saved_checkpoint_has_the_bytes_that_are_told(run_ranks, tmp_path, data, settings, ranks):
    # It is wide, so that headers count little.
    config = tiny_job(tmp_path, tokens=data, hidden_size=128, steps=2, eval_interval=0, **settings)
    told = _words(config)["checkpoint"].split("; ")[0]
    run_ranks(run_on_ranks, ranks, config) if ranks > 1 else run_on_ranks(config)
    saved, *_ = checkpoints(tmp_path / "run/checkpoints")
    size = sum(file.stat().st_size for file in saved.iterdir())
    assert 0.99 < float(told.removesuffix(" MiB")) * 2**20 / size <= 1.0, (told, amount(size))


def test_each_fact_is_a_line_on_one_rank_and_on_two(tmp_path, data, monkeypatch):
    config = tiny_job(tmp_path, tokens=data)
    monkeypatch.setattr(job_size, "SHARED", tmp_path)
    monkeypatch.setattr(job_size, "room_for", lambda folder: GIB)
    with _with_room(2**30):
        one = _words(config)
        monkeypatch.setenv("WORLD_SIZE", "2")
        two = _words(config)
    # Tables 64 * 32; a block 4 * 32 * 32 and 3 * 32 * 128.
    params = 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 128)
    taken, needed = amount(12 * params), amount(16 * params)
    between = "a rank between steps, more within one; "
    assert one.pop("memory").startswith(f"{needed} {between}")
    assert one.pop("mirror").startswith(f"checkpoint.mirror = 1 would take {amount(4 * 12 * params)} a rank, ")
    assert two.pop("mirror").endswith(f", {amount(4 * 12 * params)} of the 1.00 GiB free in {tmp_path} here")
    assert two.pop("memory").startswith(f"{amount(10 * params)} {between}")
    assert two == one
    # Documents are of a window's 33 tokens, and windows overlap by one: one in 32 begins with its window.
    told = "padding 0.00%, documents cut 96.85%"
    assert one == {
        "parameters": "0.0348 M",
        "tokens": f"3,072 in 12 updates of 256\n0.05 epochs of 66,000 in {data}/train; {told}",
        "checkpoint": f"{taken}; 1 of them and the weights need {needed}, 1.00 GiB are free in {tmp_path}/run",
    }


def test_a_job_of_the_readme_has_the_sizes_that_are_shown_there(tmp_path, data, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    job = readme.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "job.toml").write_text(job.replace("configs/base.toml", str(ROOT / "configs/base.toml")))
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = _words(load_config(tmp_path / "job.toml", [f"data.{name}={data}/{name}" for name in ("train", "valid")]))
    for name, end in {"parameters": None, "tokens": "\n", "memory": ";", "checkpoint": ","}.items():
        assert f"\n  {name:13} {words[name].split(end)[0]}".rstrip() in readme


def test_a_mixture_names_the_corpora_that_are_read_most_and_a_ramp_its_batches(tmp_path, data):
    small = tmp_path / "small"
    for ending in ("bin", "idx"):
        shutil.copy(data / f"valid.{ending}", f"{small}.{ending}")
    large = {"path": str(data / "train"), "weight": 1.0}
    later = {"from_sample": 32, "train": [large]}
    train = [large, {"path": str(small), "weight": 3.0}]
    config = tiny_job(tmp_path, tokens=data, train=train, stages=[later], batch_ramp=[[0, 4], [4, 8]])
    # 16 + 64 samples of 32 tokens: of the first 32 a quarter and three quarters, then all of one.
    assert _words(config)["tokens"] == (
        "2,560 in 12 updates of 128 to 256\n"
        f"0.12 epochs of 6,600 in {small}; padding 0.00%, documents cut 96.50%\n"
        f"0.03 epochs of 66,000 in {data}/train; padding 0.00%, documents cut 96.85%"
    )
    made_up = [{"markov": 4}]
    assert _words(tiny_job(tmp_path, train=made_up, valid=made_up))["tokens"] == "3,072 in 12 updates of 256"


# Checkpoints: two stay, a third is written; beside two that there are, one more; every second of twelve updates.
ROOM = [
    ({"save_interval": 4}, 3),
    ({"save_interval": 1, "keep": 5}, 6),
    ({"save_interval": 4, "keep_every": 2}, 9),
    ({"save_interval": 0}, 1),
]


@pytest.mark.parametrize(("checkpoint", "number"), ROOM)
def test_a_disk_without_room_for_the_checkpoints_gives_a_note(tmp_path, data, checkpoint, number):
    config = tiny_job(tmp_path, tokens=data, checkpoint=checkpoint)
    held = _least(config, 1)
    weights = int(held["FP32 masters"])
    need = number * (weights + int(held["optimizer states"])) + weights
    with _with_room(need):
        assert JobSize(config).disk_problem() is None
    with _with_room(need - 1):
        assert f"; {number} of them and the weights need {amount(need)}, " in str(JobSize(config).disk_problem())
        for update in (4, 8):
            (tmp_path / f"run/checkpoints/step_{update:08d}").mkdir(parents=True)
        assert (JobSize(config).disk_problem() is None) is (number > 1)  # they take their place already


def _job(folder, data, **settings):
    path = folder / "job.toml"
    path.write_text(tiny_job(folder, tokens=data, **settings).text)
    return path


def test_a_check_and_a_start_note_it(tmp_path, data, monkeypatch, capsys):
    job = _job(tmp_path, data)
    note = "note: checkpoint.folder: a checkpoint takes "
    monkeypatch.setattr("megamix.train.main.run_job", lambda config, lines: None)
    with _with_room(1):
        for check in (["--check"], []):
            assert main(["train", str(job), *check]) == 0
            said = capsys.readouterr().out
            assert said.count(note) == 1
            assert ("parameters " in said) is bool(check)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_nearly_all_counted_and_none_too_many(name):
    model = load_config(CONFIGS[name]).model
    count = parameter_count(model)
    assert 0.985 * count < fewest_params(model) <= count


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
    config = tiny_job(tmp_path, hidden_size=256, optimizer=optimizer, dtype=dtype, grad_dtype=grads, shard=shard)
    least, planned = _least(config, 2), held_memory(config, 2, 0, "cpu")[0]
    for category, size in least.items():
        assert (size == 0) == (planned[category] == 0), category
        # Norms and padding are not counted, nor are Muon's second moments of tables.
        assert size <= planned[category] <= max(1.1, 1 + (optimizer["name"] == "muon")) * size, category


def test_ranks_that_divide_experts_hold_their_own():
    config = load_config(CONFIGS["qwen3-30b-a3b"], ["parallelism.expert.size=8", "model.num_layers=4"])
    least, planned = _least(config, 8), held_memory(config, 8, 0, "gpu")[0]
    assert all(0.97 * planned[category] < size <= planned[category] for category, size in least.items() if size)


def test_a_model_beyond_this_machine_is_refused_at_the_start_and_told_by_a_check(tmp_path, data, capsys):
    huge = {"hidden_size": 12288, "num_layers": 960, "num_heads": 96}  # its 26 TB fit no machine
    job = _job(tmp_path, data, **huge)
    assert main(["train", str(job)]) == 2
    told = capsys.readouterr().err
    assert "memory: a rank holds 25,920" in told
    assert "half parameters 3,240.00 GiB, half gradients 3,240.00 GiB, FP32 masters 6,480.00 GiB" in told
    assert not (tmp_path / "run").exists()
    assert main(["train", str(job), "--check"]) == 0  # this may be a login node
    printed = capsys.readouterr().out
    assert printed.startswith("note: memory: a rank holds 25,920")
    assert "no problems" in printed


def test_ranks_of_a_machine_share_it_and_a_gpu_counts_for_itself(tmp_path, monkeypatch):
    config = tiny_job(tmp_path, hidden_size=8192, num_layers=8)
    held = sum(_least(config, 4).values())
    assert held > GIB
    monkeypatch.setattr(job_size, "memory_for_each", lambda ranks: (3.9 * held / ranks, "this machine's memory"))
    monkeypatch.setattr(job_size, "has_gpu", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "this machine's memory" in str(JobSize(config).memory_problem())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert JobSize(config).memory_problem() is None
    gpu = SimpleNamespace(total_memory=0.9 * held)
    monkeypatch.setattr(job_size, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    assert "of its GPU it has" in str(JobSize(config).memory_problem())


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
