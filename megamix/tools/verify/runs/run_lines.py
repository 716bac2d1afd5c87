"""`verify --runs` and `verify --twice`: jobs on ranks that are started for them, and what differs between them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from megamix.base.console import Failed, say
from megamix.config import Config
from megamix.launch.run_folder import METRICS
from megamix.log.metrics import TAGS
from megamix.tools.ranks import RankFailure, RankPool
from megamix.tools.verify.core.layout import Layout
from megamix.tools.verify.core.observed_step import assemble
from megamix.tools.verify.core.own_size import size_told
from megamix.tools.verify.core.table import DEADLINE_S, row
from megamix.tools.verify.runs.watched_run import BORDER, STEPS, Seen, digest, run_config, watch_job, write_data

_TIMELESS = ("step", "train/", "valid/", "optim/")  # tags of the log that depend on no clock
# Tags that no layout changes; others depend on the order of sums.
_SETTLED_TAGS = ("step", "train/tokens", "optim/lr", "optim/skipped_steps", "optim/loss_scale")

Ranks = tuple[Seen, ...]
Facts = dict[str, Any]


class WatchedRun(NamedTuple):
    """A job as its ranks saw it."""

    starts: list[list[Ranks]]  # by start: its ranks before the first attempt, and after each attempt
    rows: list[dict[str, Any]]  # of the log

    @property
    def attempts(self) -> list[Ranks]:
        return [ranks for start in self.starts for ranks in start[1:]]


def runs_lines(config: Config, layouts: Sequence[Layout], where: str | None) -> Iterator[str]:
    """Yield the lines on a job that never stops, on the first layout, and on the same job that is interrupted there and
    goes on on each of the layouts. `where`: as for `RankPool`.
    """
    yield size_told(config)
    yield row(f"{'run':<26}", "on", "attempts", "skipped", "")
    where = RankPool(max(layout.world_size for layout in layouts), where).where
    say(f"megamix verify: {STEPS} updates without a stop, then with a resume after {BORDER}", sys.stderr)
    try:
        whole = watched(config, layouts, layouts[:1], where)
        for layout in layouts:
            run = watched(config, layouts, [layouts[0], layout], where)
            problems = run_problems(whole, run, one_layout=layout == layouts[0])
            yield from _row(f"{layouts[0].name} to {layout.name}", where, run, problems)
        if config.checkpoint.mirror:
            run = watched(config, layouts, [layouts[0]] * 2, where, dies=True)
            problems = run_problems(whole, run, one_layout=True)
            yield from _row(f"{layouts[0].name}, from memory", where, run, problems)
    except RankFailure as failure:
        yield Failed(f"a run fails\n{failure}")


def _row(name: str, where: str, run: WatchedRun, problems: list[str]) -> Iterator[str]:
    attempts = len(run.attempts)
    yield row(f"{name:<26}", where, str(attempts), str(attempts - STEPS), "differs" if problems else "passes")
    yield from (Failed(f"  {problem}") for problem in problems)


def twice_lines(config: Config, layouts: Sequence[Layout], where: str | None) -> Iterator[str]:
    """Yield the lines on one job in two new programs, layout by layout. `where`: as for `RankPool`."""
    yield size_told(config)
    for layout in layouts:
        say(f"megamix verify: {layout.name} on {layout.world_size} rank(s), in two programs", sys.stderr)
        try:
            problems = twice_problems(config, layout, where)
        except RankFailure as failure:
            problems = [f"fails\n{failure}"]
        on = RankPool(layout.world_size, where).where
        yield row(layout.name, on, "differs" if problems else "the same, bit for bit")
        yield from (Failed(f"  {problem}") for problem in problems)


def watched(
    config: Config,
    layouts: Sequence[Layout],
    on: Sequence[Layout],
    where: str | None,
    dies: bool = False,
    **settings: Any,
) -> WatchedRun:
    """Train a job that starts on the first one of `on` and goes on on the next one. `dies`: it does not leave the first
    one, but dies there, and has saved nothing. `settings`: of the ranks.
    """
    with TemporaryDirectory(prefix="megamix-verify-") as folder:
        jobs = [run_config(config, layouts, layout, Path(folder)) for layout in on]
        if dies:
            jobs = [job.with_keys(checkpoint={"save_interval": 0}) for job in jobs]
        write_data(jobs[0], Path(folder))
        starts = []
        for number, (job, layout) in enumerate(zip(jobs, on, strict=True), 1):
            with RankPool(layout.world_size, where, deadline_s=DEADLINE_S, **settings) as ranks:
                seen = ranks.call(watch_job, job, BORDER if number < len(on) else None, dies)
                starts.append([*zip(*seen, strict=True)])
        log = (Path(jobs[0].checkpoint.folder) / METRICS).read_text(encoding="utf-8")
    rows = map(json.loads, log.splitlines())
    return WatchedRun(starts, [row for row in rows if TAGS["resumed"] not in row])


def run_problems(whole: WatchedRun, resumed: WatchedRun, *, one_layout: bool) -> list[str]:
    """Return the first difference of a job that was resumed: in its state after the resume, its attempts or its log.

    `whole`: the job that never stopped. On `one_layout` everything has the same bits; on another one the state, the
    samples, and the numbers that no layout changes.
    """
    before, after = _state(resumed.starts[0][-1]), _state(resumed.starts[1][0])
    before = {name: before.get(name) for name in after}  # without gradients
    pairs = [("after the resume", before, after), *_attempts(whole, resumed, one_layout)]
    tags = _TIMELESS if one_layout else _SETTLED_TAGS
    for rows in zip_longest(whole.rows, resumed.rows, fillvalue=dict[str, Any]()):
        want, got = ({tag: value for tag, value in row.items() if tag.startswith(tags)} for row in rows)
        pairs.append((f"in {METRICS}, step {(want or got)['step']}", want, got))
    return first_difference(pairs)


def twice_problems(config: Config, layout: Layout, where: str | None) -> list[str]:
    """Train one job in two new programs. Return the first difference, and torch's indeterministic operations; nothing
    if they are equal.
    """
    one, other = (watched(config, [layout], [layout], where, environment={}) for _ in range(2))
    if not (problems := first_difference(_attempts(one, other, True))):
        return []
    with TemporaryDirectory(prefix="megamix-verify-") as folder, RankPool(layout.world_size, where) as ranks:
        job = run_config(config, [layout], layout, Path(folder)).with_keys(training={"deterministic": False})
        write_data(job, Path(folder))
        found = set[str]().union(*ranks.call(undetermined, job, deadline_s=DEADLINE_S))
    known = ", ".join(sorted(found)) or "none of the operations"
    return [*problems, f"not deterministic, by what torch knows: {known}"]


def first_difference(pairs: Iterable[tuple[str, Facts, Facts]]) -> list[str]:
    """Return the first difference in words; nothing if there is none. `pairs`: when, what must be, and what is."""
    for when, want, got in pairs:
        if names := [name for name in {**want, **got} if want.get(name) != got.get(name)]:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            return [f"{when}: {names[0]} is {got.get(names[0])}, not {want.get(names[0])}{more}"]
    return []


def _attempts(one: WatchedRun, other: WatchedRun, one_layout: bool) -> Iterator[tuple[str, Facts, Facts]]:
    starts = one.starts[0][:1] + one.attempts, other.starts[0][:1] + other.attempts
    for want, got in zip_longest(*starts, fillvalue=()):
        yield f"after {(want or got)[0].when}", _facts(want, one_layout), _facts(got, one_layout)


def _facts(ranks: Ranks, one_layout: bool) -> Facts:
    """Return what must be equal after an attempt. Samples go by their places in the global batch."""
    readers = {seen.dp_rank: seen.samples for seen in ranks}
    samples = chain(*(readers[rank] for rank in sorted(readers)))
    facts = {f"sample {place} of its batch": sample for place, sample in enumerate(samples)}
    for rank, seen in enumerate(ranks if one_layout else ranks[:1]):
        told = seen.settled | (seen.facts if one_layout else {})  # causes are told first
        facts |= {f"{name} of rank {rank}": fact for name, fact in told.items()}
    return facts


def _state(ranks: Ranks) -> Facts:
    """Return counters, masters, moments, half copies and tallies by name, whichever ranks hold which part."""
    observed = [seen.observed for seen in ranks if seen.observed]
    whole = assemble([[*one.owned, *one.copies] for one in observed]).tensors
    tensors = {f"{state} of {name}": tensor for (state, name), tensor in whole.items()}
    tensors |= {name: one.buffers[name] for one in observed for name in one.buffers if name.endswith(".value")}
    return ranks[0].settled | {name: digest(tensor.double()) for name, tensor in tensors.items()}


def undetermined(config: Config) -> set[str]:
    """Return the operations of a job that torch says may differ from call to call. Every rank must call it,
    and compute nothing else behind it.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch_job(config)
    told = [str(warning.message).partition(" does not have a deterministic") for warning in caught]
    return {name for name, known, _ in told if known}
