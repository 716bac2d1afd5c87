"""A whole job on this rank: join the others, find where the run goes on, build, train, leave the results."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from megamix.checkpoint.folder import CHECKPOINTS
from megamix.checkpoint.manifest import RunRecord
from megamix.config import Config
from megamix.model.family import parameter_count
from megamix.train.check import folder_problems
from megamix.train.corpus import JobCorpus
from megamix.train.job import NO_LINES, Job, Lines, build
from megamix.train.judge import Judge
from megamix.train.own_code import own_code
from megamix.train.ranks import met
from megamix.train.ranks_agree import started_with
from megamix.train.resume import Resume
from megamix.train.resume_rules import RNG_RULE, trained_on
from megamix.train.run import Run
from megamix.train.trainer import Trainer


def run_job(config: Config, lines: Lines = NO_LINES, make: Callable[[Job], Trainer] = Trainer) -> float | None:
    """Train by `config` on the ranks that torchrun started, or alone. Every rank must call it; the first one writes.

    `lines`: lines of the log that others predict. `make`: makes the trainer of a job; a caller may pass its own, for
    instance to observe the training. Returns the last validation loss (nats per token), with several sets the mean over
    all their targets.
    Raises: EndedEarlyError if the run gave up or was asked to leave, after saving the last weights, or if the data have
    changed during the run, without saving; ConfigError if another job holds the run's folder, or if the ranks were not
    started alike.
    """
    code = own_code(config.plugins)
    corpus = JobCorpus(config.data, config.model)
    started = started_with(config.values, code)
    with met(config.parallelism, started, corpus) as ranks:
        alert = getattr(getattr(config.metrics, "alert", None), "command", ())
        run = Run(ranks, config.checkpoint, config.pace.steps, alert, parameter_count(config.model))
        with run.held(partial(folder_problems, config)):
            data = trained_on(ranks.data.fingerprints)
            record = RunRecord(config=config.text, fingerprints=data, rng_rule=RNG_RULE, code=code)
            judge = Judge(config, record, ranks.topology.world.size)
            resume = Resume(run.folder / CHECKPOINTS, config.checkpoint.resume, judge.continuation_of_start, record)
            start = resume.find(ranks.topology.world, ranks.all_or_none)
            with run.begun(start), ExitStack() as files:  # closed while the watch goes on
                return make(build(config, run, resume, corpus, lines, files)).run()
