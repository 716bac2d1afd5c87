"""Ranks of a bench. Each side of a comparison has its own, alive for the whole bench, blocked on a pipe between turns.

A rank of a training comparison takes its turns at the machine and says how long they took.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megamix.live_storage import LiveStorage
from megamix.machine import keep_freed_memory
from megamix.model.family import parameter_count
from megamix.tools.bench.report import progress, rounds_told
from megamix.tools.bench.sides import Engine, Work
from megamix.tools.ranks import RankPool

T = TypeVar("T")

_DEADLINE_S = 600.0  # seconds for one answer; the slowest is a step of FP16 products on a CPU without FP16 units


def start_ranks(
    name: str, actor: Callable[[], object], *, world_size: int = 1, threads: int = 1,
    environment: Mapping[str, str] | None = None,
) -> RankPool:  # fmt: skip
    """Return a pool of new interpreters, each with one `actor()` and the malloc settings of a job's ranks."""
    settings = {"OMP_NUM_THREADS": str(threads), **(environment or {})}
    kept = partial(_with_kept_memory, actor)
    return RankPool(world_size, actor=kept, environment=settings, name=name, deadline_s=_DEADLINE_S)


def _with_kept_memory(actor: Callable[[], object]) -> object:
    keep_freed_memory()
    return actor()


def seconds_of(work: Callable[[], object], times: int = 1) -> float:
    """Return the seconds of one call, as the mean of `times` calls after an untimed one that fills the caches."""
    for timed in (1, times):
        start_s = time.perf_counter()
        for _ in range(timed):
            work()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # no types
            torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / times


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train. `build`: a subclass of sides.Engine, or a partial of one; it travels to the ranks."""

    name: str
    build: Callable[[Work], Engine]
    steps: int = 4  # timed steps of a turn
    warm_up_steps: int = 1  # untimed steps before them, so that caches and gathers are as in the middle of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Size of the measurement."""

    work: Work = field(default_factory=Work)
    rounds: int = 15
    ranks: int = 2

    def described(self) -> dict[str, Any]:
        """Return the settings for the line of JSON."""
        model = self.work.model
        of_all = {"rounds": self.rounds, "ranks": self.ranks, "threads": 1, "parameters": parameter_count(model)}
        return asdict(self.work) | of_all | {"model": model.model_dump()}


def rotated(sides: Sequence[T], number: int) -> list[T]:
    """Return all sides in turn, with another first one each round, so that none always follows the same one."""
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


class Turn(NamedTuple):
    """One turn on one rank."""

    seconds: float  # seconds of a step
    optimizer_ms: float  # ms of a step's `optimize`
    optimizer_cpu_s: float  # its processor time, over all threads
    busy: float  # cores that the rank kept busy, its communication threads included
    details_ms: dict[str, float]  # parts of a step
    max_rss_bytes: int  # the process's peak of resident memory so far


def max_rss_bytes() -> int:
    """Return this process's peak of resident memory so far."""
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # the unit of ru_maxrss differs


class TrainRank:
    """Rank that trains on random tokens, which depend only on the number of the step and on the rank.

    Ranks that share a model share the tokens, too.
    """

    def __init__(self, side: Side, work: Work):
        self._side, self._work = side, work
        self._rank = dist.get_rank() if dist.is_initialized() and not work.shared else 0
        self._step = 0
        self._optimizer_s = self._optimizer_cpu_s = 0.0
        self._engine: Engine | None = None

    def turn(self) -> Turn:
        """Take the steps of a turn, after its warm-up steps."""
        engine = self._built()
        for _ in range(self._side.warm_up_steps):
            self._train_step(engine)
        engine.details_ms()
        self._optimizer_s = self._optimizer_cpu_s = 0.0
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(self._side.steps):
            self._train_step(engine)
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        details = {name: value / self._side.steps for name, value in engine.details_ms().items()}
        # Not timed: the first step's gathers were launched before the clock started. The last gathers must not share
        # the machine with the next side.
        engine.finish()
        steps = self._side.steps
        return Turn(
            seconds=seconds / steps,
            optimizer_ms=1e3 * self._optimizer_s / steps,
            optimizer_cpu_s=self._optimizer_cpu_s / steps,
            busy=cpu_s / seconds,
            details_ms=details,
            max_rss_bytes=max_rss_bytes(),
        )

    def losses(self, steps: int) -> list[float]:
        """Take steps and return this rank's loss of each."""
        engine = self._built()
        losses = [self._train_step(engine) for _ in range(steps)]
        engine.finish()
        return losses

    def peak_live_bytes(self, steps: int) -> int:
        """Return the peak of a new engine's construction and first steps."""
        # The tracker cannot see into a compiled function. The path without a compiler holds one small buffer more.
        self._work = replace(self._work, compile_update=False)
        with LiveStorage() as tracker:
            self.losses(steps)
        peak: int = tracker.peak_bytes
        return peak

    def _built(self) -> Engine:
        if self._engine is None:
            self._engine = self._side.build(self._work)
        return self._engine

    def _train_step(self, engine: Engine) -> float:
        model = self._work.model
        generator = torch.Generator().manual_seed(1000 * self._step + self._rank)
        shape = (self._work.micro_batches * self._work.micro_batch_size, model.seq_len + 1)
        samples = torch.randint(model.vocab_size, shape, generator=generator).to(self._work.device)
        loss = engine.forward_backward(samples[:, :-1], samples[:, 1:])
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        engine.optimize()
        self._optimizer_s += time.perf_counter() - start_s
        self._optimizer_cpu_s += time.process_time() - start_cpu_s
        self._step += 1
        return loss.item()


def ranks_of(side: Side, settings: Settings) -> RankPool:
    """Return the ranks on which a side trains."""
    return start_ranks(side.name, partial(TrainRank, side, settings.work), world_size=settings.ranks)


def take_turns(sides: Sequence[Side], settings: Settings) -> dict[str, list[list[Turn]]]:
    """Take each side's first steps, then all sides' turns by round, in rotated order.

    Returns: each side's rounds, as the turns of all ranks.
    """
    turns: dict[str, list[list[Turn]]] = {side.name: [] for side in sides}
    with ExitStack() as stack:
        ranks = {side.name: stack.enter_context(ranks_of(side, settings)) for side in sides}
        for name in ranks:
            progress(f"first steps of {name}")
            ranks[name].call(TrainRank.turn)
        for number in rounds_told(settings.rounds):
            for name in rotated([*ranks], number):
                turns[name].append(ranks[name].call(TrainRank.turn))
    return turns
