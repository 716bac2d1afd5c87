"""What to change where a job does not fit: each change that a configuration can make, with the peak it leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megamix.config import Config, check_world_size
from megamix.train.memory_plan import MemoryPlan, plan_memory

MOST_RANKS = 16384


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, in the words of the configuration, and what becomes of the peak."""

    change: str
    peak: int  # bytes


def advise(config: Config, plan: MemoryPlan, memory: int) -> list[Advice]:
    """The smallest change of each kind that fits, or the largest one where none does; the smallest peaks last."""
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


def _recompute(config: Config, dp_size: int) -> Changes:
    policies = ("none", "selective", "full")
    for policy in policies[policies.index(config.model.recompute) + 1 :]:
        yield f'model.recompute = "{policy}"', _with(config, "model", recompute=policy), dp_size


def _micro_batches(config: Config, dp_size: int) -> Changes:
    size = config.training.micro_batch_size
    for smaller in (size // 2**halvings for halvings in range(1, size.bit_length())):
        changed = _with(config, "training", micro_batch_size=smaller)
        if not check_world_size(changed, dp_size):
            yield f"training.micro_batch_size = {smaller}", changed, dp_size


def _ranks(config: Config, dp_size: int) -> Changes:
    more = dp_size * 2
    while more <= MOST_RANKS:
        changed = _with(config, "parallelism", dp_size=more)
        if not check_world_size(changed, more):
            yield f"{more} data-parallel ranks", changed, more
        more *= 2


def _with(config: Config, section: str, **values: object) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
