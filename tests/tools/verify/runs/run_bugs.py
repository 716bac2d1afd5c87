"""Bugs in a resume, or in the order of the data, to plant in one part of a job."""

import itertools
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from megamix.checkpoint.mirror import Mirror, sum_words
from megamix.data import source
from megamix.mixed_precision import engine as engine_module
from megamix.mixed_precision.engine import ShardedEngine
from megamix.tools.verify.runs import watched_run
from megamix.train import batches
from megamix.train.batch_plan import BatchPlan
from megamix.train.resume import Resume
from megamix.train.trainer import Trainer
from tests.tools.verify.engine_bugs import wrong


def epochs_counted_from_the_start():
    """The place in the data is right, and the epoch is counted from where this process began."""
    right, begun = source.windows_of_samples, {}

    def windows_of_samples(samples, windows, seed):
        samples = np.asarray(samples)
        begun.setdefault(seed, int(samples.min()) // windows)
        return right(samples - begun[seed] * windows, windows, seed)

    return mock.patch.object(source, "windows_of_samples", windows_of_samples)


def _plan_with(**lost):
    @wrong(BatchPlan, "__init__")
    def begin(right, self, *args):
        *settings, state = args
        right(self, *settings, state.model_copy(update=lost))

    return begin()


def cursor_lost():
    return _plan_with(cursor=0, waiting=())


def waiting_batch_lost():
    return _plan_with(waiting=())


@wrong(batches, "micro_batches")
def every_rank_reads_the_first_ones(right, batch, **where):
    return right(batch, **where | {"dp_rank": 0})


@wrong(source, "windows_of_samples")
def samples_twice_an_epoch(right, *args):
    return right(*args) // 2 * 2


def _loaded(change):
    """Apply `change` to the state that a checkpoint has brought."""

    @wrong(Resume, "load_into")
    def load_into(right, resume, engine, all_or_none):
        start = right(resume, engine, all_or_none)
        change(engine)
        engine.publish_masters()
        return start

    return load_into()


def _states(engine, state):
    return [owned.tensors[state] for owned in engine.owned_ranges()]


def _rounded(state):
    return _loaded(lambda engine: [part.copy_(part.half().float()) for part in _states(engine, state)])


def masters_from_half_copies():
    return _rounded("master")


def moments_in_half():
    return _rounded("exp_avg")


def moments_not_loaded():
    return _loaded(lambda engine: [part.zero_() for part in _states(engine, "exp_avg_sq")])


def one_file_for_two_ranks():
    """Both ranks' moments were written to one file."""

    def change(engine):
        mine = torch.cat(_states(engine, "exp_avg"))
        theirs = [mine.tolist()]
        dist.broadcast_object_list(theirs, 0)
        values = itertools.cycle(theirs[0])
        for part in _states(engine, "exp_avg"):
            part.copy_(torch.tensor([*itertools.islice(values, len(part))]))

    return _loaded(change)


def loss_scale_begins_anew():
    def change(engine):
        engine.loss_scale.loss_scale.fill_(2.0**10)
        engine.loss_scale.clean_steps.zero_()

    return _loaded(change)


def schedule_begins_anew():
    right, begun = engine_module.entry, []

    def entry(table, update):
        begun.append(update - 1)
        return right(table, update - begun[0])

    return mock.patch.object(engine_module, "entry", entry)


def dropout_counts_from_the_start():
    """Units drop out by a count that no checkpoint keeps."""
    count = itertools.count()
    return mock.patch.object(Trainer, "_seed_of_dropout", lambda *_: next(count))


@wrong(watched_run, "run_job")
def another_seed(right, job, **kept):
    return right(job.with_keys(training={"seed": 5}), **kept)


@wrong(source.TokenFileSource, "read")
def summed_in_another_order(right, self, samples):
    """The rows of a micro-batch come from the last one on."""
    rows = right(self, samples)
    return rows._replace(tokens=rows.tokens[::-1].copy())


@wrong(ShardedEngine, "backward")
def put_in_any_order(right, self, loss, weight=1.0):
    """An operation that torch says may differ from call to call; here it does."""
    factor = torch.ones(1).put_(torch.tensor([0]), torch.tensor([1.5]))
    right(self, loss * factor[0], weight)


# Bug, the system that met it, and words with which the answer of `verify --runs` begins.
RUN_BUGS = [
    (
        "epochs_counted_from_the_start", "accelerate #4195, KempnerForge #57",
        "after attempt 4 (update 4): sample 1 of its batch is #",
    ),
    ("cursor_lost", "Bridge #5637", "after attempt 4 (update 4): sample 0 of its batch is #"),
    ("waiting_batch_lost", "megamix", "after attempt 4 (update 4): sample 0 of its batch is #"),
    ("every_rank_reads_the_first_ones", "several", "after attempt 4 (update 4): sample 4 of its batch is #"),
    ("samples_twice_an_epoch", "several", "after attempt 4 (update 4): sample 0 of its batch is #"),
    ("masters_from_half_copies", "OpenTau #182, Megatron #1359", "after the resume: master of "),
    ("moments_in_half", "Automodel #1896", "after the resume: exp_avg of "),
    ("moments_not_loaded", "several", "after the resume: exp_avg_sq of "),
    ("one_file_for_two_ranks", "Bridge #2307", "after the resume: exp_avg of "),
    ("loss_scale_begins_anew", "several", "after the resume: loss_scale.clean_steps is 0, not 1"),
    ("schedule_begins_anew", "several", "after attempt 4 (update 4): lr of rank 0 is "),
    ("dropout_counts_from_the_start", "torchtitan #1593", "after attempt 4 (update 4): gradient of "),
]  # fmt: skip


def mirror_one_step_old():
    """The memory has the state of the attempt before."""
    before = {}

    @wrong(Mirror, "_copy")
    def copy(right, self, slot):
        right(self, slot)
        now = slot.bytes.clone()
        slot.bytes.copy_(before.get("", now))
        before[""] = now
        return sum_words(slot.bytes)

    return copy()
