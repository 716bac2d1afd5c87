"""A run that is killed at any instant, once or repeatedly, and started again ends bitwise equal: weights, moments,
scale, data order, logs, with each `shard`, whose bits are the same, and with Muon. Changed settings are refused or
reported.
"""

import os
import random
import re
import shutil
import signal
from contextlib import nullcontext
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest

from megamix.checkpoint.folder import Files, checkpoints
from megamix.checkpoint.manifest import read_manifest
from megamix.cli.verbs import main
from megamix.config import ConfigError
from megamix.launch.exit_status import EndedEarlyError
from megamix.launch.run_status import read_status
from megamix.log.overflows import GaveUpError
from megamix.mixed_precision.settings import Shard
from megamix.tools.ranks import RankFailure, RankPool
from megamix.train.trainer import Trainer
from tests.builders import tiny_job
from tests.checkpoint.seal import edit
from tests.conftest import FULL, also_wide
from tests.train.outcome import TIMELESS, differences, end_of, metrics_of
from tests.train.recorded import counted_calls, run_recorded

JOBS = {
    **{shard: {"parallelism": {"shard": shard}} for shard in get_args(Shard)},
    "muon": {"optimizer": {"name": "muon"}, "parallelism": {"bucket_size": 1}},  # every matrix travels
}
KILLS = [*zip(range(400 if FULL else 4), cycle(JOBS), strict=False)]  # 100 kills of each job, or one
STEPS = 14
KILL_STEPS = 10  # of runs that are killed
CHAIN_STEPS, CHAIN_KILLS = (200, 25) if FULL else (KILL_STEPS, 2)
BAD = frozenset((3, 4, 9, 15, 16, 21, 40, 41, 90))  # attempts that overflow


def _config(folder, data, steps=STEPS, **settings):
    own = {"dropout": 0.1, "num_layers": 1, "steps": steps, "save_interval": 3, "max_restarts": 1000}
    own |= {"replica_check_interval": 0, "precision_interval": 7}
    return tiny_job(folder, tokens=data, **own | settings)


def _run(config, crash_at=None, leave_at=None):
    """Run the job, with its overflows. Return the applied attempts."""
    return run_recorded(config, BAD, crash_at=crash_at, leave_at=leave_at).applied


def _counted(config, victim=None, at_call=None):
    """Run the job; the victim dies at some call in its training. Return this rank's calls."""
    seen, train = [], Trainer.train

    def note(call):
        seen.append(call)
        if call == at_call:
            os.kill(os.getpid(), signal.SIGKILL)

    def train_counted(trainer, leave):
        with counted_calls(note) if victim in (None, trainer.engine.topology.dp.rank) else nullcontext():
            return train(trainer, leave)

    with mock.patch.object(Trainer, "train", train_counted):
        _run(config)
    return len(seen)


def _killed(config, victim, at_call):
    """Run the job on ranks of its own. Return whether the victim died before the end."""
    pool = RankPool(2)
    try:
        pool.call(_counted, config, victim, at_call)
    except RankFailure as failure:
        return f"rank {victim}: died with exit code -9" in str(failure)
    finally:
        pool.close(kill=True)
    return False


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data, run_ranks):
    """Run one of the jobs on two ranks. Return its folder, and its number of calls."""

    @cache
    def run(job, steps):
        folder = tmp_path_factory.mktemp("uninterrupted")
        return folder, min(run_ranks(_counted, 2, _config(folder, data, steps, **JOBS[job])))

    return run


