"""Changes for a job that does not fit, each with the peak that it leads to."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from megamix.config import Config, FirstLayers, axis_sizes, check_world_size
from megamix.config.checks import check_config
from megamix.mixed_precision.settings import Shard
from megamix.model.sizes import num_repeated
from megamix.tools.plan.limits import MOST_RANKS
from megamix.tools.plan.memory_plan import MemoryPlan, plan_memory

MOST_TP = 8  # ranks; more would cross machines of 8 GPUs in every layer


@dataclass(frozen=True, slots=True)
class Advice:
    """Change in the words of the configuration, and the peak that follows."""

    change: str
    peak: int  # bytes


def by_shard(config: Config, plan: MemoryPlan) -> Iterator[tuple[Shard, int | str]]:
    """Yield the peak with each `parallelism.shard`, in bytes, or why the job cannot have it."""
    for shard in get_args(Shard):
        changed = config.with_keys(parallelism={"dp_size": plan.axes["dp"], "shard": shard})
        problems = check_config(changed)
        yield shard, problems[0] if problems else _peak(changed, plan)


def advise(config: Config, plan: MemoryPlan, memory: int) -> list[Advice]:
    """Return the smallest change of each kind that fits, or the largest if none fits.

    `shard` comes first, because it changes no bit. The others follow, the smallest peak last.
    """
    config = config.with_keys(parallelism={"dp_size": plan.axes["dp"]})
    shards = _least(_shards(config), plan, memory)
    others = [one for changes in _kinds(config, plan, memory) for one in _least(changes, plan, memory)]
    return [*shards, *sorted(others, key=lambda one: -one.peak)]


Changes = Iterator[tuple[str, Config]]


def _least(changes: Changes, plan: MemoryPlan, memory: int) -> list[Advice]:
    """Return the first change that fits, or the one with the smallest peak, if that is smaller than the plan's."""
    best: list[Advice] = []
    for words, changed in changes:
        if not _can_be(changed):
            continue
        peak = _peak(changed, plan)
        if peak < min((one.peak for one in best), default=plan.peak):
            best = [Advice(words, peak)]
        if peak <= memory:
            break
    return best


def _peak(config: Config, plan: MemoryPlan) -> int:
    return plan_memory(config, config.parallelism.dp_size or 1, plan.machine).peak


def _kinds(config: Config, plan: MemoryPlan, memory: int) -> Iterator[Changes]:
    if plan.grad_accum_steps > 1 and config.parallelism.accumulate == "local":
        yield _shards(config.with_keys(parallelism={"accumulate": "owner"}), ' and accumulate = "owner"')
    yield _recompute(config, plan, memory)
    yield _micro_batches(config)
    yield _ranks(config)
    yield _expert_ranks(config)
    if config.parallelism.shard != "parameters":
        adds_up = plan.grad_accum_steps > 1
        shared = config.with_keys(parallelism={"shard": "parameters"} | ({"accumulate": "owner"} if adds_up else {}))
        words = 'parallelism.shard = "parameters"' + ', accumulate = "owner"' * adds_up
        yield ((f"{words} and {ranks}", changed) for ranks, changed in _ranks(shared))
    full = config.with_keys(model={"recompute": "full"})
    yield ((f'model.recompute = "full" and {words}', changed) for words, changed in _micro_batches(full))
    section = config.parallelism
    if section.cp_size > 1 and section.cp_method == "gather":
        yield iter([('parallelism.cp_method = "heads"', config.with_keys(parallelism={"cp_method": "heads"}))])
    larger_tp = [size for size in _doubled(section.tp_size, 3) if size <= MOST_TP]
    larger_pp, larger_cp = _doubled(section.pp_size, 4), _doubled(section.cp_size, 6)
    yield _meshes(config, [{"tp_size": size} for size in larger_tp])
    yield _meshes(config, [{"pp_size": size} for size in larger_pp])
    yield _meshes(config, [{"cp_size": size} for size in larger_cp])
    yield _meshes(config, [{"tp_size": larger_tp[-1], "pp_size": size} for size in larger_pp if larger_tp])
    smaller_cp = [(tp, section.cp_size * section.tp_size // tp) for tp in larger_tp]
    yield _meshes(config, [{"tp_size": tp, "cp_size": cp} for tp, cp in smaller_cp if cp])


def _doubled(size: int, times: int) -> list[int]:
    return [size * 2**doublings for doublings in range(1, times + 1)]


def _shards(config: Config, beside: str = "") -> Changes:
    shards = get_args(Shard)
    for shard in shards[shards.index(config.parallelism.shard) + (not beside) :]:
        if shard != "states":
            yield f'parallelism.shard = "{shard}"{beside}', config.with_keys(parallelism={"shard": shard})


def _recompute(config: Config, plan: MemoryPlan, memory: int) -> Changes:
    """Yield what costs little, then the fewest first layers that fit, then all."""
    repeated = num_repeated(config.model)
    if config.model.recompute == "none":
        yield 'model.recompute = "selective"', config.with_keys(model={"recompute": "selective"})

    def first(full: int) -> Config:
        return config.with_keys(model={"recompute": FirstLayers(full=full)})

    more = range(repeated + 1, config.model.num_layers)
    if fewest := more[bisect_left(more, True, key=lambda full: _peak(first(full), plan) <= memory) :]:
        yield f"model.recompute = {{ full = {fewest[0]} }}", first(fewest[0])
    if repeated < config.model.num_layers:
        yield 'model.recompute = "full"', config.with_keys(model={"recompute": "full"})


def _micro_batches(config: Config) -> Changes:
    size = config.training.micro_batch_size
    for smaller in (size // 2**halvings for halvings in range(1, size.bit_length())):
        yield f"training.micro_batch_size = {smaller}", config.with_keys(training={"micro_batch_size": smaller})


def _ranks(config: Config) -> Changes:
    section = config.parallelism
    more = 2 * (section.dp_size or 1)
    while more * math.prod(axis_sizes(section).values()) <= MOST_RANKS:
        yield f"{more} data-parallel ranks", config.with_keys(parallelism={"dp_size": more})
        more *= 2


def _expert_ranks(config: Config) -> Changes:
    for size in _doubled(config.parallelism.ep_size, 6):
        yield f"parallelism.ep_size = {size}", config.with_keys(parallelism={"ep_size": size})


def _meshes(config: Config, meshes: Sequence[Mapping[str, int]]) -> Changes:
    """Yield the same ranks with these sizes. The other axes stay, but for dp, which gets the ranks that are left."""
    before = config.parallelism
    ranks = (before.dp_size or 1) * before.tp_size * before.cp_size * before.pp_size
    for changed in meshes:
        sizes = {key: getattr(before, key) for key in ("tp_size", "cp_size", "pp_size")} | dict(changed)
        if ranks % (product := math.prod(sizes.values())) == 0:
            words = " and ".join(f"{key} = {size}" for key, size in sizes.items() if size != getattr(before, key))
            sizes["dp_size"] = ranks // product
            yield f"parallelism.{words} on the same ranks", config.with_keys(parallelism=sizes)


def _can_be(config: Config) -> bool:
    section = config.parallelism
    world = (section.dp_size or 1) * math.prod(axis_sizes(section).values())
    return not check_config(config) and not check_world_size(config, world)
