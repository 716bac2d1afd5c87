"""Bugs in a resume, or in the order of the data, to plant in one part of a job."""

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from megamix.data import source
from megamix.mixed_precision import engine as engine_module
from megamix.mixed_precision.engine import ShardedEngine
from megamix.run.batch_plan import BatchPlan
from megamix.tools.verify.runs import watched_run
from megamix.train import batches, job
from megamix.train.trainer import Trainer


@contextmanager
def epochs_counted_from_the_start():
    """The place in the data is right, and the epoch is counted from where this process began."""
    right, begun = source.windows_of_samples, {}

    def wrong(samples, windows, seed):
        samples = np.asarray(samples)
        begun.setdefault(seed, int(samples.min()) // windows)
        return right(samples - begun[seed] * windows, windows, seed)

    with mock.patch.object(source, "windows_of_samples", wrong):
        yield


def _plan_with(**lost):
    right = BatchPlan.__init__

    def wrong(self, *args):
        *settings, state = args
        right(self, *settings, state.model_copy(update=lost))

    return mock.patch.object(BatchPlan, "__init__", wrong)


def cursor_lost():
    return _plan_with(cursor=0, waiting=())


def waiting_batch_lost():
    return _plan_with(waiting=())


def every_rank_reads_the_first_ones():
    right = batches.micro_batches
    return mock.patch.object(batches, "micro_batches", lambda batch, **where: right(batch, **where | {"dp_rank": 0}))


def samples_twice_an_epoch():
    right = source.windows_of_samples
    return mock.patch.object(source, "windows_of_samples", lambda *args: right(*args) // 2 * 2)


@contextmanager
def _loaded(change):
    """Apply `change` to the state that a checkpoint has brought."""
    right = job.load_start

    def wrong(start, config, engine, all_or_none):
        start = right(start, config, engine, all_or_none)
        change(engine)
        engine.publish_masters()
        return start

    with mock.patch.object(job, "load_start", wrong):
        yield


def _states(engine, state):
    return [owned.tensors[state] for owned in engine.owned_ranges()]


def _rounded(state):
    return _loaded(lambda engine: [part.copy_(part.half().float()) for part in _states(engine, state)] and None)


def masters_from_half_copies():
    return _rounded("master")


def moments_in_half():
    return _rounded("exp_avg")


def moments_not_loaded():
    return _loaded(lambda engine: [part.zero_() for part in _states(engine, "exp_avg_sq")] and None)


def _first_ranks(engine):
    mine = torch.cat(_states(engine, "exp_avg"))
    size = torch.tensor(len(mine))
    dist.broadcast(size, 0)
    theirs = mine.clone() if dist.get_rank() == 0 else torch.empty(int(size))
    dist.broadcast(theirs, 0)
    values = itertools.cycle(theirs.tolist())
    for part in _states(engine, "exp_avg"):
        part.copy_(torch.tensor([*itertools.islice(values, len(part))]))


def one_file_for_two_ranks():
    """Both ranks' moments were written to one file."""
    return _loaded(_first_ranks)


def loss_scale_begins_anew():
    def change(engine):
        engine.loss_scale.loss_scale.fill_(2.0**10)
        engine.loss_scale.clean_steps.zero_()

    return _loaded(change)


@contextmanager
def schedule_begins_anew():
    right, begun = engine_module.entry, []

    def wrong(table, update):
        begun.append(update - 1)
        return right(table, update - begun[0])

    with mock.patch.object(engine_module, "entry", wrong):
        yield


def dropout_counts_from_the_start():
    """Units drop out by a count that no checkpoint keeps."""
    count = itertools.count()
    return mock.patch.object(Trainer, "_seed_of_dropout", lambda *_: next(count))


def another_seed():
    right = watched_run.run_job
    return mock.patch.object(
        watched_run, "run_job", lambda job, **kept: right(job.with_keys(training={"seed": 5}), **kept)
    )


def summed_in_another_order():
    """The rows of a micro-batch come from the last one on."""
    right = source.TokenFileSource.read

    def wrong(self, samples):
        rows = right(self, samples)
        return rows._replace(tokens=rows.tokens[::-1].copy())

    return mock.patch.object(source.TokenFileSource, "read", wrong)


@contextmanager
def put_in_any_order():
    """An operation that torch says may differ from call to call; here it does."""
    right = ShardedEngine.backward

    def wrong(self, loss, weight=1.0):
        factor = torch.ones(1).put_(torch.tensor([0]), torch.tensor([1.5]))
        right(self, loss * factor[0], weight)

    with mock.patch.object(ShardedEngine, "backward", wrong):
        yield


@dataclass(frozen=True)
class RunBug:
    """One bug, the system that met it, and the answer that `verify --runs` must give."""

    plant: Callable[[], Any]
    met_in: str
    words: str  # that the answer begins with
    on_one_layout: bool = False  # True: found only where the layout stays


RUN_BUGS = [
    RunBug(
        epochs_counted_from_the_start,
        "accelerate #4195, KempnerForge #57",
        "after attempt 4 (update 4): sample 1 of its batch is #",
    ),
    RunBug(cursor_lost, "Bridge #5637", "after attempt 4 (update 4): sample 0 of its batch is #"),
    RunBug(waiting_batch_lost, "megamix", "after attempt 4 (update 4): sample 0 of its batch is #"),
    RunBug(every_rank_reads_the_first_ones, "several", "after attempt 4 (update 4): sample 4 of its batch is #"),
    RunBug(samples_twice_an_epoch, "several", "after attempt 4 (update 4): sample 0 of its batch is #"),
    RunBug(masters_from_half_copies, "OpenTau #182, Megatron #1359", "after the resume: master of "),
    RunBug(moments_in_half, "Automodel #1896", "after the resume: exp_avg of "),
    RunBug(moments_not_loaded, "several", "after the resume: exp_avg_sq of "),
    RunBug(one_file_for_two_ranks, "Bridge #2307", "after the resume: exp_avg of "),
    RunBug(loss_scale_begins_anew, "several", "after the resume: loss_scale.clean_steps is 0, not 1"),
    RunBug(schedule_begins_anew, "several", "after attempt 4 (update 4): lr of rank 0 is "),
    RunBug(
        dropout_counts_from_the_start,
        "torchtitan #1593",
        "after attempt 4 (update 4): gradient of ",
        on_one_layout=True,
    ),
]


@contextmanager
def planted(name):
    """Plant a bug of this module by its name, or none."""
    with globals()[name]() if name else mock.patch.dict({}):
        yield
