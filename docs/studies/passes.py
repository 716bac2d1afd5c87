"""Time each pass of an optimizer's step, as separate torch operations and fused.

`python docs/studies/passes.py [--small]`. One FP16 model on one rank, flat tensors, one thread. All variants take
turns, and times are ratios, within a round, to an FP32 copy of one number per parameter (8 bytes: 4 read, 4 written).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import study
import torch

from megamix.config import ModelConfig
from megamix.tools.bench.report import paired_ratio, show, spread
from megamix.tools.bench.sides import Work
from megamix.tools.bench.update_bench import COMPILED, GPT_20M, LIBRARY, LIBRARY_STATS, STATS, UpdateRank

TINY = ModelConfig(vocab_size=512, seq_len=64, hidden_size=64, num_layers=2, num_heads=2)
COPY = "an FP32 copy, for comparison"
BY_HAND, AMP, FUSED, NO_COMPILER = "by hand", "torch.amp", "fused", "fused, no compiler"


class Pass(NamedTuple):
    """One pass over the data; `num_bytes` read and written per parameter, if it touches each number once."""

    way: str
    title: str
    num_bytes: int
    run: Callable[[], object]


class Timing(NamedTuple):
    way: str
    title: str
    num_bytes: int
    seconds: list[float]  # one per round


class Findings(NamedTuple):
    num_params: int
    timings: list[Timing]


def passes_by_hand(numel: int) -> list[Pass]:
    """The step as textbooks have it, over flat tensors: each line reads or writes all of them."""
    half_grad = (torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-2).half()
    half_weight = torch.zeros(numel, dtype=torch.float16)
    master = torch.zeros(numel, requires_grad=True)
    grad = master.grad = half_grad.float()
    optimizer = torch.optim.AdamW([master], fused=True)
    # Factors of one: a gradient scaled down round after round would end among the subnormals, which are slow.
    one, found_inf = torch.ones(()), torch.zeros(())
    return [
        Pass(BY_HAND, "cast the gradient in", 6, lambda: grad.copy_(half_grad)),
        Pass(BY_HAND, "overflow check", 4, lambda: torch.isfinite(grad).all()),
        Pass(BY_HAND, "unscale", 8, lambda: grad.mul_(one)),
        Pass(BY_HAND, "norm", 4, lambda: torch.linalg.vector_norm(grad)),
        Pass(BY_HAND, "clip", 8, lambda: grad.mul_(one)),
        Pass(BY_HAND, "update (torch's fused AdamW)", 28, optimizer.step),
        Pass(BY_HAND, "cast the weights out", 6, lambda: half_weight.copy_(master.detach())),
        Pass(
            AMP, "overflow check and unscale in one", 8,
            lambda: torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, one),
        ),
    ]  # fmt: skip


def passes_fused(rank: UpdateRank) -> list[Pass]:
    """The engine's two: one read of the gradient, one write of everything."""
    titles = [
        (FUSED, STATS, "overflow check and norm", 2),
        (FUSED, COMPILED, "unscale, clip, update, casts", 28),
        (NO_COMPILER, LIBRARY_STATS, "overflow check and norm", 2),
        (NO_COMPILER, LIBRARY, "unscale, clip, update, casts", 28),
    ]
    return [Pass(way, title, size, rank.variants[name]) for way, name, title, size in titles if name in rank.variants]


def measure(small: bool = False) -> Findings:
    rank = UpdateRank(Work(model=TINY if small else GPT_20M, dtype=torch.float16, compile_update=not small))
    numel = rank.num_params()
    source, target = torch.ones(numel), torch.zeros(numel)
    passes = [Pass("", COPY, 8, lambda: target.copy_(source)), *passes_by_hand(numel), *passes_fused(rank)]
    seconds: list[list[float]] = [[] for _ in passes]
    for round_number in range(3 if small else 15):
        for turn in range(len(passes)):
            index = (round_number + turn) % len(passes)
            seconds[index].append(_time(passes[index].run))
    timings = [Timing(one.way, one.title, one.num_bytes, values) for one, values in zip(passes, seconds, strict=True)]
    return Findings(numel, timings)


def _time(run: Callable[[], object]) -> float:
    run()  # not timed: brings in what the pass before has driven out of the caches
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def sums(timings: list[Timing]) -> list[Timing]:
    """Each way's whole step, round by round. With torch.amp's kernel, check and unscale are one pass."""
    by_hand = [timing for timing in timings if timing.way == BY_HAND]
    ways = {BY_HAND: by_hand}
    ways["by hand, torch.amp's check"] = [
        *(timing for timing in by_hand if timing.title not in ("overflow check", "unscale")),
        *(timing for timing in timings if timing.way == AMP),
    ]
    for way in (FUSED, NO_COMPILER):
        ways[way] = [timing for timing in timings if timing.way == way]
    return [
        Timing(way, "the whole step", sum(timing.num_bytes for timing in members), _sum_by_round(members))
        for way, members in ways.items()
        if members
    ]


def _sum_by_round(timings: list[Timing]) -> list[float]:
    return [sum(values) for values in zip(*(timing.seconds for timing in timings), strict=True)]


def text(findings: Findings) -> str:
    timings = findings.timings
    copy = timings[0]
    rows = [
        [
            f"{timing.way}: {timing.title}" if timing.way else timing.title,
            f"{timing.num_bytes}",
            f"{timing.num_bytes / copy.num_bytes:.2f}",
            show(paired_ratio(timing.seconds, copy.seconds), 2),
            show(spread([1e9 * value / findings.num_params for value in timing.seconds]), 2),
        ]
        for timing in [*timings, *sums(timings)]
    ]
    columns = ["pass", "bytes per parameter", "bytes / copy's", "time / copy's", "ns per parameter"]
    return f"{findings.num_params / 1e6:.1f} M parameters, {len(copy.seconds)} rounds.\n\n{study.table(columns, rows)}"


if __name__ == "__main__":
    study.main(__file__, measure, text)
