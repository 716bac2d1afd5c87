"""Run entries of the catalogue on a pool of ranks, and judge them."""

import torch

from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import load_trainer
from megamix.tools.verify.foreign.watch import watch_trainer
from megamix.tools.verify.layouts.judge_steps import judge
from tests.tools.verify.catalogue import engine, gradients, scaling, updates
from tests.tools.verify.catalogue.bugs import BUGS
from tests.tools.verify.jobs import UPDATES, make_config, observe_bug

STEPS = 3
ENTERED = (engine, gradients, scaling, updates)


def observe_all(bugs):
    """Return what every rank saw of each bug."""
    return [_observe(bug) for bug in bugs]


def _observe(bug):
    if bug.layout:
        return observe_bug(_config(bug), bug.name.split()[0], bug.overflow_at)
    return watch_trainer(f"{bug.file}:{bug.name}", STEPS)


def _config(bug):
    axes, _, shard = bug.layout.partition("-")
    sequence_parallel = axes.endswith("sp")
    return make_config(
        axes.removesuffix("sp"), loss_scale=4.0, sequence_parallel=sequence_parallel, shard=shard or "states", **bug.job
    )


def verdicts(run_ranks, names):
    """Return the verdict of `verify` on each bug. Ranks are started once for each number of them."""
    found = {}
    for ranks in sorted({BUGS[name].ranks for name in names}):
        bugs = [BUGS[name] for name in names if BUGS[name].ranks == ranks]
        by_rank = run_ranks(observe_all, ranks, bugs, deadline_s=600.0)
        for bug, *seen in zip(bugs, *by_rank, strict=True):
            if bug.layout:
                found[bug.name] = judge(_config(bug), seen, torch.device("cpu"), UPDATES, bug.overflow_at)
            else:
                found[bug.name] = judge_trainer(load_trainer(f"{bug.file}:{bug.name}", ranks=ranks), seen)
    return found
