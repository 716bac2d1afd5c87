"""A tiny job on data that the test writes itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist

from megamix.config import Config, config_from_dict
from megamix.data.source import MarkovSource
from megamix.data.token_file import TokenFileWriter
from megamix.data.tokenizer import Tokenizer
from megamix.mixed_precision.engine import ShardedEngine
from megamix.run import results
from megamix.run.batch_plan import Attempt, BatchPlan, Fate
from megamix.train import joined
from megamix.train.job import run_job

VOCAB, SEQ_LEN, BRANCHING = 64, 32, 4  # each token has 4 equally likely successors: no model can get below ln 4
# A second layer of experts, whose biases are the only numbers that no gradient moves.
EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "dense_layers": 1, "bias_rate": 0.01}


def write_data(folder: Path, tokenizer: bool = False) -> None:
    """Write token files of a Markov chain whose entropy is ln(BRANCHING), and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    source = MarkovSource(vocab_size=VOCAB, seq_len=SEQ_LEN, branching=BRANCHING, seed=3)
    for name, samples in (("train", range(2000)), ("valid", range(2000, 2200))):
        with TokenFileWriter(folder / name, VOCAB) as writer:
            for row in source.read(samples).tokens:
                writer.add(row)
    if tokenizer:
        Tokenizer.train(["def f(x):\n    return x\n"] * 10, 280).save(folder / "tokenizer.json")


Sections = dict[str, Any]  # keys by section, and `plugins`


def tiny_job(folder: Path, *layers: Sections, tokens: Path | None = None, **overrides: Any) -> Config:
    """Return a job in folder/run on the files in `tokens`, or in folder/data.

    Overrides are sections with keys, e.g. training={"steps": 3}; so are layers, each of which covers keys of those
    before it. The loss scale fits from the start: a search from 2^24 takes as many attempts as a short job has. Tests
    of the search set their own.
    """
    tokens = tokens or folder / "data"
    changes: Sections = {}
    for layer in (*layers, overrides):
        for name, keys in layer.items():
            changes[name] = changes.get(name, {}) | keys if isinstance(keys, dict) else keys
    tree: dict[str, dict[str, Any]] = {
        "model": {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "hidden_size": 32, "num_layers": 2, "num_heads": 2},
        "data": {"train": str(tokens / "train"), "valid": str(tokens / "valid")},
        "optimizer": {"lr": 0.01, "compile": False},
        "lr_schedule": {"warmup_steps": 2},
        "precision": {"dtype": "fp16", "loss_scale": {"init_scale": 2.0**10, "growth_interval": 5}},
        "training": {"steps": 12, "micro_batch_size": 2, "global_batch_size": 8, "eval_interval": 5, "eval_batches": 2},
        "parallelism": {},
        "checkpoint": {"folder": str(folder / "run")},
        "metrics": {"log_interval": 4},
        "profiling": {},
    }
    return config_from_dict(tree, changes)


def _unpickle(*arguments: Any) -> None:
    raise AssertionError("what a peer has sent was unpickled: it could run code here")


def run_on_ranks(config: Config) -> float | None:
    """Call `run_job` on ranks whose process group is up already, or alone.

    Its sample of text is short: ranks that divide layers take as long for a whole sample as for fifteen steps.
    """
    with (
        mock.patch.object(results, "SAMPLE_TOKENS", 8),
        mock.patch.object(dist.distributed_c10d, "_tensor_to_object", _unpickle),  # torch's pipeline does, for example
        mock.patch.object(joined, "meet_ranks", lambda device, timeout_s: None),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return run_job(config)


@dataclass
class Record:
    """Attempts and samples of a run."""

    attempts: list[Attempt] = field(default_factory=list)  # as launched
    applied: list[Attempt] = field(default_factory=list)  # as applied
    valid_loss: float | None = None

    def samples(self) -> list[int]:
        """Return the samples of all applied updates, in order."""
        return [sample for attempt in self.applied for part in attempt.batch.samples for sample in part]


def run_recorded(
    config: Config, bad_attempts: frozenset[int] = frozenset(), bad_samples: frozenset[int] = frozenset()
) -> Record:
    """Run a job that overflows at some attempts and wherever some samples are.

    The overflow is in the loss of one rank, another one each time.
    """
    record = Record()
    with attempts_recorded(record), overflows_injected(record, bad_attempts, bad_samples):
        record.valid_loss = run_on_ranks(config)
    return record


@contextmanager
def attempts_recorded(record: Record, before: Callable[[BatchPlan], None] = lambda plan: None) -> Iterator[None]:
    """Write down the attempts that the plan hands out and those applied.

    `before`: called before each attempt is taken.
    """
    launch, settle = BatchPlan.launch, BatchPlan.settle

    def recorded_launch(plan: BatchPlan) -> Attempt:
        before(plan)
        record.attempts.append(launch(plan))
        return record.attempts[-1]

    def recorded_settle(plan: BatchPlan, found_inf: bool, loss_scale: float) -> Fate:
        attempt, fate = plan.oldest(), settle(plan, found_inf, loss_scale)
        if fate is Fate.APPLIED:
            record.applied.append(attempt)
        return fate

    with (
        mock.patch.object(BatchPlan, "launch", recorded_launch),
        mock.patch.object(BatchPlan, "settle", recorded_settle),
    ):
        yield


class Crash(BaseException):
    """Exception that no handler expects."""


@contextmanager
def crash_contained() -> Iterator[None]:
    """Let a Crash in the block end the job.

    In a process of its own it would also end a save that is under way. Here that save would write beside the next
    start, so it is waited for.
    """
    with suppress(Crash):
        yield
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


@contextmanager
def overflows_injected(record: Record, bad_attempts: frozenset[int], bad_samples: frozenset[int]) -> Iterator[None]:
    backward = ShardedEngine.backward

    def poisoned(engine: ShardedEngine, loss: Any, weight: float = 1.0) -> None:
        if not record.attempts:  # the loss scale's probe
            backward(engine, loss, weight)
            return
        number, batch = record.attempts[-1]
        bad = number in bad_attempts or any(sample in part for sample in bad_samples for part in batch.samples)
        topology = engine.topology
        mine = number % topology.dp.size == topology.dp.rank
        backward(engine, loss * float("inf") if bad and mine else loss, weight)

    with mock.patch.object(ShardedEngine, "backward", poisoned):
        yield


@contextmanager
def counted_calls(at_call: Callable[[int], None]) -> Iterator[None]:
    """Call `at_call(n)` at the n-th call, of Python or C, in this thread: an instant that depends on no clock."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            at_call(calls)
            calls += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
