"""Whole training steps: ours and torch's own ways take turns, also with two ranks that divide the model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megamix.tools.bench.layout_sides import SCHEDULE, OursDivided, TorchPipeline, TorchTensorParallel
from megamix.tools.bench.ranks import Settings, Side, TrainRank, Turn, ranks_of, take_turns
from megamix.tools.bench.report import Goal, Result, Spread, paired_ratio, progress, show
from megamix.tools.bench.sides import GPT_12M, SIDES, Work, how_multiplied

MEMORY_STEPS = 2  # states exist from the first update on, so the second step has the peak

# Neither parallelize_module nor torch's pipelines keep a tied table as one.
UNTIED = Work(model=GPT_12M.model_copy(update={"tie_embeddings": False}), shared=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBench:
    """Sides of one layout: ours, those that it is held against, and others."""

    work: Work
    ours: Side
    peers: Sequence[Side]
    others: Sequence[Side] = ()
    beside: str = "torch alone"
    least: float = 0.97  # share of the fastest peer's tokens/s


LAYOUTS = {
    "tp2": LayoutBench(
        work=replace(UNTIED, micro_batch_size=4),
        ours=Side("ours", partial(OursDivided, tensor={"size": 2})),
        peers=[Side("autocast", TorchTensorParallel), Side("fully_shard", partial(TorchTensorParallel, sharded=True))],
        others=[
            Side("ours, whole positions", partial(OursDivided, tensor={"size": 2, "sequence_parallel": False})),
        ],
    ),
    "pp2": LayoutBench(
        work=replace(UNTIED, micro_batch_size=2, micro_batches=4),
        ours=Side("ours", partial(OursDivided, pipeline={"size": 2, "schedule": SCHEDULE})),
        peers=[Side("autocast", TorchPipeline), Side("fully_shard", partial(TorchPipeline, sharded=True))],
    ),
    # torch's own context parallelism needs a GPU's kernels, so data-parallel ranks with as many tokens stand for it.
    "cp2": LayoutBench(
        work=replace(UNTIED, model=UNTIED.model.model_copy(update={"seq_len": 2048}), micro_batch_size=2),
        ours=Side("ours", partial(OursDivided, context={"size": 2})),
        peers=[Side("dp2", OursDivided)],
        beside="data-parallel ranks",
        least=0.91,
    ),
}


ON_CPU = ("ours", "gradients", "parameters", "ddp", "zero", "fsdp2", "resharded", "forward and backward")
ON_GPU = ("ours", "plain", "fsdp2")


class Measured(NamedTuple):
    """Rounds of one side."""

    tokens_per_s: list[float]  # tokens/s of all ranks
    optimizer_ms: list[float]  # ms of a step on the slowest rank
    busy: list[float]  # cores that a rank kept busy, as the mean over the ranks
    details_ms: list[dict[str, float]]  # parts of a step on the first rank
    max_rss_bytes: int  # bytes of the largest rank
    peak_live_bytes: int  # bytes of the largest rank, in a run of its own; on GPUs in its turns
    mfu: Sequence[float] = ()  # on GPUs whose peak is known


def train(settings: Settings, names: Sequence[str] = ()) -> Result:
    """Compare ours in half with torch's three ways, with the other settings of `shard`, and with forward and backward;
    or the sides with these `names`, of which no goals are known, as on GPUs.
    """
    if names := names or (ON_GPU if settings.card else ()):
        steps = {"steps": 8, "warm_up_steps": 2} if settings.card else {}
        measured = measure([Side(name, SIDES[name], **steps) for name in names], settings)
        failed = [f"{name}: failed, see above" for name in names if name not in measured]
        peers = [name for name in ("plain", "ddp", "fsdp2") if {"ours", name} <= {*measured}]
        goals = [Goal(f"tokens/s over {peer}", _speed_up(measured["ours"], measured[peer]), 0.97) for peer in peers]
        return _result("train", settings, measured, goals, failed)
    measured = measure([Side(name, SIDES[name]) for name in ON_CPU], settings)
    ours = measured["ours"]
    ratios = {peer: _speed_up(ours, measured[peer]) for peer in ("ddp", "zero", "fsdp2")}
    best = min(ratios, key=lambda name: ratios[name].median)
    parameters, resharded = measured["parameters"], measured["resharded"]
    goals = [
        Goal(f"tokens/s over the best of the three ({best})", ratios[best], 1.05),
        Goal("tokens/s over forward and backward alone", _speed_up(ours, measured["forward and backward"]), 0.85),
        _memory_goal("peak live bytes over ddp's", ours, measured["ddp"]),
        _memory_goal("peak live bytes over zero's", ours, measured["zero"]),
        Goal("gradients: tokens/s over ours", _speed_up(measured["gradients"], ours), 0.98),
        Goal("parameters: tokens/s over ours", _speed_up(parameters, ours), 0.95),
        Goal("parameters: tokens/s over resharded", _speed_up(parameters, resharded), 1.15),
        _memory_goal("parameters: peak live bytes over resharded's", parameters, resharded),
    ]
    return _result("train", settings, measured, goals)


def layout(name: str, settings: Settings) -> Result:
    """Compare ours with its fastest peer on the layout `name` of LAYOUTS, in BF16 on two ranks."""
    bench = LAYOUTS[name]
    settings = replace(settings, work=bench.work, ranks=2)
    measured = measure([bench.ours, *bench.peers, *bench.others], settings)
    ratios = {peer.name: _speed_up(measured[bench.ours.name], measured[peer.name]) for peer in bench.peers}
    best = min(ratios, key=lambda peer: ratios[peer].median)
    goal = Goal(f"tokens/s over {bench.beside} ({best})", ratios[best], bench.least)
    return _result(f"train --layout {name}", settings, measured, [goal])


def measure(sides: Sequence[Side], settings: Settings) -> dict[str, Measured]:
    """Measure each side's memory in a run of its own, then all sides' turns, round by round in rotated order. On GPUs
    the turns show the memory, too.
    """
    peaks = dict[str, int]()
    for side in () if settings.card else sides:
        progress(f"memory of {side.name}")
        with ranks_of(side, settings) as alone:
            peaks[side.name] = max(alone.call(TrainRank.peak_live_bytes, MEMORY_STEPS))
    turns = take_turns(sides, settings)
    return {name: _measured(rounds, peaks.get(name, 0), settings) for name, rounds in turns.items()}


def _measured(rounds: list[list[Turn]], peak: int, settings: Settings) -> Measured:
    figures = [settings.figures(turns) for turns in rounds]
    return Measured(
        [of_round["tokens_per_s"] for of_round in figures],
        [max(turn.optimizer_ms for turn in turns) for turns in rounds],
        [statistics.mean(turn.busy for turn in turns) for turns in rounds],
        [turns[0].details_ms for turns in rounds],
        max(turn.max_rss_bytes for turn in rounds[-1]),
        peak or max(turn.peak_bytes for turns in rounds for turn in turns),
        [of_round["mfu"] for of_round in figures if "mfu" in of_round],
    )


def _speed_up(ours: Measured, other: Measured) -> Spread:
    return paired_ratio(ours.tokens_per_s, other.tokens_per_s)


def _memory_goal(text: str, ours: Measured, other: Measured) -> Goal:
    return Goal(text, ours.peak_live_bytes / other.peak_live_bytes, 1.0, at_least=False)


def _exposed(measured: dict[str, Measured]) -> list[str]:
    """Return how each side's step divides its time beside forward and backward, as far as the side can tell."""
    lines = []
    for name, side in measured.items():
        names = sorted({key for details in side.details_ms for key in details})
        parts = [f"{key} {show([details.get(key, 0.0) for details in side.details_ms], 1)}" for key in names]
        if parts:
            lines.append(f"{name}, ms a step on rank 0: {', '.join(parts)}")
    return lines


