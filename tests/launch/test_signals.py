"""A signal may ask a run to stop at any instant, in validation or while saving, on any rank: all ranks end after the
same update and save it, if there is time; started again the run ends bitwise equal.
"""

import math
import os
import random
import signal
from collections import namedtuple
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from unittest import mock

import pytest
import torch

from megamix.base.signals import (
    NOTED,
    PARENT_DIED,
    SHUTDOWN_VARIABLE,
    LeaveRequest,
    reason_words,
    signals_noted,
)
from megamix.checkpoint.folder import checkpoints
from megamix.checkpoint.manifest import read_manifest
from megamix.comm.topology import Topology
from megamix.data.loader import BatchLoader
from megamix.launch.exit_status import PreemptedError
from megamix.launch.run_status import read_status
from megamix.train import checkpointing, ranks
from megamix.train.batch_plan import BatchPlan
from megamix.train.checkpointing import RunCheckpoints
from megamix.train.trainer import Trainer
from tests.builders import EXPERTS, run_on_ranks, tiny_job
from tests.checkpoint.faults import FaultyFiles
from tests.conftest import FULL
from tests.train.outcome import differences, end_of
from tests.train.recorded import counted_calls

STEPS, EVAL_INTERVAL, SAVE_INTERVAL = 14, 6, 5
TRIALS = 40 if FULL else 4
PLACES = ("training", "saving", "saving aside", "validating")  # places at which the signal comes, in turn


def _config(folder, data, **checkpoint):
    """Return a job whose ranks divide experts: one that ended a validation alone would leave the other waiting."""
    return tiny_job(
        folder, tokens=data, experts=EXPERTS, expert={"size": 2}, loss_scale={"init_scale": 2.0**10}, steps=STEPS,
        eval_interval=EVAL_INTERVAL, eval_batches=4, precision_interval=0,
        checkpoint={"save_interval": SAVE_INTERVAL} | checkpoint,
    )  # fmt: skip


@contextmanager
def _told(at_call, where):
    """Call `at_call(n)` before this rank's n-th call of the disk, validation batch, or call of its training."""
    if where == "training":
        with counted_calls(at_call):
            yield
        return
    load, count_call, batches = BatchLoader.load, FaultyFiles.count, count()

    def load_and_tell(loader, samples):
        if not torch.is_grad_enabled():
            at_call(next(batches))
        return load(loader, samples)

    def count_and_tell(files, name, arguments):
        at_call(len(files.calls))
        count_call(files, name, arguments)

    validates = where == "validating"
    place = (BatchLoader, "load", load_and_tell) if validates else (FaultyFiles, "count", count_and_tell)
    with mock.patch.object(*place):
        yield


# calls: at each place in question; begun: attempts, when the victim was asked
Asked = namedtuple("Asked", "outcome calls begun")


def _asked(config, where=None, victim=None, at=None, *numbers):
    """Run the job; one rank gets signals at a call of its own. Without a place all places' calls are counted."""
    train, calls, begun = Trainer.train, {}, 0

    def train_and_be_asked(trainer, leave):
        def ask(place, call):
            nonlocal begun
            calls[place] = call + 1
            if call == at and victim == trainer.engine.topology.dp.rank:
                begun = trainer.batch_plan.launched
                for number in numbers:
                    os.kill(os.getpid(), number)

        with ExitStack() as stack:
            for place in PLACES if where is None else [where]:
                stack.enter_context(_told(partial(ask, place), place))
            return train(trainer, leave)

    with (
        mock.patch.object(checkpointing, "Files", FaultyFiles),
        mock.patch.object(Trainer, "train", train_and_be_asked),
    ):
        return Asked(_outcome(config), calls, begun)


def _outcome(config):
    try:
        run_on_ranks(config)
    except PreemptedError as error:
        return str(error)
    return "finished"


def _status(folder):
    return read_status(folder / "run")


def _saved(folder):
    return [read_manifest(path / "manifest.json").applied_updates for path in checkpoints(folder / "run/checkpoints")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data, run_ranks):
    """Run the job without a signal. Return how it ends, and the number of calls by rank and place."""
    folder = tmp_path_factory.mktemp("whole")
    told = run_ranks(_asked, 2, _config(folder, data, async_save=False))
    return end_of(folder), [each.calls for each in told]


@pytest.mark.parametrize("trial", range(TRIALS))
def test_asked_at_any_instant_all_ranks_end_after_one_update_and_a_resumed_run_is_bitwise_the_whole(
    tmp_path, data, run_ranks, whole, trial
):
    end, calls = whole
    rng = random.Random(trial)
    where, victim, number = PLACES[trial % len(PLACES)], rng.randrange(2), rng.choice(NOTED)
    config = _config(tmp_path, data, async_save=where != "saving")
    # The last attempts are left out: their outcomes come too late for anything but the end of the run.
    at = rng.randrange(int(0.6 * calls[victim][where]))
    asked = run_ranks(_asked, 2, config, where, victim, at, number)
    first, second = (said.outcome for said in asked)
    assert first == second
    status = _status(tmp_path)
    assert (status.state, status.exit_status) == ("preempted", 75)
    newest = checkpoints(tmp_path / "run/checkpoints")[0]
    said = f"asked to stop ({number.name}): ended after update {status.update} of {STEPS}; saved {newest}"
    assert first == status.reason == said
    # Another attempt begins after the signal; its outcome, which carries the request, is read two attempts later.
    assert status.update <= asked[victim].begun + 3
    assert _saved(tmp_path)[0] == status.update
    assert run_ranks(_outcome, 2, config) == ["finished"] * 2
    assert differences(end_of(tmp_path), end) == []
    status = _status(tmp_path)
    assert (status.state, status.exit_status, status.update) == ("finished", 0, STEPS)


