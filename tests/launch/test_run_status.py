"""The journal says how a run ended; a run that starts repeatedly without progress ends; a second job in a folder is
refused on all ranks; a changed bit is not saved.
"""

from itertools import count
from unittest import mock

import pytest
import torch

from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.folder import checkpoints
from megamix.launch import run_folder
from megamix.launch.exit_status import EndedEarlyError, PreemptedError, StuckError
from megamix.launch.journal import JOURNAL, Journal, Reached
from megamix.launch.ledger import Ledger, boot_s
from megamix.launch.run_lock import LOCK, run_lock
from megamix.launch.run_status import read_status, refuse_if_stuck
from megamix.mixed_precision.engine import ShardedEngine
from megamix.train import main
from megamix.train.replicas import DamagedMemory
from megamix.train.trainer import Trainer
from tests.builders import make_journal, run_on_ranks, tiny_job


def _read(folder):
    return read_status(folder)


ENDS = {"failed": EndedEarlyError, "preempted": PreemptedError, "gave_up": StuckError}


def _starts(folder, story, max_restarts):
    """Start the run (from which update, to which end) until a start is refused. Return how many were allowed."""
    for allowed, (update, end) in enumerate(story):
        journal = make_journal(folder, update)
        journal.open()
        try:
            refuse_if_stuck(journal, max_restarts)
        except StuckError:
            return allowed
        if end in ENDS:  # a killed one leaves what it wrote at its start
            journal.end(ENDS[end]("planted"))
    return len(story)


@pytest.mark.parametrize(
    ("story", "allowed"),
    [
        ([(0, "failed")] * 9, 3),
        ([(40, "running")] * 9, 3),
        ([(0, "failed"), (40, "running"), (40, "failed"), (40, "gave_up"), (40, "failed")], 4),
        ([(update, "failed") for update in range(9)], 9),  # each gets a little further
        ([(40, "failed"), (20, "failed"), (10, "failed"), (0, "failed")], 3),  # back to ever older saves
        ([(40, "preempted")] * 9, 9),
        ([(40, "failed"), (40, "failed"), (40, "preempted"), (40, "failed"), (40, "failed"), (40, "failed")], 6),
    ],
)
def test_starts_without_progress_are_counted_and_the_limit_holds(tmp_path, story, allowed):
    assert _starts(tmp_path, story, max_restarts=2) == allowed


def test_a_run_that_is_stuck_says_so_and_stays_so_until_more_are_allowed_or_the_file_is_removed(tmp_path):
    assert _starts(tmp_path, [(40, "failed")] * 3, max_restarts=1) == 2
    status = _read(tmp_path)
    assert (status.state, status.exit_status, status.update, status.restarts) == ("gave_up", 3, 40, 2)
    assert status.reason == (
        "started 3 times from update 40 without progress (checkpoint.max_restarts 1); find out the reason, then write "
        "max_restarts = 3 or more. The last start's end: failed planted"
    )
    assert _starts(tmp_path, [(40, "failed")], max_restarts=1) == 0
    assert _starts(tmp_path, [(40, "failed")], max_restarts=3) == 0  # a refused start counts, too
    assert _starts(tmp_path, [(40, "failed")], max_restarts=5) == 1
    assert _starts(tmp_path, [(40, "failed")], max_restarts=1) == 0
    (tmp_path / JOURNAL).unlink()
    assert _starts(tmp_path, [(40, "failed")], max_restarts=1) == 1


def test_an_older_save_after_all_is_counted_as_one_start(tmp_path):
    assert _starts(tmp_path, [(20, "failed")], max_restarts=1) == 1
    place = Reached(40, 0)
    journal = Journal(tmp_path, Ledger(boot_s()), lambda: place)
    journal.open()
    for update, restarts in ((40, 0), (20, 1), (20, 1)):
        place = Reached(update, 0)
        journal.tell("loaded")
        refuse_if_stuck(journal, max_restarts=1)
        assert (_read(tmp_path).start, _read(tmp_path).restarts) == (update, restarts)


