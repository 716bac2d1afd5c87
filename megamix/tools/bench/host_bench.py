"""Processor time per step on the host beyond forward and backward, and how it grows with tensors, units, micro-batches
and ranks.

On a fast GPU a step takes as long as the host needs to launch it, unless the products take longer.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

from megamix.base import constants
from megamix.config import ModelConfig
from megamix.tools.bench.ranks import Settings, Side, TrainRank, rotated, start_ranks
from megamix.tools.bench.report import Goal, Result, paired_ratio, progress, rounds_told, show, spread, table
from megamix.tools.bench.sides import SIDES, ByHand, Fsdp, Ours, Work, how_multiplied, join_a_group, make_model

BARE, DDP = "forward and backward", "ddp"
PARTS = 4  # blocks of a unit in the case of few units; micro-batches in the case of many
FIRST_STEPS = 2  # steps until everything is compiled


def small_model(width: int, layers: int) -> ModelConfig:
    """Return a model of 12 tensors in each layer and 4 beside them, whose products take next to no time."""
    return ModelConfig(
        vocab_size=64,
        seq_len=8,
        hidden_size=width,
        num_layers=layers,
        num_heads=2,
        qkv_bias=True,
        rope=None,
        tie_embeddings=False,
    )


class Sitting(NamedTuple):
    """Sides that take turns at each of the cases, each side on ranks of its own."""

    ranks: int
    sides: Mapping[str, Any]  # subclasses of sides.Engine, or partials of these
    cases: Mapping[str, Work]


ALONE, TWO = "one rank", "two ranks"
JOINED, SHALLOW = "few units", "few tensors"
HALF, CUT = "half the layers", "micro-batches"
UNJOINED = "parameters, no units joined"
OURS = {"states": SIDES["ours"], "gradients": SIDES["gradients"], "parameters": SIDES["parameters"]}
FSDP = {"fsdp2, kept": partial(Fsdp, reshard_after_forward=False), "fsdp2, resharded": SIDES["resharded"]}


class Unjoined(Ours):
    """megamix with each unit gathered by itself, as a large model's units are, however small the model is."""

    def __init__(self, work: Work):
        with mock.patch.object(constants, "LEAST_UNIT", 0):
            super().__init__(work, shard="parameters")


