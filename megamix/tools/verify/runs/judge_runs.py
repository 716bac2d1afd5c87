"""Judge of runs: a job that is interrupted twice, with other ranks at each resume, against one that never stopped.

The same job in two programs is judged here, too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megamix.builders.data import training_source
from megamix.builders.objects import DTYPES, build_loader, lr_table
from megamix.config import Config, reading_ranks
from megamix.data.loader import Batch
from megamix.data.sampler import micro_batches
from megamix.report.metrics import TAGS
from megamix.run.run_folder import METRICS
from megamix.tools.verify.core.judge_routing import tallies
from megamix.tools.verify.core.judge_steps import judge_attempts
from megamix.tools.verify.core.layout import Layout, without_dropout
from megamix.tools.verify.core.observed_step import assemble, elements
from megamix.tools.verify.core.reference import Reference
from megamix.tools.verify.core.verdict import equal_bits
from megamix.tools.verify.runs.data_order import DataOrder, Read, write_data
from megamix.tools.verify.runs.watched_run import BORDERS, JobPart, Seen, run_config, watch_job

Call = Callable[..., list[Any]]  # (function, part) -> the function's result on each rank
PARTS = len(BORDERS) + 1
WHEN = ("", "after the first resume", "after the second resume")
_LOGGED = ("train/", "valid/", "optim/")  # tags of metrics.jsonl that depend on no clock
_LAYOUT_FREE = ("step", "train/tokens", "optim/lr", "optim/skipped_steps", "optim/loss_scale")


@dataclass(frozen=True)
class WatchedRun:
    """Attempts of a job as its ranks saw them, part by part."""

    name: str
    configs: Sequence[Config]  # configuration of each part
    parts: Sequence[list[tuple[Seen, ...]]]  # the ranks at a part's start, then in each attempt

    @property
    def attempts(self) -> list[tuple[Seen, ...]]:
        return [ranks for part in self.parts for ranks in part[1:]]

    @property
    def skipped(self) -> int:
        return sum(ranks[0].found_inf for ranks in self.attempts)

    def reads(self, order: DataOrder) -> list[Read]:
        parts = zip(WHEN, self.parts, strict=False)
        return [order.read(self.name, when, ranks) for when, part in parts for ranks in part[1:]]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics that depend on no clock, nor on where the run went on."""
        text = (Path(self.configs[0].checkpoint.folder) / METRICS).read_text(encoding="utf-8")
        rows = (row for row in map(json.loads, text.splitlines()) if TAGS["resumed"] not in row)
        return [{tag: row[tag] for tag in row if tag == "step" or tag.startswith(_LOGGED)} for row in rows]


def run_results(
    config: Config, layouts: Sequence[Layout], folder: Path, ranks: Mapping[int, Call], device: torch.device
) -> Iterator[tuple[WatchedRun, list[str], float]]:
    """Train a job that never stops, and two that are interrupted: on the first layout, and on the layouts in turn.

    Yields each run, its problems, and the largest share of a bound in its steps. `ranks`: calls on so many ranks,
    by their number. `device`: the ranks' device.
    """

    def watched(kind: str, on: Sequence[Layout], job: Config, *, judged: bool = False) -> WatchedRun:
        configs = [run_config(job, layouts, layout, folder, f"{kind}{judged}") for layout in on]
        ends = [*BORDERS, None][-len(on) :]
        jobs = [JobPart(one, end, judged) for one, end in zip(configs, ends, strict=True)]
        parts = [watched_part(ranks[layout.world_size], job) for layout, job in zip(on, jobs, strict=True)]
        return WatchedRun(f"{kind} on {', '.join(dict.fromkeys(one.name for one in on))}", configs, parts)

    order = write_data(run_config(config, layouts, layouts[0], folder, ""), folder)
    straight = watched("never stopped", layouts[:1], config)
    planned = [read.planned for read in straight.reads(order)]
    yield straight, [*problems_alone(straight, order, planned)], 0.0
    same = watched("resumed twice", [layouts[0]] * PARTS, config)
    problems = [*problems_alone(same, order, planned), *first_difference(straight, same)]
    yield same, [*problems, *log_problems(straight, same, None)], 0.0
    in_turn = [layouts[number % len(layouts)] for number in range(PARTS)]
    changed = watched("resumed twice", in_turn, without_dropout(config), judged=True)
    problems = [*problems_alone(changed, order, planned), *log_problems(straight, changed, _LAYOUT_FREE)]
    steps, share = _judged(changed, device) if not problems else ([], 0.0)  # otherwise the cause is known
    yield changed, [*problems, *steps], share


