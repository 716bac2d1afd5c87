"""One rank of one side of a training comparison: takes its turns at the machine and says how long they took."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from megamix.bench.engines import Engine, Work
from megamix.live_storage import LiveStorage


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train. `build`: a class of engines.py or peers.py, or a partial of one: it travels to the ranks."""

    name: str
    build: Callable[[Work], Engine]
    steps: int = 4  # timed steps of a turn
    warm_up_steps: int = 1  # untimed ones before them: the timed ones find caches and gathers as in the middle of a run


class Turn(NamedTuple):
    """One turn on one rank."""

    seconds: float  # of a step
    optimizer_ms: float  # of a step's `optimize`
    busy: float  # cores that the rank kept busy, its communication threads included
    details_ms: dict[str, float]  # of a step


class TrainRank:
    """Steps over random tokens, which depend on the number of the step and on the rank alone, on ranks that share a
    model on the step.
    """

    def __init__(self, side: Side, work: Work):
        self._side, self._work = side, work
        self._rank = dist.get_rank() if dist.is_initialized() and not work.shared else 0
        self._step = 0
        self._optimizer_s = 0.0
        self._engine: Engine | None = None

    def turn(self) -> Turn:
        engine = self._built()
        for _ in range(self._side.warm_up_steps):
            self._train_step(engine)
        engine.details_ms()
        self._optimizer_s = 0.0
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(self._side.steps):
            self._train_step(engine)
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        details = {name: value / self._side.steps for name, value in engine.details_ms().items()}
        # Not timed, since the first step's gathers were launched before the clock started. The next side must not
        # share the machine with these.
        engine.finish()
        steps = self._side.steps
        return Turn(seconds / steps, 1e3 * self._optimizer_s / steps, cpu_s / seconds, details)

    def losses(self, steps: int) -> list[float]:
        """Take steps and return this rank's loss of each."""
        engine = self._built()
        losses = [self._train_step(engine) for _ in range(steps)]
        engine.finish()
        return losses

    def peak_live_bytes(self, steps: int) -> int:
        """Of a new engine's construction and first steps."""
        # The tracker cannot see into a compiled function. The path without a compiler holds a small buffer more.
        self._work = replace(self._work, compile_update=False)
        with LiveStorage() as tracker:
            self.losses(steps)
        peak: int = tracker.peak_bytes
        return peak

    def max_rss_bytes(self) -> int:
        """The process's peak of resident memory so far."""
        peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak  # the unit of ru_maxrss differs

    def _built(self) -> Engine:
        if self._engine is None:
            self._engine = self._side.build(self._work)
        return self._engine

    def _train_step(self, engine: Engine) -> float:
        model = self._work.model
        generator = torch.Generator().manual_seed(1000 * self._step + self._rank)
        shape = (self._work.micro_batches * self._work.micro_batch_size, model.seq_len + 1)
        samples = torch.randint(model.vocab_size, shape, generator=generator)
        loss = engine.forward_backward(samples[:, :-1], samples[:, 1:])
        start_s = time.perf_counter()
        engine.optimize()
        self._optimizer_s += time.perf_counter() - start_s
        self._step += 1
        return loss.item()