def sittings(work: Work, layers: int, width: int) -> list[Sitting]:
    """Return the sittings. Each case differs from another in one thing, so their difference is its cost."""

    def of(layers: int) -> Work:
        return replace(work, micro_batch_size=1, model=small_model(width, layers))

    small = {
        ALONE: of(layers),
        JOINED: replace(of(layers), blocks_a_unit=PARTS),
        SHALLOW: of(layers // PARTS),
        HALF: of(layers // 2),
        CUT: replace(of(layers), micro_batches=PARTS),
    }
    alone = {UNJOINED: Unjoined, "by hand": ByHand, "autocast": SIDES["plain"]}
    on_both = {BARE: SIDES[BARE], **OURS, DDP: SIDES[DDP], **FSDP}
    return [Sitting(1, on_both | alone, small), Sitting(2, on_both, {TWO: of(layers // 2)})]


class First(NamedTuple):
    """First steps of one side at one case, on one rank."""

    losses: list[float]
    graphs: int  # graphs compiled for these steps


class HostRank:
    """One side on one rank, with an engine for each case."""

    def __init__(self, side: Side, cases: Mapping[str, Work]):
        join_a_group("cpu")
        self._ranks = {name: TrainRank(side, work) for name, work in cases.items()}

    def begin(self, case: str, steps: int) -> First:
        """Build a case's engine and take its first steps, untimed."""
        before = _graphs()
        losses = self._ranks[case].losses(steps)
        gc.freeze()  # otherwise each measured side would walk through the modules of all cases
        return First(losses, _graphs() - before)

    def cpu_ms(self, case: str) -> float:
        """Take a turn and return a step's processor time in ms, over all threads."""
        turn = self._ranks[case].turn()
        return 1e3 * turn.busy * turn.seconds


def _graphs() -> int:
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else compiler.counters["stats"]["unique_graphs"]


@dataclass(slots=True)
class HostCase:
    """One case and its rounds."""

    settings: Settings
    tensors: int
    cpu_ms: dict[str, list[float]]  # side -> ms of a step, as the mean over the ranks
    first: dict[str, First]  # side -> first steps of the first rank

    def over(self, side: str) -> list[float]:
        """Return the cost of a side's step over forward and backward, round by round."""
        return [ms - bare for ms, bare in zip(self.cpu_ms[side], self.cpu_ms[BARE], strict=True)]


def measure(sitting: Sitting, settings: Settings, steps: int) -> dict[str, HostCase]:
    """Take the turns of all sides at all cases, round by round, in rotated order."""
    measured = {}
    for case, work in sitting.cases.items():
        on_meta = make_model(replace(work, device="meta"))
        described = replace(settings, work=work, ranks=sitting.ranks)
        measured[case] = HostCase(described, len([*on_meta.parameters()]), {}, {})
    with ExitStack() as stack:
        pools = {}
        for name, build in sitting.sides.items():
            progress(f"host: {name}, on {sitting.ranks} rank(s)")
            actor = partial(HostRank, Side(name, build, steps), sitting.cases)
            pools[name] = stack.enter_context(start_ranks(name, actor, world_size=sitting.ranks))
            for case in sitting.cases:
                measured[case].first[name] = pools[name].call(HostRank.begin, case, FIRST_STEPS)[0]
        for number in rounds_told(settings.rounds):
            for case, name in product(sitting.cases, rotated([*sitting.sides], number)):
                cpu_ms = statistics.mean(pools[name].call(HostRank.cpu_ms, case))
                measured[case].cpu_ms.setdefault(name, []).append(cpu_ms)
                settings.tell(case=case, side=name, round=number + 1, cpu_ms=cpu_ms)
    return measured


def host(settings: Settings, layers: int = 48, width: int = 32, steps: int = 5) -> Result:
    """Measure ours, torch's ways and a loop by hand beside forward and backward alone.

    `layers`: a multiple of PARTS. `steps`: of a turn.
    """
    measured = dict[str, HostCase]()
    for sitting in sittings(settings.work, layers, width):
        measured |= measure(sitting, settings, steps)
    columns = ("case: side", "CPU ms a step", "ms over bare", "us a tensor", "share of ddp's", "graphs")
    rows = [row for case in (ALONE, TWO) for row in _rows(case, measured[case])]
    described = {case: of_case.settings.described() for case, of_case in measured.items()}
    raw = {case: {"cpu_ms": of_case.cpu_ms, "first": of_case.first} for case, of_case in measured.items()}
    notes = [*_growth(measured), *how_multiplied(settings.work.device)]
    return Result("host", {"steps": steps, "cases": described}, raw, columns, rows, _goals(measured), notes)


def _rows(case: str, measured: HostCase) -> Iterator[tuple[str, ...]]:
    for side, cpu_ms in measured.cpu_ms.items():
        over, of_ddp = measured.over(side), measured.over(DDP)
        beyond = (
            show(over, 1),
            show([1e3 * ms / measured.tensors for ms in over], 1),
            show(paired_ratio(over, of_ddp), 2),
        )
        title, graphs = f"{case}, {measured.tensors} tensors: {side}", str(measured.first[side].graphs)
        yield title, show(cpu_ms, 1), *(("", "", "") if side == BARE else beyond), graphs


def a_further(measured: Mapping[str, HostCase], side: str) -> dict[str, list[float]]:
    """Return the cost to a side of one more of each thing, in ms by round.

    It is the difference of two cases that differ only in that thing, divided by how many of it they differ by. The
    number of units does not change forward and backward, so for units whole steps are compared.
    """
    layers = measured[ALONE].settings.work.model.num_layers
    tensors = measured[JOINED].tensors - measured[SHALLOW].tensors
    over = {case: found.over(side) for case, found in measured.items() if side in found.cpu_ms}
    whole = {case: found.cpu_ms[side] for case, found in measured.items() if side in found.cpu_ms}
    things = {
        "tensor": (over, JOINED, SHALLOW, tensors),
        "unit": (whole, ALONE, JOINED, layers - layers // PARTS),
        "micro-batch": (over, CUT, ALONE, PARTS - 1),
        "rank": (over, TWO, HALF, 1),
    }
    return {
        thing: [(a - b) / count for a, b in zip(ms[more], ms[less], strict=True)]
        for thing, (ms, more, less, count) in things.items()
        if more in ms and less in ms
    }


def _growth(measured: Mapping[str, HostCase]) -> list[str]:
    things = ("tensor", "unit", "micro-batch", "rank")
    rows = []
    for side in measured[ALONE].cpu_ms:
        if side != BARE:
            costs = a_further(measured, side)
            rows.append((side, *(show(costs[thing], 3) if thing in costs else "" for thing in things)))
    return ["ms for one more of each, over bare", *table(("side", *things), rows)]


def _goals(measured: Mapping[str, HostCase]) -> list[Goal]:
    def of_ddp(case: str, side: str, bound: float) -> Goal:
        share = paired_ratio(measured[case].over(side), measured[case].over(DDP))
        return Goal(f"{case}, {side}: over bare, as a share of {DDP}'s", share, bound, at_least=False)

    a_unit = spread(a_further(measured, UNJOINED)["unit"])
    return [
        of_ddp(ALONE, "states", 0.4),
        of_ddp(ALONE, "gradients", 0.5),
        of_ddp(ALONE, "parameters", 0.9),
        of_ddp(TWO, "parameters", 1.0),
        Goal("parameters: ms a unit that is joined with no other", a_unit, 0.4, at_least=False),
    ]