def watched_part(call: Call, part: JobPart) -> list[tuple[Seen, ...]]:
    """Train a part of a job, and return what the ranks saw at its start and in each attempt, in rank order."""
    return [*zip(*call(watch_job, part), strict=True)]


def problems_alone(run: WatchedRun, order: DataOrder, planned: Sequence[NDArray[np.int64]]) -> Iterator[str]:
    """Yield the mistakes in a run's data, resumes, learning rates and logged losses.

    `planned`: samples that each attempt of the run that never stopped has tried.
    """
    config = run.configs[0]
    yield from order.problems(run.reads(order), planned, lost=config.precision.on_overflow == "skip")
    for when, (earlier, later) in zip(WHEN[1:], pairwise(run.parts), strict=False):
        yield from _border_problems(run, when, earlier[-1], later[0])
    yield from _lr_problems(run)
    losses = [ranks[0].numbers["loss"] for ranks in run.attempts if not ranks[0].found_inf]
    logged = [row["train/loss"] for row in run.rows if "train/loss" in row]
    if losses != logged:
        yield f"{run.name}: {METRICS} has the losses {logged}, the steps' were {losses}"


def _border_problems(run: WatchedRun, when: str, last: Sequence[Seen], first: Sequence[Seen]) -> Iterator[str]:
    """Yield each difference, bit for bit, between a part's start and the end of the part before it.

    `last`, `first`: the ranks at that end and at that start.
    """
    fresh = run.parts[0][0][0].numbers
    for name, value in first[0].numbers.items():
        if (want := last[0].numbers[name]) != value:
            kind = "; it looks like a run's first one" if value == fresh[name] else ""
            yield f"{run.name}: {name} is {value} {when}, it was {want}{kind}"
    saved = assemble([seen.observed.owned for seen in last if seen.observed])
    dtype = DTYPES[run.configs[0].precision.dtype]
    for rank, seen in enumerate(first):
        for part in seen.observed.owned if seen.observed else ():
            whole = saved.tensors[part.state, part.spec.name]
            got, want = torch.from_numpy(part.values), whole.view(-1)[elements(part)]
            if not equal_bits(got, want):
                off = float((got - want).abs().max())
                kind = _kind_of_state(got, want, dtype, last, part.state)
                text = f"{part.state} of {part.spec.name} on rank {rank} is off by {off:.3g} {when}"
                yield f"{run.name}: {text}" + (f"; it looks like {kind}" if kind else "")
    yield from _tally_problems(run, when, last, first)


def _tally_problems(run: WatchedRun, when: str, last: Sequence[Seen], first: Sequence[Seen]) -> Iterator[str]:
    """Yield each tally whose value at a part's start is not that at the end of the part before it."""
    before = {
        f"{name}.value": seen.observed.buffers[f"{name}.value"]
        for seen in last if seen.observed
        for name in seen.observed.tallied
    }  # fmt: skip
    for rank, seen in enumerate(first):
        for name, got in seen.observed.buffers.items() if seen.observed else ():
            if name in before and not equal_bits(got, before[name]):
                off = float((got - before[name]).abs().max())
                kind = "" if got.any() else "; it looks like it was not loaded, and is zero"
                yield f"{run.name}: {name} on rank {rank} is off by {off:.3g} {when}{kind}"


def _kind_of_state(got: Tensor, want: Tensor, dtype: torch.dtype, last: Sequence[Seen], state: str) -> str:
    """Return which mistake leaves just that state; "" for no known one."""
    if not got.any():
        return "it was not loaded, and is zero"
    for half in dict.fromkeys((dtype, torch.float16, torch.bfloat16)):
        if half != torch.float32 and equal_bits(got, want.to(half).float()):
            return f"its copy in {str(half).removeprefix('torch.')}"
    for rank, seen in enumerate(last):
        held = [part.values for part in seen.observed.owned if part.state == state] if seen.observed else []
        if held and np.isin(got.numpy(), np.concatenate(held)).all():
            return f"a part of what rank {rank} has saved"
    return ""


def _lr_problems(run: WatchedRun) -> Iterator[str]:
    table = torch.tensor(lr_table(run.configs[0]), dtype=torch.float32).tolist()
    for seen, *_ in run.attempts:
        want, got = table[seen.update - 1], seen.numbers["lr"]
        if got != want:
            kind = f"; it looks like update {table.index(got) + 1}'s" if got in table else ""
            yield f"{run.name}: update {seen.update} has lr {got:.6g}, the schedule's is {want:.6g}{kind}"
            return