@pytest.mark.parametrize("text", ["", "[]", '{"state": "failed"}', '\n{"state": "failed"}'])
def test_a_file_that_says_nothing_counts_for_nothing(tmp_path, text):
    (tmp_path / JOURNAL).write_text(text)
    assert _starts(tmp_path, [(0, "failed")], max_restarts=0) == 1


def _end_of(config):
    # The folder of a run is refused to any other run; these starts are of one.
    with mock.patch.object(main, "folder_problems", lambda folder: []):
        try:
            run_on_ranks(config)
        except Exception as error:
            return type(error).__name__, f"{getattr(error, 'exit_status', 1)}: {error}"


def test_a_job_that_fails_at_every_start_gives_up_on_all_ranks(tmp_path, data, run_ranks):
    config = tiny_job(tmp_path, tokens=data, max_restarts=1)
    with mock.patch.object(Trainer, "train", side_effect=OSError("planted")):
        assert [_end_of(config)[0] for _ in range(2)] == ["OSError"] * 2
    assert [name for name, _ in run_ranks(_end_of, 2, config)] == ["StuckError"] * 2
    assert _read(tmp_path / "run").exit_status == 3


def test_a_job_in_a_folder_where_another_one_runs_is_refused_on_all_ranks(tmp_path, data, run_ranks):
    (tmp_path / "run").mkdir()
    with run_lock(tmp_path / "run", print):
        (_, first), (_, second) = run_ranks(_end_of, 2, tiny_job(tmp_path, tokens=data))
        assert "is in use by pid" in first
        assert "the first rank says why" in second
        assert {first[:4], second[:4]} == {"75: "}  # a scheduler tries it again
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]


def test_a_bit_that_changed_in_memory_ends_the_run_and_nothing_is_saved(tmp_path, data):
    config = tiny_job(tmp_path, tokens=data, dtype="bf16", replica_check_interval=4)
    step, calls = ShardedEngine.step, count(1)

    def step_and_damage(engine):
        result = step(engine)
        if next(calls) > 2:  # the engine itself looks at its first two steps
            engine.buckets[0].params.view(torch.int16)[5] ^= 1  # the next step writes it anew, but for the check
        return result

    with mock.patch.object(ShardedEngine, "step", step_and_damage), pytest.raises(DamagedMemory) as damage:
        run_on_ranks(config)
    status = _read(tmp_path / "run")
    # Found in the fourth attempt; two are known applied.
    assert (status.state, status.exit_status, status.update) == ("failed", 1, 2)
    assert status.reason == f"DamagedMemory: {damage.value}"
    assert not (tmp_path / "run" / run_folder.WEIGHTS).exists()


@pytest.mark.parametrize("async_save", [True, False])
def test_a_bit_that_changed_between_two_checks_is_not_saved(tmp_path, data, async_save):
    checkpoint = {"save_interval": 3, "replica_check_interval": 1000, "async_save": async_save}
    config = tiny_job(tmp_path, tokens=data, dtype="bf16", checkpoint=checkpoint)
    progress = Trainer.progress

    def progress_and_damage(trainer):  # a save asks for it, after the last update before it
        if trainer.batch_plan.applied == 6:
            trainer.engine.buckets[0].master.view(torch.int32)[5] ^= 1 << 20
        return progress(trainer)

    with mock.patch.object(Trainer, "progress", progress_and_damage), pytest.raises(DamagedMemory):
        run_on_ranks(config)
    assert [path.name for path in checkpoints(tmp_path / "run/checkpoints")] == ["step_00000003"]


def test_a_peer_that_dies_before_the_watchdog_stands_leaves_failed(tmp_path, data):
    gone = RuntimeError("Connection closed by peer")
    with mock.patch.object(AllOrNone, "apart", side_effect=gone), pytest.raises(RuntimeError):
        run_on_ranks(tiny_job(tmp_path, tokens=data))
    status = _read(tmp_path / "run")
    assert (status.state, status.reason) == ("failed", f"RuntimeError: {gone}")