@pytest.mark.parametrize(("trial", "job"), also_wide(KILLS, (3, "muon")))
def test_killed_at_any_instant_and_resumed_it_ends_bitwise_equal(tmp_path, data, run_ranks, uninterrupted, trial, job):
    whole, calls = uninterrupted(job, KILL_STEPS)
    rng = random.Random(trial)
    config = _config(tmp_path, data, KILL_STEPS, checkpoint={"async_save": trial % 2 == 0}, **JOBS[job])
    victim, at_call = rng.randrange(2), rng.randrange(calls)
    if not _killed(config, victim, at_call):  # waiting took fewer calls than in the uninterrupted run
        shutil.rmtree(tmp_path / "run")
        assert _killed(config, victim, at_call * 9 // 10)
    run_ranks(_run, 2, config)
    assert differences(end_of(tmp_path), end_of(whole)) == []


def test_killed_again_and_again_it_ends_bitwise_equal(tmp_path, data, run_ranks, uninterrupted):
    whole, calls = uninterrupted("states", CHAIN_STEPS)
    config = _config(tmp_path, data, CHAIN_STEPS)
    rng = random.Random(0)
    for _ in range(CHAIN_KILLS):
        at_call = rng.randrange(calls // CHAIN_STEPS, calls // CHAIN_KILLS)  # after a step or more; all before the end
        assert _killed(config, rng.randrange(2), at_call)
    run_ranks(_run, 2, config)
    assert differences(end_of(tmp_path), end_of(whole)) == []


def test_each_shard_ends_with_the_same_bits(uninterrupted):
    folders = [uninterrupted(shard, KILL_STEPS)[0] for shard in get_args(Shard)]
    weights = [(folder / "run/weights.safetensors").read_bytes() for folder in folders]
    rows = [metrics_of(folder) for folder in folders]
    assert rows == [rows[0]] * 3
    assert weights == [weights[0]] * 3


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
    # Stops before any checkpoint, while a batch is tried again, after a checkpoint and in between.
    stops = [{"crash_at": 2}, {"leave_at": 2}, {"crash_at": 9}, {"crash_at": 13}]
    logs = []
    for name, legs in (("whole", [{}]), ("ended early", [*stops, {}])):
        folder = tmp_path / name
        for leg in legs:  # half of the checkpoints come right after a validation
            _run(_config(folder, data, tensorboard=True, log_interval=2, eval_interval=6), **leg)
        logs.append((metrics_of(folder), _points(folder)))
    assert logs[0] == logs[1]
    assert {"train/loss", "valid/loss", "optim/loss_scale"} <= set(logs[0][1])


@pytest.fixture(scope="module")
def crashed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("crashed")
    _run(_config(folder, data), 9)
    return folder


@pytest.fixture
def stopped(tmp_path, crashed):
    """Leave a run that crashed between two checkpoints, after updates 3 and 6."""
    shutil.copytree(crashed / "run", tmp_path / "run")
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """Return the end of that run where it does not crash."""
    folder = tmp_path_factory.mktemp("whole")
    _run(_config(folder, data))
    return end_of(folder)


def _saved(folder):
    return checkpoints(folder / "run/checkpoints")


def test_a_changed_lr_passes_and_is_told_and_what_is_left_of_profiled_attempts_is_traced(stopped, data, capsys):
    _run(_config(stopped, data, lr=0.02, start_step=5, num_steps=6))
    said = capsys.readouterr().out
    assert (stopped / "run/trace_rank0.json").exists()
    assert "goes on from" in said
    assert "changed since: optimizer.lr: 0.01 -> 0.02\n" in said
    assert said.count("changed since") == 4  # those of the profile, and the folder
    assert "learning rate of update 7: 0.0075 -> 0.015\n" in said


def test_what_changes_nothing_of_the_state_may_be_written_otherwise(stopped, data, capsys):
    how = {"recompute": "full", "scaled_init": False, "init_std": 0.01, "dropout": 0.0}
    same = {"head_dim": 16, "num_kv_heads": 2, "ffn_hidden_size": 128, "qkv_bias": False}
    _run(_config(stopped, data, model=how | same), 9)
    assert capsys.readouterr().out.count("changed since: model.") == len(how) + len(same)
    for key, value in {"num_heads": 4, "head_dim": 8, "num_kv_heads": 1, "qkv_bias": True}.items():
        with pytest.raises(ConfigError, match=f"model.{key}: the checkpoint has .*, the configuration"):
            _run(_config(stopped, data, model={key: value}))


def _cut(checkpoint):
    (checkpoint / "rank_00000.safetensors").write_bytes(b"")


def _change_a_bit(checkpoint):
    """Flip a bit in a tensor, where only the load finds it."""
    file = checkpoint / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _change_a_bit])
def test_a_damaged_checkpoint_is_set_aside_and_leaves_no_trace_in_the_run(stopped, data, whole, capsys, damage):
    damage(_saved(stopped)[0])
    _run(_config(stopped, data))
    assert "step_00000003 after update 3" in capsys.readouterr().out
    assert read_status(stopped / "run").start == 3
    assert differences(end_of(stopped), whole) == []


@pytest.mark.parametrize("damage", [_cut, _change_a_bit])
def test_where_all_are_damaged_a_run_does_not_begin_anew_and_leaves_its_logs_as_they_were(stopped, data, damage):
    kept = [stopped / "run" / name for name in ("config.toml", "metrics.jsonl")]
    before = [path.read_bytes() for path in kept]
    for path in _saved(stopped):
        damage(path)
    for told in ("is whole", "are damaged and set aside"):
        with pytest.raises(ConfigError, match=told):
            _run(_config(stopped, data, eval_interval=5))
        assert [path.read_bytes() for path in kept] == before
    assert read_status(stopped / "run").state == "failed"