def test_a_validation_ends_between_two_batches(tmp_path, data, run_ranks):
    asked = run_ranks(_asked, 2, _config(tmp_path, data), "validating", 1, 0, signal.SIGUSR1)
    assert all(f"(SIGUSR1): ended after update {EVAL_INTERVAL} of" in said.outcome for said in asked)
    assert {said.calls["validating"] for said in asked} == {2}  # those of one global batch; four were to come


def _asked_with_a_slow_disk(config, save_s):
    """The second rank is asked to leave by a launcher that waits for 30 s; its saves seem to have taken `save_s`."""
    saved = RunCheckpoints._saved

    def saved_slowly(checkpoints, path):
        saved(checkpoints, path)
        checkpoints._took_s = save_s

    request = LeaveRequest(30.0, now_s=lambda: 1000.0)
    launch = BatchPlan.launch

    def launch_and_be_asked(plan):
        if plan.launched == SAVE_INTERVAL + 2 and Topology.current().dp.rank == 1:
            request.ask(signal.SIGTERM)
        return launch(plan)

    with (
        mock.patch.object(RunCheckpoints, "_saved", saved_slowly),
        mock.patch.object(ranks, "signals_noted", lambda launched: nullcontext(request)),
        mock.patch.object(BatchPlan, "launch", launch_and_be_asked),
    ):
        return _outcome(config)


def test_a_save_for_which_the_launcher_does_not_wait_is_not_begun_on_any_rank(tmp_path, data, run_ranks):
    config = _config(tmp_path, data)
    first, second = run_ranks(_asked_with_a_slow_disk, 2, config, 30.5)
    assert first == second
    assert _saved(tmp_path) == [SAVE_INTERVAL]
    newest = checkpoints(tmp_path / "run/checkpoints")[0]
    told = "NOT saved, because the last save took 30.5 s and the launcher kills its ranks in 30.0 s; the newest"
    assert first.endswith(f"; {told} checkpoint is {newest}")
    assert (_status(tmp_path).state, _status(tmp_path).exit_status) == ("preempted", 75)
    run_ranks(_asked_with_a_slow_disk, 2, config, 29.5)
    assert _saved(tmp_path)[0] == _status(tmp_path).update > SAVE_INTERVAL


def test_only_what_the_launcher_kills_after_sets_a_limit():
    now_s = 0.0
    leave = LeaveRequest(30.0, now_s=lambda: now_s)
    leave.ask(signal.SIGUSR1)
    assert leave.left_s() == math.inf
    now_s = 100.0
    leave.ask(signal.SIGTERM)
    now_s = 110.0
    leave.ask(signal.SIGINT)  # the launcher does not begin to count anew
    assert (leave.left_s(), leave.reason) == (20.0, signal.SIGUSR1)
    for number in {*NOTED} - {signal.SIGUSR1}:  # whoever sends another one does not wait for ever
        leave = LeaveRequest(30.0, now_s=lambda: 1.0)
        leave.ask(number)
        assert leave.left_s() == 30.0


def _left_s(launched):
    with signals_noted(launched=launched) as leave:
        leave.ask(signal.SIGTERM)
        return leave.left_s()


def test_a_rank_waits_as_long_as_its_launcher_says(monkeypatch):
    monkeypatch.delenv(SHUTDOWN_VARIABLE, raising=False)
    assert _left_s(launched=False) == math.inf
    assert 0 < _left_s(launched=True) <= 30
    monkeypatch.setenv(SHUTDOWN_VARIABLE, "3600")
    assert 30 < _left_s(launched=True) <= 3600


def test_a_signal_is_only_noted_and_the_first_reason_stays():
    with signals_noted() as leave:
        assert leave.reason == 0
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert leave.reason == signal.SIGTERM
        leave.ask(PARENT_DIED)
        assert reason_words(leave.reason) == "SIGTERM"
    assert reason_words(PARENT_DIED) == "a launcher died"


def test_a_sighup_that_nohup_has_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_noted() as leave:
        os.kill(os.getpid(), signal.SIGHUP)
        assert leave.reason == 0
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def _interrupt_three_times():
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_third_interrupt_aborts_and_the_old_handlers_come_back():
    before = [signal.getsignal(number) for number in NOTED]
    with pytest.raises(KeyboardInterrupt), signals_noted():
        _interrupt_three_times()
    assert [signal.getsignal(number) for number in NOTED] == before
