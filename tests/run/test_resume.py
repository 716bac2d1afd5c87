"""A run that is killed at any instant, once or repeatedly, and started again ends bitwise equal: weights, moments,
scale, data order, logs, with each `shard` and with Muon. Other ranks can continue it; changed settings are refused or
reported.
"""

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest

from megamix.checkpoint.folder import Files, checkpoints
from megamix.checkpoint.manifest import read_manifest
from megamix.checkpoint.verify import read_checkpoint
from megamix.cli import main
from megamix.config import ConfigError
from megamix.inspect.overflows import GaveUpError
from megamix.mixed_precision.settings import Shard
from megamix.run.batch_plan import Attempt
from megamix.run.resume_rules import changes
from megamix.supervise.status import EndedEarlyError, PreemptedError
from megamix.tools.ranks import RankFailure, RankPool
from megamix.train.trainer import Trainer
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.checkpoint.seal import edit
from tests.conftest import FULL, also_wide
from tests.programs import lines_counted
from tests.train.outcome import TIMELESS, differences, end_of, metrics_of
from tests.train.recorded import Crash, Record, attempts_recorded, counted_calls, crash_contained, overflows_injected

JOBS = {
    **{shard: {"parallelism": {"shard": shard}} for shard in get_args(Shard)},
    "muon": {"optimizer": {"name": "muon"}, "parallelism": {"bucket_size": 1}},  # every matrix travels
}
KILLS = [*zip(range(400 if FULL else 4), cycle(JOBS), strict=False)]  # 100 kills of each job, or one
STEPS = 14
CHAIN_STEPS, CHAIN_KILLS = (200, 25) if FULL else (16, 2)
BAD = frozenset((3, 4, 9, 15, 16, 21, 40, 41, 90))  # attempts that overflow


def _config(folder, data, steps=STEPS, **sections):
    own = {
        "model": {"dropout": 0.1, "num_layers": 1},
        "precision": {"loss_scale": {"init_scale": 2.0**10}},
        "training": {"steps": steps},
        "checkpoint": {"save_interval": 3, "max_restarts": 1000, "replica_check_interval": 0},
        "metrics": {"precision_interval": 7},
    }
    return tiny_job(folder, own, tokens=data, **sections)


def _run(config, crash_at=None, leave_at=None):
    """Run the job, with its overflows, to its end, or until it crashes or is asked to leave before an attempt.

    Returns the applied attempts.
    """
    record = Record()

    def end_early(plan):
        if plan.launched == crash_at:
            raise Crash
        if plan.launched == leave_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        crash_contained(),
        suppress(PreemptedError),
        attempts_recorded(record, end_early),
        overflows_injected(record, BAD, frozenset()),
    ):
        run_on_ranks(config)
    return record.applied


def _run_until(config, victim, at_call):
    """Run the job; one rank dies at some call in its training."""
    train = Trainer.train

    def die(call):
        if call == at_call:
            os.kill(os.getpid(), signal.SIGKILL)

    def train_and_die(trainer, leave):
        if victim != trainer.engine.topology.dp.rank:
            return train(trainer, leave)
        with counted_calls(die):
            return train(trainer, leave)

    with lines_counted(False), mock.patch.object(Trainer, "train", train_and_die):  # counting would die with it
        _run(config)


def _counted(config):
    """Run the job. Return how many calls its training makes, and the applied attempts."""
    seen = []
    train = Trainer.train

    def train_counted(trainer, leave):
        with counted_calls(seen.append):
            return train(trainer, leave)

    with mock.patch.object(Trainer, "train", train_counted):
        applied = _run(config)
    return len(seen), applied


def _killed(config, victim, at_call):
    """Run the job on ranks of its own. Return whether the kill came before the end."""
    pool = RankPool(2)
    try:
        pool.call(_run_until, config, victim, at_call)
    except RankFailure as failure:
        return f"rank {victim}: died with exit code -9" in str(failure)
    finally:
        pool.close(kill=True)
    return False


