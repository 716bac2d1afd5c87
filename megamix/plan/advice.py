"""What to change where a job does not fit, each change with the peak that it leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megamix.config import Config, check_world_size
from megamix.config.checks import check_config
from megamix.plan.command import MOST_RANKS
from megamix.plan.memory_plan import MemoryPlan, plan_memory

MOST_TP = 8  # more would cross machines of 8 GPUs in every layer


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, in the words of the configuration, and what becomes of the peak."""

    change: str
    peak: int  # bytes


def advise(config: Config, plan: MemoryPlan, memory: int) -> list[Advice]:
    """Return the smallest change of each kind that fits, or the largest where none does; the smallest peaks last."""
    advice = []
    for changes in _kinds(config, plan):
        best = None
        for words, changed, dp_size in changes:
            peak = plan_memory(changed, dp_size, plan.machine).peak
            if peak < (plan.peak if best is None else best.peak):
                best = Advice(words, peak)
            if peak <= memory:
                break
        if best is not None:
            advice.append(best)
    return sorted(advice, key=lambda one: -one.peak)


Changes = Iterator[tuple[str, Config, int]]


def _kinds(config: Config, plan: MemoryPlan) -> Iterator[Changes]:
    yield _recompute(config, plan.dp_size)
    yield _micro_batches(config, plan.dp_size)
    yield _ranks(config, plan.dp_size)
    full = _with(config, "model", recompute="full")
    yield (
        (f'model.recompute = "full" and {words}', changed, size)
        for words, changed, size in _micro_batches(full, plan.dp_size)
    )
    tp_size, pp_size = plan.tp_size, plan.pp_size
    larger_tp = [tp_size * 2**doublings for doublings in range(1, 4) if tp_size * 2**doublings <= MOST_TP]
    larger_pp = [pp_size * 2**doublings for doublings in range(1, 5)]
    yield _meshes(config, plan, [(size, pp_size) for size in larger_tp])
    yield _meshes(config, plan, [(tp_size, size) for size in larger_pp])
    yield _meshes(config, plan, [(larger_tp[-1], size) for size in larger_pp if larger_tp])


def _recompute(config: Config, dp_size: int) -> Changes:
    policies = ("none", "selective", "full")
    for policy in policies[policies.index(config.model.recompute) + 1 :]:
        yield f'model.recompute = "{policy}"', _with(config, "model", recompute=policy), dp_size


def _micro_batches(config: Config, dp_size: int) -> Changes:
    size = config.training.micro_batch_size
    for smaller in (size // 2**halvings for halvings in range(1, size.bit_length())):
        changed = _with(config, "training", micro_batch_size=smaller)
        if _can_be(changed, dp_size):
            yield f"training.micro_batch_size = {smaller}", changed, dp_size


def _ranks(config: Config, dp_size: int) -> Changes:
    section = config.parallelism
    more = dp_size * 2
    while more * section.tp_size * section.pp_size <= MOST_RANKS:
        changed = _with(config, "parallelism", dp_size=more)
        if _can_be(changed, more):
            yield f"{more} data-parallel ranks", changed, more
        more *= 2


def _meshes(config: Config, plan: MemoryPlan, sizes: list[tuple[int, int]]) -> Changes:
    """Yield the same ranks, with these for `tp_size` and `pp_size`."""
    world = plan.dp_size * plan.tp_size * plan.pp_size
    for tp_size, pp_size in sizes:
        dp_size = world // (tp_size * pp_size)
        changed = _with(config, "parallelism", dp_size=dp_size, tp_size=tp_size, pp_size=pp_size)
        if dp_size * tp_size * pp_size == world and _can_be(changed, dp_size):
            words = [f"tp_size = {tp_size}"] * (tp_size != plan.tp_size) + [f"pp_size = {pp_size}"] * (
                pp_size != plan.pp_size
            )
            yield f"parallelism.{' and '.join(words)} on the same ranks", changed, dp_size


def _can_be(config: Config, dp_size: int) -> bool:
    world = dp_size * config.parallelism.tp_size * config.parallelism.pp_size
    return not check_config(config) and not check_world_size(config, world)


def _with(config: Config, section: str, **values: object) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
