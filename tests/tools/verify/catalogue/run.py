"""Run trainings and entries of the catalogue on a pool of ranks, and judge them."""

from unittest import mock

import torch

from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import check_trainer, load_trainer
from megamix.tools.verify.foreign.watch import watch_trainer
from megamix.tools.verify.layouts.judge_steps import judge
from tests.tools.verify.catalogue import engine, gradients, scaling, updates
from tests.tools.verify.catalogue.bugs import BUGS, named
from tests.tools.verify.foreign import loop_bugs, trainers
from tests.tools.verify.jobs import OVERFLOW_AT, UPDATES, make_config, observe_bugs

ENTERED = (engine, gradients, scaling, updates, loop_bugs, trainers)
STEPS = 3
AT_ONCE = 6  # more would fill the memory, and their groups the limit on threads


def watch_all(wheres, steps):
    return [watch_trainer(where, steps) for where in wheres]


def _seen(run_ranks, ranks, work, cases, *settings):
    """Yield each case, and what every rank saw of it."""
    for first in range(0, len(cases), AT_ONCE):
        some = cases[first : first + AT_ONCE]
        yield from zip(some, *run_ranks(work, ranks, some, *settings, deadline_s=900.0), strict=True)


def judged(run_ranks, ranks, wheres, steps=STEPS):
    """Return the verdict of `verify` on each trainer, which it must not refuse."""
    found = []
    for where, *seen in _seen(run_ranks, ranks, watch_all, wheres, steps):
        check_trainer(trainer := load_trainer(where, ranks=ranks))
        found.append(judge_trainer(trainer, seen))
    return found


def judged_layouts(run_ranks, ranks, configs, bugs=None, overflow_at=OVERFLOW_AT, updates=UPDATES):
    """Return the verdict on each job of our own, with its bug planted or none."""
    cases = [*zip(configs, bugs or [""] * len(configs), strict=True)]
    return [
        judge(config, seen, torch.device("cpu"), updates, overflow_at)
        for (config, _), *seen in _seen(run_ranks, ranks, observe_bugs, cases, overflow_at, updates)
    ]


def config_of(bug):
    return make_config(bug.layout, **{"loss_scale": 4.0} | bug.job)


@mock.patch("megamix.tools.verify.core.verdict.EXPLAINED", 1)
def verdicts(run_ranks, names):
    """Return the verdict of `verify` on each bug of the catalogue. One that shows in the first step takes no other."""
    found, groups = {}, {}
    for bug in map(BUGS.get, names):
        overflow_at = OVERFLOW_AT if bug.attempt == OVERFLOW_AT else None
        groups.setdefault((bug.ranks, bool(bug.layout), overflow_at), []).append(bug)
    for (ranks, ours, overflow_at), bugs in groups.items():
        most = UPDATES if ours else STEPS
        for steps in (1, most) if overflow_at is None else (most,):
            bugs = [bug for bug in bugs if bug.name not in found]
            if ours:
                planted = [bug.name.split()[0] for bug in bugs]
                told = judged_layouts(run_ranks, ranks, [*map(config_of, bugs)], planted, overflow_at, steps)
            else:
                told = judged(run_ranks, ranks, [f"{bug.file}:{bug.name}" for bug in bugs], steps)
            told = zip(bugs, told, strict=True)
            found |= {bug.name: verdict for bug, verdict in told if steps == most or named(bug, verdict)}
    return found