def log_problems(straight: WatchedRun, run: WatchedRun, tags: Sequence[str] | None) -> Iterator[str]:
    """Yield the first row that differs from the one of the run that never stopped. `tags`: None for all."""
    for row, want in zip(run.rows, straight.rows, strict=False):
        for tag in {**want, **row}:
            missing = (tag in row) != (tag in want)
            if missing or ((tags is None or tag in tags) and row[tag] != want[tag]):
                step = f"{METRICS}, step {want['step']}"
                yield f"{run.name}: {step}: {tag} is {row.get(tag)}, of the run that never stopped {want.get(tag)}"
                return
    if len(run.rows) != len(straight.rows):
        yield f"{run.name}: {METRICS} has {len(run.rows)} rows, of the run that never stopped {len(straight.rows)}"


def first_difference(one: WatchedRun, other: WatchedRun) -> Iterator[str]:
    """Yield the first attempt after which two runs of one layout are not the same, bit for bit, and the difference."""
    for want, got in zip(one.parts[0][:1] + one.attempts, other.parts[0][:1] + other.attempts, strict=False):
        for rank, (right, seen) in enumerate(zip(want, got, strict=True)):
            pairs = {name: (digest, seen.digests.get(name)) for name, digest in right.digests.items()}
            pairs |= {name: (repr(value), repr(seen.numbers.get(name))) for name, value in right.numbers.items()}
            if differing := [name for name, (wanted, found) in pairs.items() if wanted != found]:
                when = f"attempt {seen.number} (update {seen.update})" if seen.planned else "the start"
                rest = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
                yield f"{other.name}: after {when}, {differing[0]} of rank {rank} differs from {one.name}{rest}"
                return
    if len(one.attempts) != len(other.attempts):
        yield f"{other.name}: {len(other.attempts)} attempts, {one.name} {len(one.attempts)}"


def _judged(run: WatchedRun, device: torch.device) -> tuple[list[str], float]:
    """Judge each step by itself, as `verify --layouts` does.

    Return the differences, and the largest share of a bound.
    """
    problems, worst = list[str](), 0.0
    reference = Reference.of_config(run.configs[0], device)
    initial = {name: param.detach() for name, param in reference.native.named_parameters()}
    initial |= {name: tally.value for name, tally in tallies(reference.native).items()}
    for config, part in zip(run.configs, run.parts, strict=True):
        attempts = [ranks[0] for ranks in part[1:]]

        def batches_of(number: int, rank: int, config: Config = config, attempts: list[Seen] = attempts) -> list[Batch]:
            cut = partial(micro_batches, micro_batch_size=config.training.micro_batch_size, dp_rank=rank)
            samples = cut(attempts[number].planned, dp_size=reading_ranks(config.parallelism))
            with build_loader(config, training_source(config), torch.device("cpu")) as loader:
                return [loader.load(part) for part in samples]

        planted = [number for number, seen in enumerate(attempts) if seen.planted]
        ranks = [[seen.observed for seen in rank if seen.observed] for rank in zip(*part, strict=True)]
        verdict = judge_attempts(config, reference, ranks, initial, planted, batches_of)
        initial = {}  # the start of a later part was judged at its border
        worst = max([worst, *verdict.worst.values()])
        first = attempts[0].number
        problems += [f"{run.name}: {replace(one, attempt=first + one.attempt)}" for one in verdict.differences]
    return problems, worst


def twice_problems(config: Config, layout: Layout, folder: Path, programs: Sequence[Call]) -> list[str]:
    """Train one job in two programs.

    Return the first difference and torch's indeterministic operations; nothing if equal.
    """
    names = ("the first program", "the second program")
    first, second, third = (run_config(config, [layout], layout, folder, name) for name in (*names, "third"))
    write_data(first, folder)
    runs = [
        WatchedRun(name, [job], [watched_part(program, JobPart(job))])
        for name, job, program in zip(names, (first, second), programs, strict=True)
    ]
    if not (problems := [*first_difference(*runs)]):
        return []
    right = third.with_keys(training={"deterministic": False})
    found = {name for rank in programs[1](undetermined, JobPart(right)) for name in rank}
    known = ", ".join(sorted(found)) or "none of the operations"
    return [*problems, f"not deterministic, by what torch knows: {known}"]


def undetermined(part: JobPart) -> list[str]:
    """Return the operations of a job that torch says may differ from call to call. Every rank must call it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch_job(part)
    finally:
        torch.use_deterministic_algorithms(False)
    told = [str(warning.message).partition(" does not have a deterministic") for warning in caught]
    return sorted({name for name, known, _ in told if known})