Uninterrupted = Callable[[str], tuple[Path, int, list[Attempt]]]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data, run_ranks):
    """Run one of the jobs on two ranks. Return its folder, its number of calls, and its applied attempts."""

    @cache
    def run(job):
        folder = tmp_path_factory.mktemp("uninterrupted")
        config = _config(folder, data, **JOBS[job])
        (calls, applied), (elsewhere, _) = run_ranks(_counted, 2, config)
        return folder, min(calls, elsewhere), applied

    return run


@pytest.mark.uncounted
@pytest.mark.parametrize(("trial", "job"), also_wide(KILLS, (3, "muon")))
def test_killed_at_any_instant_and_resumed_it_ends_bitwise_equal(tmp_path, data, run_ranks, uninterrupted, trial, job):
    whole, calls, _ = uninterrupted(job)
    rng = random.Random(trial)
    config = _config(tmp_path, data, checkpoint={"async_save": trial % 2 == 0}, **JOBS[job])
    victim, at_call = rng.randrange(2), rng.randrange(calls)
    if not _killed(config, victim, at_call):  # waiting took fewer calls than in the uninterrupted run
        shutil.rmtree(tmp_path / "run")
        assert _killed(config, victim, at_call * 9 // 10)
    run_ranks(_run, 2, config)
    assert differences(end_of(tmp_path), end_of(whole)) == []


@pytest.mark.uncounted
def test_killed_again_and_again_it_ends_bitwise_equal(tmp_path, data, run_ranks):
    whole = _config(tmp_path / "whole", data, CHAIN_STEPS)
    calls = min(calls for calls, _ in run_ranks(_counted, 2, whole))
    config = _config(tmp_path / "killed", data, CHAIN_STEPS)
    rng = random.Random(0)
    kills = 0
    for _ in range(CHAIN_KILLS):
        at_call = rng.randrange(calls // CHAIN_STEPS, calls // CHAIN_KILLS)  # after a step or more; all before the end
        kills += _killed(config, rng.randrange(2), at_call)
    run_ranks(_run, 2, config)
    assert kills == CHAIN_KILLS
    assert differences(end_of(tmp_path / "killed"), end_of(tmp_path / "whole")) == []


# Runs without kills, which end early in this process, and changes that a start may have.


def _points(folder):
    """Return TensorBoard's curves."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith(TIMELESS)]
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}


def test_logs_go_on_as_one_curve_without_doubles(tmp_path, data, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    # Event files are read in the order of their names, which end with the writer's number in its process. Within one
    # second the tenth would come before the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))

    def config(folder):
        metrics = {"tensorboard": True, "log_interval": 2}
        # Half of the checkpoints come right after a validation.
        return _config(folder, data, metrics=metrics, training={"eval_interval": 6})

    _run(config(tmp_path / "whole"))
    want = metrics_of(tmp_path / "whole"), _points(tmp_path / "whole")
    assert {"train/loss", "valid/loss", "optim/loss_scale"} <= set(want[1])
    # Stops before any checkpoint, while a batch is tried again, after a checkpoint and in between.
    for end in ({"crash_at": 2}, {"leave_at": 2}, {"crash_at": 9}, {"crash_at": 13}, {}):
        _run(config(tmp_path / "ended early"), **end)
    assert (metrics_of(tmp_path / "ended early"), _points(tmp_path / "ended early")) == want


def test_another_number_of_ranks_goes_on_with_the_same_batches(tmp_path, data, run_ranks, uninterrupted):
    folder, _, whole = uninterrupted("states")
    config = _config(tmp_path, data)
    begun = run_ranks(_run, 2, config, 9)[0]
    rest = _run(config)
    assert [*begun[: len(whole) - len(rest)], *rest] == whole
    want, got = ([row["train/loss"] for row in metrics_of(path) if "train/loss" in row] for path in (folder, tmp_path))
    assert len(want) > 3
    assert got == pytest.approx(want, rel=2e-3)  # FP16 gradients are summed in another order


@pytest.fixture
def stopped(tmp_path, data):
    """Leave a run that crashed between two checkpoints."""
    _run(_config(tmp_path, data), 9)
    assert [path.name for path in checkpoints(tmp_path / "run/checkpoints")] == ["step_00000006", "step_00000003"]
    return tmp_path


OTHER_RUNS = [
    ({"model": {"num_heads": 4}}, "model.num_heads: the checkpoint has 2, the configuration 4"),
    ({"model": {"num_layers": 2}}, "model.num_layers: the checkpoint has 1, the configuration 2"),
    ({"training": {"seed": 5}}, "training.seed: the checkpoint has 1234, the configuration 5"),
    ({"training": {"steps": 4}}, "training.steps: got 4, but .*step_00000006 is after update 6; write steps = 6"),
    ({"optimizer": {"name": "nag"}}, 'optimizer.name: the checkpoint has "adamw", the configuration "nag"'),
]


def test_what_would_be_another_run_is_refused_by_name_and_nothing_is_touched(stopped, data):
    before = metrics_of(stopped)
    for sections, told in OTHER_RUNS:
        with pytest.raises(ConfigError, match=told):
            _run(_config(stopped, data, **sections))
        assert metrics_of(stopped) == before
        assert len(checkpoints(stopped / "run/checkpoints")) == 2
    assert _run(_config(stopped, data))[-1].batch.samples


def test_other_data_under_the_same_name_is_refused(tmp_path):
    write_data(tmp_path / "data")
    config = _config(tmp_path, tmp_path / "data")
    _run(config, 9)
    (tmp_path / "data/train.idx").write_bytes((tmp_path / "data/valid.idx").read_bytes())
    (tmp_path / "data/train.bin").write_bytes((tmp_path / "data/valid.bin").read_bytes())
    with pytest.raises(ConfigError, match=r"data.train: holds other data than when .*step_00000006 was saved"):
        _run(config)


def test_a_run_that_takes_up_among_profiled_attempts_traces_the_rest(tmp_path, data):
    config = _config(tmp_path, data, profiling={"start_step": 5, "num_steps": 6})
    _run(config, 9)
    assert not (tmp_path / "run/trace_rank0.json").exists()
    _run(config)
    assert (tmp_path / "run/trace_rank0.json").exists()


def test_a_changed_lr_passes_and_is_told(stopped, data, capsys):
    _run(_config(stopped, data, optimizer={"lr": 0.02}, metrics={"log_interval": 1}))
    said = capsys.readouterr().out
    assert "goes on from" in said
    assert "changed since: optimizer.lr: 0.01 -> 0.02\n" in said
    assert "changed since: metrics.log_interval: 4 -> 1\n" in said
    assert said.count("changed since") == 2
    assert "learning rate of update 7: 0.0075 -> 0.015\n" in said


def test_what_changes_nothing_of_the_state_may_be_written_otherwise(stopped, data, capsys):
    how = {"recompute": "full", "scaled_init": False, "init_std": 0.01, "dropout": 0.0}
    same = {"head_dim": 16, "num_kv_heads": 2, "ffn_hidden_size": 128, "qkv_bias": False}
    _run(_config(stopped, data, model={"num_layers": 1} | how | same), 9)
    assert capsys.readouterr().out.count("changed since: model.") == len(how) + len(same)
    for key, value in {"head_dim": 8, "num_kv_heads": 1, "ffn_hidden_size": 64, "qkv_bias": True}.items():
        with pytest.raises(ConfigError, match=f"model.{key}: the checkpoint has not set, the configuration"):
            _run(_config(stopped, data, model={"dropout": 0.1, "num_layers": 1, key: value}))


def test_a_checkpoint_that_is_older_than_a_key_was_made_with_its_default(stopped, data):
    newest = checkpoints(stopped / "run/checkpoints")[0]
    checkpoint = read_checkpoint(newest)
    run = checkpoint.manifest.run
    assert "qk_norm = false\n" in run.config
    assert 'packing = "none"\n' in run.config
    older = run.config.replace("qk_norm = false\n", "").replace('packing = "none"\n', "")
    manifest = checkpoint.manifest.model_copy(update={"run": run.model_copy(update={"config": older})})
    before = replace(checkpoint, manifest=manifest)
    assert changes(before.path, before.manifest, run, 0, own=True) == []
    otherwise = run.model_copy(update={"rng_rule": "dice"})
    assert changes(checkpoint.path, checkpoint.manifest, otherwise, 0, own=True) == [
        f'rng_rule: "{run.rng_rule}" -> "dice"'
    ]
    other = run.config.replace("qk_norm = false", "qk_norm = true")
    with pytest.raises(ConfigError, match="model.qk_norm: the checkpoint has false, the configuration true"):
        changes(before.path, before.manifest, run.model_copy(update={"config": other}), 0, own=True)


def test_a_damaged_checkpoint_is_set_aside_and_where_all_are_a_run_does_not_begin_anew(stopped, data, capsys):
    newest = checkpoints(stopped / "run/checkpoints")[0]
    (newest / "manifest.json").write_text("{}")
    _run(_config(stopped, data), 9)
    assert "step_00000003 after update 3" in capsys.readouterr().out
    for path in checkpoints(stopped / "run/checkpoints"):
        (path / "rank_00000.safetensors").write_bytes(b"")
    for told in ("is whole", "are damaged and set aside"):
        with pytest.raises(ConfigError, match=told):
            _run(_config(stopped, data))


def _changed_bit(checkpoint):
    """Flip a bit in a tensor, where only the load finds it."""
    file = checkpoint / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def test_a_checkpoint_that_is_found_damaged_by_its_load_leaves_no_trace_in_the_run(stopped, data, capsys):
    _changed_bit(checkpoints(stopped / "run/checkpoints")[0])
    _run(_config(stopped, data))
    assert "step_00000003 after update 3" in capsys.readouterr().out
    assert json.loads((stopped / "run/status.json").read_text())["start"] == 3
    _run(_config(stopped / "whole", data))
    assert differences(end_of(stopped), end_of(stopped / "whole")) == []


def test_where_the_load_finds_all_damaged_the_run_ends_with_its_logs_as_they_were(stopped, data):
    kept = [stopped / "run" / name for name in ("config.toml", "metrics.jsonl")]
    before = [path.read_bytes() for path in kept]
    for path in checkpoints(stopped / "run/checkpoints"):
        _changed_bit(path)
    for told in ("is whole", "are damaged and set aside"):
        with pytest.raises(ConfigError, match=told):
            _run(_config(stopped, data, training={"eval_interval": 5}))
        assert [path.read_bytes() for path in kept] == before
    assert json.loads((stopped / "run/status.json").read_text())["state"] == "failed"


_LAST = r"commit \w{7,8} is the last that reads it"


@pytest.mark.parametrize(("version", "fix"), [(1, _LAST), (2, _LAST), (4, "update megamix")])
def test_a_checkpoint_of_another_version_is_refused_and_stays_where_it_is(stopped, data, capsys, version, fix):
    path = checkpoints(stopped / "run/checkpoints")[0]
    edit(path, lambda fields: fields.update(version=version))
    told = f"its version is {version}, but this megamix reads version 3; {fix}"
    with pytest.raises(ConfigError, match=told):
        _run(_config(stopped, data))
    for action in ("ls", "verify"):
        assert main(["checkpoint", action, str(stopped / "run")]) == 0
        assert re.search(rf"{path.name}.*refused: .*{told}", capsys.readouterr().out)
    assert path in checkpoints(stopped / "run/checkpoints")


def test_a_damaged_path_to_begin_from_is_refused_and_stays_where_it_is(stopped, data):
    newest = checkpoints(stopped / "run/checkpoints")[0]
    _changed_bit(newest)
    with pytest.raises(ConfigError, match=r"checkpoint.resume: .*rank_00000.safetensors: its checksum"):
        _run(_config(stopped / "branch", data, checkpoint={"resume": str(newest)}))
    assert newest.is_dir()
    assert not (stopped / "branch/run/config.toml").exists()


def test_never_refuses_the_folder_and_a_path_begins_a_new_run_there(stopped, data):
    with pytest.raises(ConfigError, match="holds another run"):
        _run(_config(stopped, data, checkpoint={"resume": "never"}))
    newest = checkpoints(stopped / "run/checkpoints")[0]
    config = _config(stopped / "branch", data, checkpoint={"resume": str(newest)})
    _run(config, 14)
    assert metrics_of(stopped / "branch")[0]["step"] > 6
    newest.rename(stopped / "elsewhere")
    rest = _run(config)  # from its own checkpoint, not from the path again
    (stopped / "elsewhere").rename(newest)
    assert rest[0].number > 9
    _run(_config(stopped, data))
    assert differences(end_of(stopped / "branch"), end_of(stopped)) == ["metrics"]


def test_another_optimizer_begins_a_new_run_from_the_weights_of_this_one(stopped, data, capsys, caplog):
    muon = {"name": "muon"}
    with pytest.raises(ConfigError, match=r'optimizer.name: the checkpoint has "adamw", the configuration "muon"'):
        _run(_config(stopped, data, optimizer=muon))
    newest = checkpoints(stopped / "run/checkpoints")[0]
    first = _run(_config(stopped / "branch", data, optimizer=muon, checkpoint={"resume": str(newest)}))[0]
    assert first.number > 6
    said = capsys.readouterr().out
    assert 'changed since: optimizer.name: "adamw" -> "muon"' in said
    assert said.count("changed since: optimizer.") == 1
    assert "another optimizer's checkpoint: momentum_buffer of 7 parameters begin at zero" in caplog.text


def test_a_run_that_gave_up_goes_on_in_bf16(tmp_path, data):
    with pytest.raises(GaveUpError):
        _run(
            _config(tmp_path, data, precision={"max_overflows_in_a_row": 2})
        )  # attempts 3 and 4 overflow, 5 is under way
    newest = checkpoints(tmp_path / "run/checkpoints")[0]
    progress = read_manifest(newest / "manifest.json").run.progress
    assert (progress["applied"], progress["attempts"], progress["skipped"]) == (4, 6, 2)
    assert [waiting["samples"] for waiting in progress["waiting"]] == [[[32, 8]]]
    assert (tmp_path / "run/gave_up.txt").exists()
    rest = _run(_config(tmp_path, data, precision={"dtype": "bf16", "loss_scale": {}}))
    assert (rest[0].number, rest[0].batch.samples) == (6, (range(32, 40),))
    assert end_of(tmp_path)["state"][0] == STEPS
    assert not (tmp_path / "run/gave_up.txt").exists()


def _fails_to_save(config, victim):
    """Run a job whose second checkpoint fails on one rank. Return its end and its checkpoints."""
    create = Files.create

    def full(files, path):
        if path.parent.name.startswith("step_00000006") and path.name == f"rank_{victim:05d}.safetensors":
            raise OSError(28, "No space left on device")
        return create(files, path)

    with mock.patch.object(Files, "create", full):
        try:
            _run(config)
            ended = "finished"
        except EndedEarlyError as error:
            ended = f"{error.state}: {error}"
    return ended, [path.name for path in checkpoints(Path(config.checkpoint.folder) / "checkpoints")]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_that_fails_on_one_rank_follows_the_policy_on_all(tmp_path, data, run_ranks, async_save):
    for policy in ("continue", "stop"):
        checkpoint = {"on_save_failure": policy, "async_save": async_save}
        config = _config(tmp_path / policy, data, 10, checkpoint=checkpoint)
        (ended, kept), (elsewhere, _) = run_ranks(_fails_to_save, 2, config, 1)
        assert ended == elsewhere
        if policy == "continue":
            assert (ended, kept) == ("finished", ["step_00000010", "step_00000009"])
        else:
            assert ended.startswith("failed: ended after update ")
            assert ended.endswith("a checkpoint could not be saved, see the log")
            assert len(kept) == 2  # the checkpoint at the end was saved
