"""Ranks of a bench. Each side of a comparison has its own, alive for the whole bench, blocked on a pipe between turns.

A rank of a training comparison takes its turns at the machine and says how long they took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megamix.base.live_storage import LiveStorage
from megamix.base.machine import keep_freed_memory, peak_resident
from megamix.model.family import flops_per_token, parameter_count
from megamix.model.sizes import dense_peak
from megamix.tools.bench.report import progress, rounds_told
from megamix.tools.bench.sides import Engine, Work
from megamix.tools.ranks import RankFailure, RankPool

T = TypeVar("T")

_DEADLINE_S = 600.0  # seconds for one answer; the slowest is a step of FP16 products on a CPU without FP16 units


def start_ranks(
    name: str, actor: Callable[[], object], *, world_size: int = 1, threads: int = 1,
    environment: Mapping[str, str] | None = None, device: str = "cpu",
) -> RankPool:  # fmt: skip
    """Return a pool of new interpreters, each with one `actor()` and the malloc settings of a job's ranks. `device`:
    where they compute, torch's default while they make the actor.
    """
    settings = {"OMP_NUM_THREADS": str(threads), **(environment or {})}
    made = partial(_make, actor, device)
    return RankPool(world_size, device, actor=made, environment=settings, name=name, deadline_s=_DEADLINE_S)


def _make(actor: Callable[[], object], device: str) -> object:
    keep_freed_memory()
    with torch.device(device):
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
    card: str = ""  # name of the GPUs that compute
    at_once: int = 99  # sides that hold their state at a time: they take turns, and the others follow
    tell: Callable[..., object] = field(default=dict, compare=False)  # told the figures of each round at once

    def described(self) -> dict[str, Any]:
        model = self.work.model
        of_all = {"rounds": self.rounds, "ranks": self.ranks, "threads": 1, "parameters": parameter_count(model)}
        return asdict(self.work) | of_all | {"model": model.model_dump(), "dtype": str(self.work.half)}

    def figures(self, turns: Sequence[Turn]) -> dict[str, float]:
        """Return what a turn of all ranks has reached: tokens/s of all; on GPUs the peak of a rank's memory, and the
        model FLOPs utilisation (MFU) where the card's peak is known.
        """
        work, copies = self.work, 1 if self.work.shared else self.ranks
        tokens = copies * work.micro_batches * work.micro_batch_size * work.model.seq_len
        figures = {"tokens_per_s": tokens / max(turn.seconds for turn in turns)}
        if self.card:
            figures["peak_gib"] = max(turn.peak_bytes for turn in turns) / 2**30
        if peak := dense_peak(self.card, torch.bfloat16):
            figures["mfu"] = figures["tokens_per_s"] * flops_per_token(work.model) / self.ranks / peak
        return figures


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
    peak_bytes: int = 0  # on a GPU: peak of its allocated memory so far


class TrainRank:
    """Rank that trains on random tokens, which depend only on the number of the step and on the rank.

    Ranks that share a model share the tokens, too.
    """

    def __init__(self, side: Side, work: Work):
        self._side, self._work = side, work
        self._rank = dist.get_rank() if dist.is_initialized() and not work.shared else 0
        self._step = 0
        self._optimizer_s = self._optimizer_cpu_s = 0.0

    @cached_property
    def engine(self) -> Engine:
        return self._side.build(self._work)

    def turn(self) -> Turn:
        """Take the steps of a turn, after its warm-up steps."""
        engine, on_gpu = self.engine, self._work.device == "cuda"
        wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else list
        for _ in range(self._side.warm_up_steps):
            self._train_step()
        engine.details_ms()
        wait()
        self._optimizer_s = self._optimizer_cpu_s = 0.0
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(self._side.steps):
            self._train_step()
        wait()
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        details = {name: value / self._side.steps for name, value in engine.details_ms().items()}
        # Not timed: the first step's gathers were launched before the clock started. The last gathers must not share
        # the machine with the next side.
        engine.finish()
        if on_gpu:  # the next side may need what this one holds for its steps alone
            torch.cuda.empty_cache()
        steps = self._side.steps
        return Turn(
            seconds=seconds / steps,
            optimizer_ms=1e3 * self._optimizer_s / steps,
            optimizer_cpu_s=self._optimizer_cpu_s / steps,
            busy=cpu_s / seconds,
            details_ms=details,
            max_rss_bytes=peak_resident(),
            peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        )

    def losses(self, steps: int) -> list[float]:
        losses = [self._train_step().item() for _ in range(steps)]
        self.engine.finish()
        return losses

    def peak_live_bytes(self, steps: int) -> int:
        """Return the peak of a new engine's construction and first steps."""
        # The tracker cannot see into a compiled function. The path without a compiler holds one small buffer more.
        self._work = replace(self._work, compile_update=False)
        with LiveStorage() as tracker:
            self.losses(steps)
        peak: int = tracker.peak_bytes
        return peak

    def _train_step(self) -> Tensor:
        """Train one step. Nothing makes the host wait for a GPU, as nothing does in a job."""
        model = self._work.model
        generator = torch.Generator().manual_seed(1000 * self._step + self._rank)
        shape = (self._work.micro_batches * self._work.micro_batch_size, model.seq_len + 1)
        samples = torch.randint(model.vocab_size, shape, generator=generator, device="cpu")
        if self._work.device == "cuda":
            samples = samples.pin_memory().to("cuda", non_blocking=True)
        loss = self.engine.forward_backward(samples[:, :-1], samples[:, 1:])
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        self.engine.optimize()
        self._optimizer_s += time.perf_counter() - start_s
        self._optimizer_cpu_s += time.process_time() - start_cpu_s
        self._step += 1
        return loss


def ranks_of(side: Side, settings: Settings) -> RankPool:
    actor, device = partial(TrainRank, side, settings.work), settings.work.device
    return start_ranks(side.name, actor, world_size=settings.ranks, device=device)


def take_turns(sides: Sequence[Side], settings: Settings) -> dict[str, list[list[Turn]]]:
    """Take each side's first steps, then all sides' turns by round, in rotated order.

    Returns: each side's rounds, as the turns of all ranks. On GPUs a side that fails is told, and has none.
    """
    turns: dict[str, list[list[Turn]]] = {side.name: [] for side in sides}

    def turn(ranks: dict[str, RankPool], name: str, number: int) -> None:
        try:
            of_ranks = ranks[name].call(TrainRank.turn)
        except RankFailure as failure:
            if not settings.card or len(turns) == 1:
                raise
            del ranks[name], turns[name]
            reason = str(failure).strip().splitlines()[-1]
            progress(f"{name} fails: {reason}")
            settings.tell(side=name, error=reason)
        else:
            if number:
                turns[name].append(of_ranks)
                settings.tell(side=name, round=number, **settings.figures(of_ranks))

    for first in range(0, len(sides), settings.at_once):
        with ExitStack() as stack:
            group = sides[first : first + settings.at_once]
            ranks = {side.name: stack.enter_context(ranks_of(side, settings)) for side in group}
            for name in [*ranks]:
                progress(f"first steps of {name}")
                turn(ranks, name, 0)
            for number in rounds_told(settings.rounds if ranks else 0):
                for name in rotated([*ranks], number):
                    turn(ranks, name, number + 1)
    return turns
