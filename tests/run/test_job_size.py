"""`--check` says a job's parameters, tokens and epochs, memory, and bytes of its checkpoints, which a saved checkpoint
has; `--check` and a start note that a disk has too little room for them.
"""

import shutil
from typing import NamedTuple

import pytest

from megamix.checkpoint.folder import checkpoints
from megamix.cli import main
from megamix.config import config_to_toml
from megamix.run import job_size
from megamix.run.job_size import disk_problem, size_lines
from megamix.run.least_memory import amount, least_held
from tests.builders import EXPERTS, run_on_ranks, tiny_job

WIDE = {"model": {"hidden_size": 128}, "training": {"steps": 2, "eval_interval": 0}}  # headers count little
# Twelve bytes a parameter with AdamW; eight of a matrix with Muon; buffers; a moment of two bytes; an average.
JOBS = {
    "adamw": {"training": {"average": {"decay": 0.9}}},
    "muon": {"optimizer": {"name": "muon"}},
    "nag, bf16": {"optimizer": {"name": "nag", "nag": {"state_dtype": "bf16"}}},
    "experts": {"model": {"experts": EXPERTS}},
}


def _words(config):
    """Return the facts by name; those of corpora under the line of the tokens."""
    facts = {}
    name = ""
    for line in size_lines(config):
        name = line[:13].strip() or name
        facts[name] = f"{facts[name]}\n{line[14:]}" if name in facts else line[14:]
    return facts


def _with_room(monkeypatch, free):
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(job_size.shutil, "disk_usage", lambda path: Usage(free))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", JOBS)
def test_a_saved_checkpoint_has_the_bytes_that_are_told(run_ranks, tmp_path, data, name, ranks):
    config = tiny_job(tmp_path, WIDE, JOBS[name], tokens=data)
    told = _words(config)["checkpoint"].split("; ")[0]
    run_ranks(run_on_ranks, ranks, config) if ranks > 1 else run_on_ranks(config)
    saved, *_ = checkpoints(tmp_path / "run/checkpoints")
    size = sum(file.stat().st_size for file in saved.iterdir())
    assert 0.99 < float(told.removesuffix(" MiB")) * 2**20 / size <= 1.0, (told, amount(size))


def test_each_fact_is_a_line_on_one_rank_and_on_two(tmp_path, data, monkeypatch):
    config = tiny_job(tmp_path, {"optimizer": {"name": "adamw"}}, tokens=data)
    _with_room(monkeypatch, 2**30)
    one = _words(config)
    # Tables 64 * 32; a block 4 * 32 * 32 and 3 * 32 * 128.
    assert [*one] == ["parameters", "tokens", "memory", "checkpoint"]
    assert one["parameters"] == "0.0348 M"
    assert one["tokens"] == f"3,072 in 12 updates of 256\n0.05 epochs of 66,000 in {data}/train"
    params = 64 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 128)
    taken, needed = amount(12 * params), amount(16 * params)
    assert one["checkpoint"] == f"{taken}; 1 of them and the weights need {needed}, 1.00 GiB are free in {tmp_path}/run"
    assert one["memory"].startswith(f"{amount(16 * params)} a rank between steps, more within one; ")
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = _words(config)
    assert two["memory"].startswith(f"{amount(10 * params)} a rank between steps, more within one; ")
    assert {**two, "memory": ""} == {**one, "memory": ""}


def test_a_mixture_names_the_corpora_that_are_read_most_and_a_ramp_its_batches(tmp_path, data):
    small = tmp_path / "small"
    for ending in ("bin", "idx"):
        shutil.copy(data / f"valid.{ending}", f"{small}.{ending}")
    train = [{"path": str(data / "train"), "weight": 1.0}, {"path": str(small), "weight": 3.0}]
    later = {"from_sample": 32, "train": [{"path": str(data / "train"), "weight": 1.0}]}
    ramp = {"batch_ramp": [[0, 4], [4, 8]], "steps": 12}
    config = tiny_job(tmp_path, train=train, stages=[later], training=ramp, tokens=data)
    # 16 + 64 samples of 32 tokens: of the first 32 a quarter and three quarters, then all of one.
    assert _words(config)["tokens"] == (
        f"2,560 in 12 updates of 128 to 256\n0.12 epochs of 6,600 in {small}\n0.03 epochs of 66,000 in {data}/train"
    )


def test_a_made_up_chain_has_no_epochs(tmp_path):
    config = tiny_job(tmp_path, train=[{"markov": 4}], valid=[{"markov": 4}])
    assert _words(config)["tokens"] == "3,072 in 12 updates of 256"


# Checkpoints: two stay, a third is written; beside two that there are, one more; every second of twelve updates.
ROOM = [
    ({"save_interval": 4}, 3),
    ({"save_interval": 1, "keep": 5}, 6),
    ({"save_interval": 4, "keep_every": 2}, 9),
    ({"save_interval": 0}, 1),
]


@pytest.mark.parametrize(("checkpoint", "number"), ROOM)
def test_a_disk_without_room_for_the_checkpoints_gives_a_note(tmp_path, data, monkeypatch, checkpoint, number):
    config = tiny_job(tmp_path, checkpoint=checkpoint, tokens=data)
    held = least_held(config, 1)
    weights = int(held["FP32 masters"])
    need = number * (weights + int(held["optimizer states"])) + weights
    _with_room(monkeypatch, need)
    assert disk_problem(config) is None
    _with_room(monkeypatch, need - 1)
    assert f"; {number} of them and the weights need {amount(need)}, " in str(disk_problem(config))
    for update in (4, 8):
        (tmp_path / f"run/checkpoints/step_{update:08d}").mkdir(parents=True)
    assert (disk_problem(config) is None) is (number > 1)  # they take their place already


def test_a_check_and_a_start_note_it(tmp_path, data, monkeypatch, capsys):
    job = tmp_path / "job.toml"
    config = tiny_job(tmp_path, tokens=data)
    job.write_text(config_to_toml(config))
    _with_room(monkeypatch, 1)
    note = "note: checkpoint.folder: a checkpoint takes "
    assert main(["train", str(job), "--check"]) == 0
    assert capsys.readouterr().out.count(note) == 1
    monkeypatch.setattr("megamix.train.job.run_job", lambda config, memory_line, **_: None)
    assert main(["train", str(job)]) == 0
    said = capsys.readouterr().out
    assert said.count(note) == 1
    assert "parameters " not in said