@pytest.mark.parametrize(("version", "fix"), [(2, r"commit \w{7,8} is the last that reads it"), (4, "update megamix")])
def test_a_checkpoint_of_another_version_is_refused_and_stays_where_it_is(stopped, data, capsys, version, fix):
    path = _saved(stopped)[0]
    edit(path, lambda fields: fields.update(version=version))
    told = f"its version is {version}, but this megamix reads version 3; {fix}"
    with pytest.raises(ConfigError, match=told):
        _run(_config(stopped, data))
    for action in ("ls", "verify"):
        assert main(["checkpoint", action, str(stopped / "run")]) == 0
        assert re.search(rf"{path.name}.*refused: .*{told}", capsys.readouterr().out)
    assert path in _saved(stopped)


def test_a_path_begins_a_new_run_unless_it_is_damaged(stopped, data, whole):
    with pytest.raises(ConfigError, match="holds another run"):
        _run(_config(stopped, data, resume="never"))
    newest, older = _saved(stopped)
    config = _config(stopped / "branch", data, resume=str(newest))
    _run(config, 14)
    assert metrics_of(stopped / "branch")[0]["step"] > 6
    newest.rename(stopped / "elsewhere")
    assert _run(config)[0].number > 9  # from its own checkpoint, not from the path again
    assert differences(end_of(stopped / "branch"), whole) == ["metrics"]
    _change_a_bit(older)
    with pytest.raises(ConfigError, match=r"checkpoint.resume: .*rank_00000.safetensors: its checksum"):
        _run(_config(stopped / "damaged", data, resume=str(older)))
    assert older.is_dir()
    assert not (stopped / "damaged/run/config.toml").exists()


def test_another_optimizer_begins_a_new_run_from_the_weights_of_this_one(stopped, data, capsys, caplog):
    config = _config(stopped / "branch", data, optimizer={"name": "muon"}, resume=str(_saved(stopped)[0]))
    assert _run(config)[0].number > 6
    said = capsys.readouterr().out
    assert 'changed since: optimizer.name: "adamw" -> "muon"' in said
    assert said.count("changed since: optimizer.") == 1
    assert "another optimizer's checkpoint: momentum_buffer of 7 parameters begin at zero" in caplog.text


def test_a_run_that_gave_up_goes_on_in_bf16(tmp_path, data):
    with pytest.raises(GaveUpError):  # attempts 3 and 4 overflow, 5 is under way
        _run(_config(tmp_path, data, max_overflows_in_a_row=2))
    progress = read_manifest(_saved(tmp_path)[0] / "manifest.json").run.progress
    assert (progress["applied"], progress["attempts"], progress["skipped"]) == (4, 6, 2)
    assert [waiting["samples"] for waiting in progress["waiting"]] == [[[32, 8]]]
    assert (tmp_path / "run/gave_up.txt").exists()
    rest = _run(_config(tmp_path, data, precision={"dtype": "bf16", "loss_scale": {}}))
    assert (rest[0].number, rest[0].batch.samples) == (6, (range(32, 40),))
    assert end_of(tmp_path)["state"][0] == STEPS
    assert not (tmp_path / "run/gave_up.txt").exists()


def _fails_to_save(config):
    """Run a job whose second checkpoint fails on the second rank. Return its end and its checkpoints."""
    create = Files.create

    def full(files, path):
        if path.parent.name.startswith("step_00000006") and path.name == "rank_00001.safetensors":
            raise OSError(28, "No space left on device")
        return create(files, path)

    ended = "finished"
    with mock.patch.object(Files, "create", full):
        try:
            _run(config)
        except EndedEarlyError as error:
            ended = f"{error.state}: {error}"
    return ended, [path.name for path in checkpoints(Path(config.checkpoint.folder) / "checkpoints")]


@pytest.mark.parametrize(("policy", "async_save"), [("continue", True), ("stop", False), ("stop", True)])
def test_a_save_that_fails_on_one_rank_follows_the_policy_on_all(tmp_path, data, run_ranks, policy, async_save):
    config = _config(tmp_path, data, 10, on_save_failure=policy, async_save=async_save)
    (ended, kept), (elsewhere, _) = run_ranks(_fails_to_save, 2, config)
    assert ended == elsewhere
    if policy == "continue":
        assert (ended, kept) == ("finished", ["step_00000010", "step_00000009"])
    else:
        assert ended.startswith("failed: ended after update ")
        assert ended.endswith("a checkpoint could not be saved, see the log")
        assert len(kept) == 2  # the checkpoint at the end was saved
