"""Whoever mistypes a job: a check says what the job would do, and refuses what the start would refuse, before any time
is spent; torch is not imported. The messages themselves stand in tests/refusals and tests/config/test_errors.py.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megamix.checkpoint.folder import CHECKPOINTS
from megamix.checkpoint.manifest import (
    UNTRAINED,
    FileRecord,
    LayoutRecord,
    Manifest,
    ParamRecord,
    RunRecord,
    manifest_text,
)
from megamix.cli.verbs import main
from megamix.config import load_config
from megamix.launch.run_folder import describe_failure
from megamix.launch.run_lock import LOCK, run_lock
from megamix.tools.plan.advice import by_shard
from megamix.tools.plan.memory_plan import plan_memory
from megamix.train.least_memory import amount
from megamix.train.own_code import own_code
from megamix.train.resume_rules import RNG_RULE, trained_on
from tests.builders import corpus_of, make_journal, tiny_job, write_data


@pytest.fixture
def job(tmp_path):
    """Return (folder, a configuration file for a job in it that would run)."""
    write_data(tmp_path / "data")
    config = tmp_path / "job.toml"
    config.write_text(tiny_job(tmp_path).text)
    return tmp_path, config


def _save(folder, run, update, **overrides):
    """Write a checkpoint as a run leaves it, as far as a check reads it."""
    config = tiny_job(folder, checkpoint={"folder": str(folder / run)}, **overrides)
    record = RunRecord(
        config=config.text, fingerprints=trained_on(corpus_of(config).fingerprints()), rng_rule=RNG_RULE,
        code=own_code([]), progress={"cursor": 8 * update},
    )  # fmt: skip
    manifest = Manifest(
        applied_updates=update, skipped_steps=0, loss_scale={}, run=record,
        layout=LayoutRecord(axes={"dp": 1}, buckets=()),
        states=(UNTRAINED,), params=(ParamRecord(name="weight", shape=(1,), aliases=()),),
        files=(FileRecord(name="rank_00000.safetensors", size=4, crc32=0),),
    )  # fmt: skip
    path = Path(config.checkpoint.folder, CHECKPOINTS) / f"step_{update:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(manifest_text(manifest))
    (path / "rank_00000.safetensors").write_bytes(bytes(4))
    return path


SIZES = tuple(f"  {name} " for name in ("parameters", "tokens", "   ", "memory", "checkpoint", "mirror"))  # of a job


def test_a_check_says_what_the_job_would_do(job, monkeypatch, capsys):
    folder, config = job
    run = folder / "run"

    def told(*overrides):
        assert main(["train", str(config), "--check", *overrides]) == 0
        return "".join(line for line in capsys.readouterr().out.splitlines(True) if not line.startswith(SIZES))

    assert told() == f"no problems; 1 rank; would start a new run in {run}\n"
    run.mkdir()
    make_journal(run, 26).open()
    lost = "nothing was saved yet (checkpoint.save_interval is 500): 26 updates are lost"
    assert told() == f"no problems; 1 rank; would start a new run in {run}\n  {lost}\n"
    assert describe_failure(load_config(config).checkpoint) == f"{lost}; the same command starts anew"
    newest = _save(folder, "run", 7)
    goes_on = f"{newest} is saved, 19 later updates are lost; the same command goes on with the run"
    assert describe_failure(load_config(config).checkpoint) == goes_on
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        told() == f"no problems; 2 ranks; would go on from step 7 of {run} to step 12\n  changed since: ranks: 1 -> 2\n"
    )
    assert told("training.steps=7") == (
        f"no problems; 2 ranks; {run} is after step 7 already, so no step is left; "
        "training.steps = 8 or more has some\n  changed since: training.steps: 12 -> 7\n"
        "  changed since: ranks: 1 -> 2\n"
    )
    begun = _save(folder, "other", 3)
    resume, new = f"checkpoint.resume={begun}", f"checkpoint.folder={folder / 'new'}"
    first, *changes = told(resume, new).splitlines()
    assert first == f"no problems; 2 ranks; would start a new run in {folder / 'new'} from {begun}"
    assert len(changes) == 3  # changes of resume, folder and ranks
    goes_on = told(resume)  # a run that has saved goes on from its own
    assert "go on from step 7" in goes_on
    assert f"checkpoint.resume: {begun} is not read, because {run} has checkpoints of its own" in goes_on
    _save(folder, "run", 5)
    goes_on = f"go on from step 5 of {run} to step 12\n  damaged: {newest}: "
    for file, harmed in (("rank_00000.safetensors", b""), ("manifest.json", b"{")):
        whole = (newest / file).read_bytes()
        (newest / file).write_bytes(harmed)
        assert goes_on in told()
        (newest / file).write_bytes(whole)
    monkeypatch.setenv("RANK", "1")
    assert told() == ""


def test_a_run_goes_on_without_the_checkpoint_that_it_began_from_however_its_path_is_written(job, monkeypatch):
    folder, config = job
    begun, own = _save(folder, "other", 3), _save(folder, "run", 7)
    loaded = load_config(config, [f"checkpoint.resume={begun}"])
    (own.parents[1] / "config.toml").write_text(loaded.text)
    shutil.rmtree(begun)
    monkeypatch.chdir(folder)
    resume = f"checkpoint.resume=./{begun.relative_to(folder)}"
    assert main(["train", str(config), "--check", resume]) == 0


def test_a_check_refuses_a_folder_that_a_job_holds_and_leaves_a_dead_one_s_lock(job, capsys):
    folder, config = job
    (folder / "run").mkdir()
    lock, check = folder / "run" / LOCK, ["train", str(config), "--check"]
    with run_lock(folder / "run", say=print):
        held = lock.read_text()
        assert main(check) == 75  # a scheduler tries it again
        assert lock.read_text() == held
    assert re.search(r"run is in use by pid \d+ on .*; end that job first", capsys.readouterr().err)
    lock.write_text(held.replace('"start": "', '"start": "9'))
    assert main(check) == 0
    assert lock.exists()


def test_a_check_of_a_run_imports_no_torch(job):
    folder, config = job
    _save(folder, "run", 7)
    code = (
        "import sys; from megamix.cli.verbs import main; "
        f"print(main(['train', {str(config)!r}, '--check', 'training.steps=20']), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[-2:] == ["0", "False"]


def test_a_check_of_memory_names_the_setting_that_would_fit(job, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    large = [
        "model.hidden_size=256", "model.num_layers=4", "training.micro_batch_size=1", "training.global_batch_size=2",
    ]  # fmt: skip
    config = load_config(job[1], large)
    peaks = dict(by_shard(config, plan_memory(config, 2, "cpu")))
    assert peaks["states"] > peaks["gradients"] > peaks["parameters"]

    def check(limit):
        return main(["train", str(job[1]), *large, "--check", "--memory", f"{limit / 2**20!r}MiB"])

    assert check(peaks["states"]) == 0
    assert capsys.readouterr().out.endswith(f", which fits {amount(peaks['states'])}\n")
    assert check(peaks["gradients"] - 1) == 2
    said = capsys.readouterr().err
    got = f"--memory: got {amount(peaks['gradients'] - 1)}, but a rank needs {amount(peaks['states'])}"
    assert f"job.toml: 1 problem\n  {got}" in said
    assert f'; write parallelism.shard = "parameters", which needs {amount(peaks["parameters"])}' in said
    assert check(2**16) == 2
    assert "no change here is enough: half parameters and gradients, " in capsys.readouterr().err


def test_mistakes_of_files_and_ranks_are_shown_at_once(job, monkeypatch, capsys):
    folder, config = job
    (folder / "data/valid.idx").unlink()
    (folder / "run").touch()
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["train", str(config)]) == 2
    error = capsys.readouterr().err
    assert "3 problems" in error
    assert all(field in error for field in ("training.global_batch_size", "data.valid", "checkpoint.folder"))


def test_packages_that_are_not_installed_are_reported_before_the_run(job, monkeypatch, capsys):
    folder, config = job
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("tokenizer.json", "tokenizers"), ("t.model", "sentencepiece")):
        (folder / name).write_text("no JSON")
        monkeypatch.setitem(sys.modules, package, None)
        words = [f'data.tokenizer="{folder / name}"', 'metrics.wandb.project="mine"', "metrics.tensorboard=true"]
        assert main(["train", str(config), *words]) == 2
        said = capsys.readouterr().err
        assert f"data.tokenizer: the Python package '{package}' is not installed; run pip" in said
        for tracker in ("tensorboard", "wandb"):
            assert f"metrics.{tracker}: is set, but the package {tracker} is not installed; run pip" in said


def test_a_cublas_that_is_not_deterministic_is_refused_where_the_run_is_to_be(job, monkeypatch, capsys):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert main(["train", str(job[1]), "--check"]) == 0
    assert main(["train", str(job[1]), "--check", "training.deterministic=true"]) == 2
    said = capsys.readouterr().err
    assert 'training.deterministic: is true, but CUBLAS_WORKSPACE_CONFIG is ":0:0"' in said
    assert "set it to :4096:8 or :16:8" in said
