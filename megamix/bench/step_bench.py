"""Where a step goes: its parts by each `shard`, beside forward and backward alone, DDP and FSDP2 resharded."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import mean

import torch
from torch import Tensor

from megamix.bench.ranks import Settings, Side, Turn, ranks_of, take_turns
from megamix.bench.report import Goal, Result, Spread, paired_ratio, show, spread
from megamix.bench.sides import Ddp, Engine, ForwardBackward, Fsdp, Ours, Work, how_multiplied
from megamix.clock import Clock
from megamix.mixed_precision.bucket import Bucket
from megamix.mixed_precision.observer import GRADIENT, StepObserver, Used
from megamix.mixed_precision.settings import Shard

BATCH, FORWARD, BACKWARD, HOOKS = "batch, and loss read", "forward", "backward", "hooks: gradients collected"
SUMS, GATHERS = "sums exposed", "gathers exposed"
STATISTICS, UPDATE, REST = "statistics, agreement", "update", "rest of step()"
WHOLE, PROCESSOR = "whole step", "processor time"
PARTS = (BATCH, FORWARD, BACKWARD, HOOKS, SUMS, GATHERS, STATISTICS, UPDATE, REST)
_WAITS = {"exposed_reduce_scatter": SUMS, "exposed_all_gather": GATHERS}
ALONE, DDP, RESHARDED = "alone", "ddp", "fsdp2, resharded"
SHARDS: tuple[Shard, ...] = ("states", "gradients", "parameters")


class Stopwatch:
    """Gives each moment to one part: what an engine's clock has of waits to these, the rest to what a lap names."""

    def __init__(self, clock: Clock | None = None):
        self._clock = clock
        self._ms: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, part: str, span_alone: bool = False) -> None:
        """End a stretch of `part`. `span_alone`: what is outside of the clock's span "update" is the rest of step()."""
        now = time.perf_counter()
        spans = {} if self._clock is None else self._clock.read()
        waited = {_WAITS[name]: seconds for name, seconds in spans.items() if name in _WAITS}
        own = now - self._last - sum(waited.values())
        in_span = spans.get("update", 0.0) if span_alone else own
        for name, seconds in (*waited.items(), (part, in_span), (REST, own - in_span)):
            self._ms[name] += 1e3 * seconds
        self._last = now

    def read(self) -> dict[str, float]:
        """Return the ms of each part since the last call."""
        self.lap(BATCH)
        read = dict(self._ms)
        self._ms.clear()
        return read


class TimedOurs(Ours, StepObserver):
    """megamix with a stopwatch, from outside: a hook in front of each parameter's own and one behind it tell its
    gradient's collection from the products; the first sum that the update uses ends the statistics.
    """

    def __init__(self, work: Work, shard: Shard):
        super().__init__(work, shard=shard)
        watch = self._watch = Stopwatch(self.engine.clock)
        self._ends = STATISTICS  # with the next use
        with torch._C.DisableTorchFunctionSubclass():  # a parameter without memory takes hooks, too
            for param in self.engine.module.parameters():
                param.register_hook(lambda grad: watch.lap(BACKWARD))  # type: ignore[no-untyped-call]  # no types
                param.register_post_accumulate_grad_hook(lambda param: watch.lap(HOOKS))  # type: ignore[no-untyped-call]  # no types
        self._observed = ExitStack()
        self._observed.enter_context(self.engine.observe(self))

    def on_use(self, what: Used, bucket: Bucket, values: Tensor) -> None:
        if what == GRADIENT:
            self._watch.lap(self._ends, span_alone=True)
            self._ends = UPDATE

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self._watch.lap(BATCH)
        loss: Tensor = self.engine(tokens, targets)
        self._watch.lap(FORWARD)
        self.engine.backward(loss)
        self._watch.lap(BACKWARD)
        return loss.detach()

    def optimize(self) -> None:
        self._ends = STATISTICS
        self.engine.step()
        self._watch.lap(UPDATE, span_alone=True)

    def details_ms(self) -> dict[str, float]:
        return self._watch.read()


class TimedAlone(ForwardBackward):
    """Forward and backward alone, with a stopwatch."""

    def __init__(self, work: Work):
        super().__init__(work)
        self._watch = Stopwatch()

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self._watch.lap(BATCH)
        loss: Tensor = self.model(tokens, targets)
        self._watch.lap(FORWARD)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._watch.lap(BACKWARD)
        return loss.detach()

    def details_ms(self) -> dict[str, float]:
        return self._watch.read()


def step(settings: Settings) -> Result:
    """Split a step of ours by each `shard`, and compare with DDP and FSDP2 what it takes over forward and backward."""
    builds: dict[str, Callable[[Work], Engine]] = {
        ALONE: TimedAlone,
        **{shard: partial(TimedOurs, shard=shard) for shard in SHARDS},
        DDP: Ddp,
        RESHARDED: partial(Fsdp, reshard_after_forward=True),
    }
    with ExitStack() as stack:
        sides = [Side(name, build) for name, build in builds.items()]
        ranks = {side.name: stack.enter_context(ranks_of(side, settings)) for side in sides}
        turns = take_turns(ranks, settings.rounds)
    parts = {name: [_of_step(of_ranks) for of_ranks in rounds] for name, rounds in turns.items()}
    rows = [(part, *(_cell(parts[name], part) for name in parts)) for part in (*PARTS, WHOLE, PROCESSOR)]
    for part in (FORWARD, BACKWARD, WHOLE, PROCESSOR):
        rows.append((f"{part}, over alone's", *(_cell(_over(parts, name), part) for name in parts)))
    notes = how_multiplied(settings.work.device)
    return Result("step", settings.described(), parts, ("ms a step", *parts), rows, _goals(parts), notes)


def _of_step(turns: list[Turn]) -> dict[str, float]:
    """Return the ms of a step's parts, the mean over the ranks."""
    parts = {part: mean(turn.details_ms[part] for turn in turns) for part in PARTS if part in turns[0].details_ms}
    parts[WHOLE] = mean(1e3 * turn.seconds for turn in turns)
    parts[PROCESSOR] = mean(1e3 * turn.seconds * turn.busy for turn in turns)
    return parts


Rounds = list[dict[str, float]]  # part -> ms, round by round


def _over(parts: Mapping[str, Rounds], name: str) -> Rounds:
    """Return what a side's parts take more than those of forward and backward alone, in the same round."""
    if name == ALONE:
        return []
    pairs = zip(parts[name], parts[ALONE], strict=True)
    return [{part: own[part] - alone[part] for part in own if part in alone} for own, alone in pairs]


def _cell(rounds: Rounds, part: str) -> str:
    return show(spread([of_round[part] for of_round in rounds]), 1) if rounds and part in rounds[0] else ""


def _goals(parts: Mapping[str, Rounds]) -> list[Goal]:
    over = {name: _over(parts, name) for name in parts}

    def ratio(of: Mapping[str, Rounds], name: str, other: str, part: str) -> Spread:
        return paired_ratio(*([of_round[part] for of_round in of[side]] for side in (name, other)))

    return [
        *(
            Goal(f"{name}: {part} over alone's, as a share of {other}'s", ratio(over, name, other, part), bound, False)
            for name, other, bound in (("states", DDP, 0.6), ("parameters", RESHARDED, 0.8))
            for part in (PROCESSOR, WHOLE)
        ),
        *(
            Goal(f"{name}: tokens/s over those of states", ratio(parts, "states", name, WHOLE), bound)
            for name, bound in (("gradients", 0.98), ("parameters", 0.95))
        ),
    ]
