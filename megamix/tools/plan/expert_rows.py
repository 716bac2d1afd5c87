"""Rows that reach a rank's experts, under even routing and in the worst case, and how uneven routing may be."""

from __future__ import annotations

from typing import NamedTuple

from megamix.config import Config, ranks_along
from megamix.tools.plan.memory_plan import MemoryPlan, plan_memory


class ExpertRows(NamedTuple):
    """Rows of one layer's experts on one rank, of a micro-batch of each rank that shares these experts."""

    even: int  # rows if experts get equally many; the plan counts these
    worst: int  # rows if every token chooses experts of this rank
    worst_peak: int  # bytes, with the worst rows in every layer and micro-batch
    factor: float | None  # times the even rows that fit; None without a limit, or if the even rows do not fit


def expert_rows(config: Config, plan: MemoryPlan, limit: int | None) -> ExpertRows | None:
    """Return the rows of a planned job's experts; None if the model has none. `limit`: bytes that a rank may hold."""
    experts, section = getattr(config.model, "experts", None), config.parallelism
    if experts is None:
        return None
    tokens = config.training.micro_batch_size * config.model.seq_len // ranks_along(section, "cp")
    ep_size = ranks_along(section, "ep")
    worst = tokens * ep_size * min(experts.top_k, experts.num_experts // ep_size)
    gathers = section.expert is not None and section.expert.method == "gather"
    even = worst if gathers else tokens * experts.top_k  # a gather has room for the worst
    worst_peak = plan_memory(config, plan.axes["dp"], plan.machine, crowded=True).peak
    factor = None
    if limit is not None and limit >= plan.peak:
        # The bytes at any moment are linear in the rows, and the peak is their maximum. So between both ends the peak
        # lies on the straight line or below, and this share of the further rows fits.
        share = 1.0 if worst_peak <= limit else (limit - plan.peak) / (worst_peak - plan.peak)
        factor = 1 + (worst / even - 1) * share
    return ExpertRows(even, worst, worst_peak, factor)
