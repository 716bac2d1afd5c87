"""Observation on every rank of a layout: train on a made-up text, and write down each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from megamix.config import Config, reading_ranks
from megamix.data.loader import Batch
from megamix.data.sampler import micro_batches as cut_batch
from megamix.data.source import MarkovSource, Numbers, Rows
from megamix.mixed_precision.step import StepResult
from megamix.parallel.micro_batch_runner import MicroBatch, MicroBatchRunner
from megamix.tools.verify.core.choices import routers, watched_routers
from megamix.tools.verify.core.observed_step import ObservedStep, Poison, UsedValues, observed, rank_device
from megamix.tools.verify.core.tape import recorded
from megamix.train.corpus import JobCorpus
from megamix.train.engine import build_training
from megamix.train.objects import build_loader

MOST_SKIPPED = 40  # the search for the first loss scale takes up to 33 steps
_BRANCHING = 16  # successors of a token in the synthetic text: gradients of embeddings differ in size


def observe(config: Config, updates: int, overflow_at: int | None, bisect: bool = False) -> list[ObservedStep]:
    """Train until `updates` steps are applied, and return every attempt.

    The list begins with the state before the first step, which has no loss and no gradient. In attempt `overflow_at`
    one rank's gradient is made infinite. `bisect`: record the tensors through each module; no module is compiled then.
    Every rank of the layout that `config` names must call it.
    """
    if bisect:
        config = config.with_keys(model={"compile": False})
    runner = build_training(config, rank_device())
    engine = runner.engine
    set_biases(config, engine.module)
    poison, used, watched = Poison(engine), UsedValues(), watched_routers(engine.module)
    specs = [slot.spec for bucket in engine.plan.layout.buckets for slot in bucket.slots]
    divided = {spec.name.rpartition(".")[0] for spec in specs if spec.shape != spec.full_shape}  # may see partial sums
    run = [observed(engine, None, used)]
    while (attempt := len(run) - 1) < updates + MOST_SKIPPED and int(engine.applied_updates) < updates:
        poison.active = attempt == overflow_at
        with engine.observe(used), recorded(engine.module, wanted=bisect, but=divided) as tape:
            result = take_step(config, runner, attempt)
        choices = {name: router.take() for name, router in watched.items()}
        run.append(replace(observed(engine, result, used), choices=choices, tape=tape))
    return run


@torch.no_grad()
def set_biases(config: Config, model: nn.Module) -> None:
    """Set the biases of routers to numbers as unequal as the scores of fresh weights. With zeros, which a job begins
    with, a bias that is missing would not show.
    """
    for name, router in routers(model).items():
        if router.biases is not None:
            drawn = torch.Generator().manual_seed(config.training.seed + sum(name.encode()))
            size = config.model.init_std * config.model.hidden_size**0.5  # of the logits of a normed input
            slope = 0.25 if router.experts.score == "sigmoid" else 1 / router.experts.num_experts
            router.biases.copy_(size * slope * torch.randn(router.experts.num_experts, generator=drawn))


def take_step(config: Config, runner: MicroBatchRunner, attempt: int) -> StepResult:
    """Take one step of this rank's `batches`. Every rank must call it."""
    engine = runner.engine
    loaded = batches(config, attempt, engine.topology.data.rank)
    runner.forward_backward(MicroBatch(batch.to(engine.device)) for batch in loaded)
    return engine.step()


def batches(config: Config, attempt: int, dp_rank: int) -> Iterator[Batch]:
    """Yield the micro-batches of one rank, read as a job reads them.

    They come from a plugin's source if the job has one, else from a made-up text. They are packed if the job packs
    documents.
    """
    batch_size = config.training.global_batch_size
    corpus = JobCorpus(config.data, config.model)
    made_up = _Documents if corpus.packed else _chain
    own = corpus.of_plugin(config.training.seed)
    source = made_up(config) if own is None else own
    samples = (range(attempt * batch_size, (attempt + 1) * batch_size),)
    size, ranks = config.training.micro_batch_size, reading_ranks(config.parallelism)
    with build_loader(config.parallelism, source, torch.device("cpu"), packed=corpus.packed) as loader:
        for (part,) in cut_batch(samples, micro_batch_size=size, dp_rank=dp_rank, dp_size=ranks):
            yield loader.get(part)


def _chain(config: Config) -> MarkovSource:
    model, seed = config.model, config.training.seed
    branching = min(model.vocab_size, _BRANCHING)
    return MarkovSource(vocab_size=model.vocab_size, seq_len=model.seq_len, branching=branching, seed=seed)


class _Documents:
    """The same tokens, cut into documents of unequal lengths, some of one token."""

    def __init__(self, config: Config):
        self.seq_len, self._tokens = config.model.seq_len, _chain(config)

    def read(self, samples: Numbers) -> Rows:
        column = np.arange(self.seq_len + 1)
        begins = (31 * np.asarray(samples)[:, None] + column * column) % 7 < 2
        return Rows(self._tokens.read(samples).tokens, column - np.maximum.accumulate(begins * column, 1))
