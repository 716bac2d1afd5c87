"""Optimizer's step alone: its rate beside the machine's copy rate and beside torch's passes.

Each process holds ours and torch's on the same flat tensors, and a plain copy. Without a compiler, all work after
backward is compared with code written by hand, each on a model in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megamix.config import ModelConfig
from megamix.mixed_precision.census import take_census
from megamix.mixed_precision.fused_update import choose_kernels
from megamix.mixed_precision.grad_stats import stats_by_piece
from megamix.mixed_precision.optim.adamw import AdamW
from megamix.mixed_precision.row_stats import RowStats
from megamix.mixed_precision.settings import Sharding
from megamix.mixed_precision.update_slice import Kernel, StepScalars
from megamix.model.family import parameter_count
from megamix.tools.bench.ranks import Settings, Side, rotated, seconds_of, start_ranks, take_turns
from megamix.tools.bench.report import Goal, Result, paired_ratio, progress, rounds_told, show
from megamix.tools.bench.sides import ByHand, Ours, Work, make_engine, make_model

GPT_20M = ModelConfig(vocab_size=1536, seq_len=256, hidden_size=512, num_layers=6, num_heads=8)
ADAMW = AdamW(lr=1e-4)
# The models have 3.7 M and 63 M parameters, and so few tokens that most of a step is the work after backward.
SIZES = {
    "4 M": ModelConfig(vocab_size=2048, seq_len=16, hidden_size=256, num_layers=4, num_heads=4),
    "64 M": ModelConfig(vocab_size=8192, seq_len=16, hidden_size=768, num_layers=8, num_heads=12),
}
KINDS = {
    "bf16": (torch.bfloat16, ADAMW),
    "fp16": (torch.float16, ADAMW),
    "bf16, moments too": (torch.bfloat16, replace(ADAMW, state_dtype=torch.bfloat16)),
}

COMPILED, LIBRARY, CASTS = "update, compiled", "update, no compiler", "cast + AdamW(fused) + cast"
AFTER, BY_HAND = "all after backward, no compiler", "all after backward, by hand"
STATS, LIBRARY_STATS, COPY = "statistics, compiled", "statistics, no compiler", "copy"

STATS_BYTES = 2  # bytes of a parameter's half gradient


def update_bytes(optimizer: AdamW) -> int:
    """Return the bytes per parameter that an update moves.

    It reads a half gradient, writes a half parameter, and reads and writes the master and the states.
    """
    states = optimizer.states("", ()).values()
    return 2 + 2 + 2 * (4 + sum(dtype.itemsize for dtype in states))


class UpdateRank:
    """Tensors of a step and every variant that works on them.

    The update is of the parameters of the work's model in the engine's default buckets, on one rank. `calls`: timed
    calls of each variant in a round.
    """

    def __init__(self, work: Work, optimizer: AdamW = ADAMW, calls: int = 5):
        uncompiled, sharding = replace(work, compile_update=False), Sharding()
        engine = make_engine(uncompiled, make_model(work), sharding, optimizer=partial(replace, optimizer))
        self._calls, self._optimizer = calls, optimizer
        self._groups = take_census(engine.module, optimizer, engine.topology, sharding).groups
        self._buckets, self.layout = engine.buckets, engine.plan.layout
        torch.manual_seed(0)
        for bucket in self._buckets:
            bucket.grads.normal_(0, 1e-2)  # far from the subnormal numbers, which take a CPU many times as long
        count = torch.tensor(10.0)
        self._scalars = StepScalars(torch.tensor(0.5), torch.tensor(False), torch.tensor(1e-4), count)

        choose = partial(choose_kernels, optimizer, self._groups, self._buckets, engine.world)
        self.variants = dict[str, Callable[[], object]]()
        for kernels in (choose(work.compile_update), choose(False)):
            update, stats = (COMPILED, STATS) if kernels.path == "compiled" else (LIBRARY, LIBRARY_STATS)
            self.variants[update] = partial(self._update, kernels.update)
            self.variants[stats] = partial(self._stats, kernels.row_stats)
        self.variants[CASTS] = self._make_casts()
        # The copy is in FP32 and reads and writes as many bytes as the update.
        source = torch.ones(update_bytes(optimizer) * self.num_params() // 8)
        target = torch.zeros_like(source)
        self.variants[COPY] = lambda: target.copy_(source)

    def seconds(self, first: int) -> dict[str, float]:
        """Return the seconds of one call of every variant, the mean of `calls`. They run in turn from the `first`th."""
        return {name: seconds_of(self.variants[name], self._calls) for name in rotated([*self.variants], first)}

    def num_params(self) -> int:
        return self.layout.padded_numel

    def _update(self, kernel: Kernel) -> None:
        """Update as engine.step() does: bucket by bucket, span by span."""
        for bucket in self._buckets:
            for span in bucket.spans:
                kernel(bucket.part(span), self._scalars)

    def _stats(self, row_stats: RowStats) -> None:
        rows = [bucket.row_stats(row_stats) for bucket in self._buckets]
        stats_by_piece(self._buckets, rows, True, {})

    def _make_casts(self) -> Callable[[], None]:
        """Return a function that casts gradients to FP32, runs torch's fused AdamW and casts masters to half.

        It neither unscales nor clips.
        """
        grads32 = [bucket.grads.float() for bucket in self._buckets]
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": group.weight_decay[0]} for group in self._groups]
        for bucket, grad32 in zip(self._buckets, grads32, strict=True):
            for span in bucket.spans:
                param = bucket.master[span.start : span.end]
                param.grad = grad32[span.start : span.end]
                groups[span.group]["params"].append(param)
        ours, ((beta1,), (beta2,)) = self._optimizer, self._groups[0].betas
        optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(beta1, beta2), eps=ours.eps, fused=True)

        def casts() -> None:
            for bucket, grad32 in zip(self._buckets, grads32, strict=True):
                grad32.copy_(bucket.grads)
            optimizer.step()
            for bucket in self._buckets:
                bucket.params.copy_(bucket.master)

        return casts


Seconds = dict[str, list[float]]  # variant -> seconds of a call, round by round


def after_backward(rounds: int, sizes: Mapping[str, ModelConfig], calls: int) -> dict[str, Seconds]:
    """Return the seconds of both ways in BF16 on one thread, by the size of the model."""
    measured = dict[str, Seconds]()
    for size, model in sizes.items():
        progress(f"update: all after backward, {size} parameters")
        work = Work(model=model, micro_batch_size=1, compile_update=False)
        sides = [Side(AFTER, Ours, steps=calls), Side(BY_HAND, ByHand, steps=calls)]
        turns = take_turns(sides, Settings(work=work, rounds=rounds, ranks=1))
        measured[size] = {way: [turn.optimizer_cpu_s for (turn,) in of_way] for way, of_way in turns.items()}
    return measured


def update(
    settings: Settings, threads: tuple[int, ...] = (1, 2), calls: int = 5, sizes: Mapping[str, ModelConfig] = SIZES
) -> Result:
    """Measure every variant in BF16, in FP16, and with moments in BF16 as well.

    Each number of threads has a process of its own; on a GPU there are one process and one half dtype. `calls`: timed
    calls of each variant in a round. `sizes`: models on which all work after backward is timed, on CPUs.
    """
    work = settings.work
    if settings.card:
        kinds, threads, sizes = ["fp16" if work.half == torch.float16 else "bf16"], (1,), {}
    else:
        kinds = [*KINDS]
    after = after_backward(settings.rounds, sizes, calls)
    cases = [(number, name) for number in threads for name in kinds]
    measured: dict[tuple[int, str], Seconds] = {case: {} for case in cases}
    with ExitStack() as stack:
        ranks = {}
        for case in cases:
            progress(f"update: building {case[1]} with {case[0]} thread(s)")
            dtype, optimizer = KINDS[case[1]]
            actor = partial(UpdateRank, replace(work, dtype=dtype), optimizer, calls)
            pool = start_ranks(f"update {case[1]}", actor, threads=case[0], device=work.device)
            ranks[case] = stack.enter_context(pool)
            ranks[case].call(UpdateRank.seconds, 0)  # first calls compile and allocate
        (num_params,) = ranks[cases[0]].call(UpdateRank.num_params)
        for number in rounds_told(settings.rounds):
            for case in cases:
                (seconds,) = ranks[case].call(UpdateRank.seconds, number)
                for variant, value in seconds.items():
                    measured[case].setdefault(variant, []).append(value)
                settings.tell(side=case[1], threads=case[0], round=number + 1, seconds=seconds)
    columns = ("variant", "ns/param", "GB/s", "copy time / time")
    rows = [row for case in cases for row in _rows(case, measured[case], num_params)]
    goals = [goal for case in cases for goal in _goals(case, measured[case])]
    raw = {f"{name}, {number} thread(s)": measured[number, name] for number, name in cases}
    for size, both in after.items():
        for way, values in both.items():
            of_one = [1e9 * value / parameter_count(sizes[size]) for value in values]
            rows.append((f"{size}: {way}", show(of_one, 3), "", ""))
        text = f"{AFTER}: processor time over by hand's ({size})"
        goals.append(Goal(text, paired_ratio(both[AFTER], both[BY_HAND]), 1.1, at_least=False))
        raw[size] = both
    counted = ", ".join(f"{update_bytes(optimizer)} ({name})" for name, (_, optimizer) in KINDS.items())
    notes = [
        f"bytes a parameter in GB/s: an update has {counted}, statistics {STATS_BYTES}; "
        "the copy has those that it reads and writes"
    ]
    described = {
        "rounds": settings.rounds, "calls": calls, "threads": threads, "parameters": num_params,
        "model": work.model.model_dump(),
    }  # fmt: skip
    return Result("update", described, raw, columns, rows, goals, notes)


def _rows(case: tuple[int, str], seconds: Seconds, num_params: int) -> Iterator[tuple[str, ...]]:
    threads, name = case
    for variant, values in seconds.items():
        moved = STATS_BYTES if variant in (STATS, LIBRARY_STATS) else update_bytes(KINDS[name][1])
        yield (
            f"{name}, {threads} thread(s): {variant}",
            show([1e9 * value / num_params for value in values], 3),
            show([1e-9 * num_params * moved / value for value in values], 1),
            show(paired_ratio(seconds[COPY], values), 3),
        )


def _goals(case: tuple[int, str], seconds: Seconds) -> Iterator[Goal]:
    threads, name = case
    where = f"({name}, {threads} thread(s))"

    def goal(text: str, numerator: str, denominator: str, bound: float, at_least: bool = True) -> Goal:
        ratio = paired_ratio(seconds[numerator], seconds[denominator])
        return Goal(f"{text} {where}", ratio, bound, at_least)

    # The copy moves as many bytes as the update, so a ratio of times is a ratio of rates.
    if COMPILED in seconds:
        yield goal("compiled update's rate over the copy's", COPY, COMPILED, 0.9)
        yield goal("compiled update's speed over cast + AdamW(fused) + cast", CASTS, COMPILED, 1.2)
        yield goal("compiled statistics' time over the compiled update's", STATS, COMPILED, 0.3, at_least=False)
    yield goal("update's rate without a compiler over the copy's", COPY, LIBRARY, 0.8)
