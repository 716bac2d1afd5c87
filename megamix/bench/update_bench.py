"""The optimizer's step alone: how near it comes to the machine's copy rate, and how far torch's passes are from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from megamix.bench import update_rank
from megamix.bench.processes import Ranks
from megamix.bench.report import Goal, Result, progress, show
from megamix.bench.spread import paired_ratio, spread
from megamix.bench.update_rank import CASTS, COMPILED, COPY, LIBRARY, STATS, UpdateRank, UpdateWork
from megamix.config import ModelConfig

GPT_20M = ModelConfig(vocab_size=1536, seq_len=256, hidden_size=512, num_layers=6, num_heads=8)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Seconds = dict[str, list[float]]  # variant -> of a call, round by round


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How much of what is measured."""

    model: ModelConfig = GPT_20M
    rounds: int = 15
    threads: tuple[int, ...] = (1, 2)
    calls: int = 5
    try_compiler: bool = True


def update(settings: UpdateSettings) -> Result:
    """Every variant in BF16 and FP16, for each number of threads in a process of its own."""
    cases = [(threads, name) for threads in settings.threads for name in _DTYPES]
    measured: dict[tuple[int, str], Seconds] = {case: {} for case in cases}
    with ExitStack() as stack:
        ranks = {}
        for threads, name in cases:
            progress(f"update: building {name} with {threads} thread(s)")
            work = UpdateWork(
                model=settings.model, dtype=_DTYPES[name], calls=settings.calls, try_compiler=settings.try_compiler
            )
            ranks[threads, name] = stack.enter_context(Ranks(f"update {name}", UpdateRank, work, threads=threads))
            ranks[threads, name].call("seconds", 0)  # first calls compile and allocate
        (num_params,) = ranks[cases[0]].call("num_params")
        for number in range(settings.rounds):
            progress(f"update: round {number + 1} of {settings.rounds}")
            for case in cases:
                (seconds,) = ranks[case].call("seconds", number)
                for variant, value in seconds.items():
                    measured[case].setdefault(variant, []).append(value)
    columns = ("variant", "ns/param", "GB/s", "copy time / time")
    rows = [row for case in cases for row in _rows(case, measured[case], num_params)]
    goals = [goal for case in cases for goal in _goals(case, measured[case])]
    raw = {f"{name}, {threads} thread(s)": measured[threads, name] for threads, name in cases}
    notes = [
        f"GB/s of an update count {update_rank.BYTES_PER_PARAM} bytes a parameter, of statistics 2, "
        "of the copy what it reads and writes"
    ]
    return Result("update", _settings(settings, num_params), raw, columns, rows, goals, notes)


def _rows(case: tuple[int, str], seconds: Seconds, num_params: int) -> Iterator[tuple[str, ...]]:
    threads, name = case
    for variant, values in seconds.items():
        bytes_moved = num_params * (2 if variant in (STATS, update_rank.LIBRARY_STATS) else update_rank.BYTES_PER_PARAM)
        yield (
            f"{name}, {threads} thread(s): {variant}",
            show(spread([1e9 * value / num_params for value in values]), 3),
            show(spread([1e-9 * bytes_moved / value for value in values]), 1),
            show(paired_ratio(seconds[COPY], values), 3),
        )


def _goals(case: tuple[int, str], seconds: Seconds) -> Iterator[Goal]:
    threads, name = case
    where = f"({name}, {threads} thread(s))"

    def goal(text: str, numerator: str, denominator: str, bound: float, at_least: bool = True) -> Goal:
        ratio = paired_ratio(seconds[numerator], seconds[denominator])
        return Goal(f"{text} {where}", ratio.median, bound, at_least, ratio)

    # The copy moves as many bytes as the update, so a ratio of times is a ratio of rates.
    if COMPILED in seconds:
        yield goal("compiled update's rate over the copy's", COPY, COMPILED, 0.9)
        yield goal("compiled update's speed over cast + AdamW(fused) + cast", CASTS, COMPILED, 1.2)
        yield goal("compiled statistics' time over the compiled update's", STATS, COMPILED, 0.3, at_least=False)
    yield goal("update's rate without a compiler over the copy's", COPY, LIBRARY, 0.8)


def _settings(settings: UpdateSettings, num_params: int) -> dict[str, object]:
    return {
        "rounds": settings.rounds,
        "calls": settings.calls,
        "threads": settings.threads,
        "parameters": num_params,
        "model": settings.model.model_dump(),
    }
