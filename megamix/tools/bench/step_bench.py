"""Parts of a step, for each `shard`, beside forward and backward alone, DDP and FSDP2 resharded."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from megamix.base.clock import Clock
from megamix.comm.collectives import Pending
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.engine import ShardedEngine
from megamix.mixed_precision.observer import StepObserver, TransferKind, Used
from megamix.mixed_precision.settings import Shard
from megamix.tools.bench.ranks import Settings, Side, Turn, take_turns
from megamix.tools.bench.report import Goal, Result, paired_ratio, show
from megamix.tools.bench.sides import SIDES, Ddp, Engine, ForwardBackward, Ours, Work, how_multiplied

BATCH, HOOKS = "batch", "hooks: gradients collected"
FORWARD, BACKWARD = "forward", "backward"
SUMS, GATHERS = "sums exposed", "gathers exposed"
STATISTICS, UPDATE = "statistics, agreement", "update"
LAUNCHES, REST = "gathers launched", "rest of step()"
PARTS = (BATCH, FORWARD, BACKWARD, HOOKS, SUMS, GATHERS, STATISTICS, UPDATE, LAUNCHES, REST)
CPU = {part: f"{part}, processor" for part in (BATCH, FORWARD, BACKWARD, HOOKS, STATISTICS, UPDATE)}
OTHERS = "other threads, processor"
WHOLE, PROCESSOR = "whole step", "processor time"
_WAITS = {"exposed_reduce_scatter": SUMS, "exposed_all_gather": GATHERS}
ALONE = "alone"
DDP, RESHARDED = "ddp", "fsdp2, resharded"
SHARDS: tuple[Shard, ...] = ("states", "gradients", "parameters")


class Stopwatch:
    """Stopwatch that gives each moment to one part.

    Waits that an engine's clock has measured go to the parts of waits, all other time to the lap's part. This thread's
    processor time is kept, too, but not divided: the lap's part has all of it.
    """

    def __init__(self, clock: Clock | None = None):
        self._clock = clock
        self._ms = defaultdict[str, float](float)
        self._last = time.perf_counter()
        self._last_cpu = time.thread_time()

    def lap(self, part: str, rest: str = "") -> None:
        """End a stretch of `part`. If `rest` is given, time outside of the clock's span "update" goes to `rest`."""
        now, cpu = time.perf_counter(), time.thread_time()
        spans = {} if self._clock is None else self._clock.read()
        waited = {_WAITS[name]: seconds for name, seconds in spans.items() if name in _WAITS}
        own = now - self._last - sum(waited.values())
        of_part = spans.get("update", 0.0) + spans.get("exposed_agreement", 0.0) if rest else own
        self._add(waited | {part: of_part, CPU[part]: cpu - self._last_cpu})
        if rest:
            self._add({rest: own - of_part})
        self._last, self._last_cpu = now, cpu

    def _add(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self._ms[name] += 1e3 * value

    def read(self) -> dict[str, float]:
        """Return the ms of each part since the last call."""
        self.lap(BATCH)
        read = dict(self._ms)
        self._ms.clear()
        return read


class Timed(Engine, StepObserver):
    """Side with a stopwatch, put on from outside.

    On our side, hooks before and after each parameter's own hook separate the collection of its gradient from the
    products. The statistics end when the update uses its first sum.
    """

    def __init__(self, work: Work, build: Callable[[Work], Any]):
        side = self._side = build(work)
        engine: ShardedEngine | None = getattr(side, "engine", None)
        watch = self._watch = Stopwatch(None if engine is None else engine.clock)
        model: nn.Module = side.model if engine is None else engine.module
        model.register_forward_pre_hook(lambda *_: watch.lap(BATCH), prepend=True)
        model.register_forward_hook(lambda *_: watch.lap(FORWARD))
        self._rest, self._ends = "", UPDATE
        if engine is not None:
            self._rest, self._ends = REST, STATISTICS
            with torch._C.DisableTorchFunctionSubclass():  # a parameter without memory takes hooks, too
                for param in model.parameters():
                    param.register_hook(lambda grad: watch.lap(BACKWARD))  # type: ignore[no-untyped-call]  # untyped in torch
                    param.register_post_accumulate_grad_hook(lambda param: watch.lap(HOOKS))  # type: ignore[no-untyped-call]  # untyped in torch
            self._observed = ExitStack()
            self._observed.enter_context(engine.observe(self))

    def on_use(self, what: Used, bucket: Bucket, values: Tensor) -> None:
        self._watch.lap(self._ends, REST)
        self._ends = UPDATE

    def on_transfer(self, kind: TransferKind, bucket: Bucket, pending: Pending) -> None:
        if kind == "all_gather" and self._ends == UPDATE:
            self._watch.lap(UPDATE, LAUNCHES)

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._side.forward_backward(tokens, targets)
        self._watch.lap(BACKWARD)
        return loss

    def optimize(self) -> None:
        self._side.optimize()
        self._watch.lap(UPDATE, self._rest)
        self._ends = STATISTICS

    def finish(self) -> None:
        self._side.finish()

    def details_ms(self) -> dict[str, float]:
        return self._watch.read()


def step(settings: Settings) -> Result:
    """Divide a step of ours into parts for each `shard`, and compare it with DDP and FSDP2.

    The time over forward and backward alone is compared.
    """
    builds: dict[str, Any] = {
        ALONE: ForwardBackward,
        **{shard: partial(Ours, shard=shard) for shard in SHARDS},
        DDP: Ddp,
        RESHARDED: SIDES["resharded"],
    }
    turns = take_turns([Side(name, partial(Timed, build=build)) for name, build in builds.items()], settings)
    parts = {name: [_of_step(of_ranks) for of_ranks in rounds] for name, rounds in turns.items()}
    shown = (*PARTS, WHOLE, *CPU.values(), OTHERS, PROCESSOR)
    rows = [(part, *(_cell(parts[name], part) for name in parts)) for part in shown]
    for part in (WHOLE, CPU[FORWARD], CPU[BACKWARD], PROCESSOR):
        over = (_cell(_over(parts[name], parts[ALONE]), part) for name in parts if name != ALONE)
        rows.append((f"{part}, over alone's", "", *over))
    notes = how_multiplied(settings.work.device)
    return Result("step", settings.described(), parts, ("ms a step", *parts), rows, _goals(parts), notes)


def _of_step(turns: list[Turn]) -> dict[str, float]:
    """Return the ms of a step's parts, as the mean over the ranks."""
    parts = {part: mean(turn.details_ms[part] for turn in turns) for part in turns[0].details_ms}
    parts[WHOLE] = mean(1e3 * turn.seconds for turn in turns)
    parts[PROCESSOR] = mean(1e3 * turn.seconds * turn.busy for turn in turns)
    parts[OTHERS] = parts[PROCESSOR] - sum(parts.get(part, 0.0) for part in CPU.values())
    return parts


Rounds = list[dict[str, float]]  # part -> ms, round by round


def _over(rounds: Rounds, alone: Rounds) -> Rounds:
    """Return by how much parts exceed those of forward and backward alone, in the same round."""
    pairs = zip(rounds, alone, strict=True)
    return [{part: own[part] - bare[part] for part in own if part in bare} for own, bare in pairs]


def _cell(rounds: Rounds, part: str) -> str:
    return show([of_round[part] for of_round in rounds], 1) if part in rounds[0] else ""


def _goals(parts: Mapping[str, Rounds]) -> list[Goal]:
    goals = []
    for name, other, bound in (("states", DDP, 0.6), ("parameters", RESHARDED, 0.8)):
        for part in (PROCESSOR, WHOLE):
            ours, theirs = ([of[part] for of in _over(parts[side], parts[ALONE])] for side in (name, other))
            text = f"{name}: {part} over alone's, as a share of {other}'s"
            goals.append(Goal(text, paired_ratio(ours, theirs), bound, at_least=False))
    return goals