def _result(
    bench: str, settings: Settings, measured: dict[str, Measured], goals: list[Goal], failed: Sequence[str] = ()
) -> Result:
    base = next(iter(measured))
    more = ("MFU %", "peak GiB") if settings.card else ("optimizer ms", "cores a rank", "peak live MB", "ru_maxrss MB")
    columns = ("side", "tokens/s", f"{base} / side", *more)
    rows = [
        (name, show(side.tokens_per_s), show(_speed_up(measured[base], side), 3), *_more(side, settings.card))
        for name, side in measured.items()
    ]
    raw = {name: side._asdict() for name, side in measured.items()}
    notes = [*failed, *_exposed(measured), *how_multiplied(settings.work.device)]
    return Result(bench, settings.described(), raw, columns, rows, goals, notes)


def _more(side: Measured, card: str) -> tuple[str, ...]:
    """Return the cells of a row that follow the rates: other ones on GPUs."""
    if card:
        mfu = show([100 * share for share in side.mfu], 1) if side.mfu else "?"
        return mfu, f"{side.peak_live_bytes / 2**30:.1f}"
    cells = show(side.optimizer_ms, 1), show(side.busy, 2)
    return *cells, f"{side.peak_live_bytes / 1e6:.1f}", f"{side.max_rss_bytes / 1e6:.0f}"
