"""Changes that make a job fit, each with the peak that it leads to."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megamix.config import Config, ContextConfig, FirstLayers, axis_sizes, check_world_size, ranks_along, resized
from megamix.config.checks import check_config
from megamix.config.toml_text import value_text
from megamix.model.sizes import num_repeated
from megamix.tools.plan.layouts import SHARDS
from megamix.tools.plan.limits import MOST_RANKS
from megamix.tools.plan.memory_plan import MemoryPlan, plan_memory

MOST_TP = 8  # ranks; more would cross machines of 8 GPUs in every layer
SAVES = 0.1  # share of the peak that a change saves at least, if the job does not fit with it
Keys = Mapping[str, Any]


class Advice(NamedTuple):
    """Change in the words of the configuration, and the peak that follows."""

    change: str
    peak: int  # bytes


def by_shard(config: Config, plan: MemoryPlan) -> Iterator[tuple[str, int | str]]:
    """Yield the peak with each `parallelism.shard`, in bytes, or why the job cannot have it."""
    for shard in SHARDS:
        changed = config.with_keys(parallelism={"dp_size": plan.axes["dp"], "shard": shard})
        problems = check_config(changed)
        yield shard, problems[0] if problems else _peak(plan, changed)


def advise(config: Config, plan: MemoryPlan, memory: int) -> list[Advice]:
    """Return changes, the cheapest first and each on top of those before it, until the job fits.

    Of each kind it is the smallest change that fits, or the largest.
    """
    job, peak, found = config.with_keys(parallelism={"dp_size": plan.axes["dp"]}), plan.peak, list[Advice]()
    for section, choices in _kinds(job):
        changes = [(changed, keys) for keys in choices if (changed := _changed(job, section, keys))]
        place = bisect_left(changes, True, key=lambda change: _peak(plan, change[0]) <= memory)
        if not changes:
            continue
        changed, keys = changes[min(place, len(changes) - 1)]
        least = _peak(plan, changed)
        if least <= memory or least < (1 - SAVES) * peak:
            words, dp_size = _words(job, section, keys), changed.parallelism.dp_size
            if config.parallelism.dp_size and dp_size != job.parallelism.dp_size and "dp_size" not in keys:
                words += f", parallelism.dp_size = {dp_size}"  # which the file sets
            found.append(Advice(words, least))
            job, peak = changed, least
        if peak <= memory:
            break
    return found


def _kinds(job: Config) -> list[tuple[str, Sequence[Keys]]]:
    """Return a section and its keys for each change of each kind, the smallest change of a kind first."""
    ranks, model, micro_batch = job.parallelism, job.model, job.training.micro_batch_size
    first = [FirstLayers(full=count) for count in range(num_repeated(model) + 1, model.num_layers)]
    halves = [micro_batch // 2**power for power in range(1, micro_batch.bit_length())]
    tp, pp, cp, ep = (_doubled(ranks_along(ranks, axis)) for axis in ("tp", "pp", "cp", "ep"))
    shared = {"shard": SHARDS[-1], "accumulate": "owner"}
    return [
        ("parallelism", [{"shard": shard} for shard in SHARDS[SHARDS.index(ranks.shard) + 1 :]]),
        ("parallelism", [{"accumulate": "owner"}]),
        ("model", [{"recompute": "selective"}] if model.recompute == "none" else []),
        ("model", [{"recompute": layers} for layers in (*first, "full")]),
        ("training", [{"micro_batch_size": size} for size in halves]),
        ("parallelism", [{"context": ranks.context.model_copy(update={"method": "heads"})}] if ranks.context else []),
        ("parallelism", [resized(ranks, ep=size) for size in ep]),
        ("parallelism", [resized(ranks, tp=size) for size in tp if size <= MOST_TP]),
        ("parallelism", [resized(ranks, cp=size) for size in cp]),
        ("parallelism", [resized(ranks, pp=size) for size in pp]),
        ("parallelism", [{**shared, "dp_size": size} for size in _doubled(ranks.dp_size or 1)]),
    ]


def _changed(job: Config, section: str, keys: Keys) -> Config | None:
    """Return the job with these keys, on as many ranks if `dp_size` is not one of them; None if it could not start."""
    changed = job.with_keys(**{section: keys})
    others = math.prod(axis_sizes(changed.parallelism).values())
    ranks = others * (changed.parallelism.dp_size or 1)
    if "dp_size" not in keys:
        ranks = math.prod(axis_sizes(job.parallelism).values()) * (job.parallelism.dp_size or 1)
        changed = changed.with_keys(parallelism={"dp_size": max(1, ranks // others)})
    starts = ranks <= MOST_RANKS and not check_config(changed) and not check_world_size(changed, ranks)
    return changed if starts else None


def _words(job: Config, section: str, keys: Keys) -> str:
    before = getattr(job, section)
    changed = {key: it for key, it in keys.items() if it != getattr(before, key)}
    return ", ".join(f"{section}.{key}{_text(it)}" for key, it in changed.items())


def _text(value: object) -> str:
    """Return the end of a setting; of a table of ranks its number alone, and of one with another key that key."""
    if isinstance(value, ContextConfig) and value.method == "heads":
        return '.method = "heads"'
    if isinstance(value, FirstLayers):
        return f" = {value_text(dict(value))}"
    size = getattr(value, "size", None)
    return f" = {value_text(value)}" if size is None else f".size = {size}"


def _peak(plan: MemoryPlan, job: Config) -> int:
    return plan_memory(job, job.parallelism.dp_size or 1, plan.machine).peak


def _doubled(size: int) -> list[int]:
    return [size * 2**doublings for doublings in range(1, MOST_RANKS.bit_length())]
