"""Output of `plan`: a table of the bytes that a rank will hold, whether they fit, and changes if they do not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import torch

from megamix.base.console import Failed
from megamix.base.machine import has_gpu
from megamix.comm.topology import Topology
from megamix.config import Config, ConfigError
from megamix.tools.plan.activations import Machine
from megamix.tools.plan.advice import advise, by_shard
from megamix.tools.plan.expert_rows import expert_rows
from megamix.tools.plan.limits import RESERVED
from megamix.tools.plan.memory_plan import MemoryPlan, plan_memory
from megamix.train.least_memory import amount, mirrored


def report_lines(config: Config, dp_size: int, machine: Machine, limit: int | None, as_json: bool) -> Iterator[str]:
    """Yield the lines to print.

    `limit`: bytes that tensors may take; None: the memory of this machine's GPU, if it has one.
    """
    if limit is None and machine == "gpu" and torch.cuda.is_available():
        limit = torch.cuda.get_device_properties(0).total_memory - RESERVED
    plan = plan_memory(config, dp_size, machine)
    if as_json:
        record = _record(config, plan, limit)
        yield (str if record["fits"] is not False else Failed)(json.dumps(record, indent=2))
        return
    for part in (_table, _expert_rows, _shard_rows, _verdict):  # each is printed before the next, which takes longer
        yield from part(config, plan, limit)


def require_fit(config: Config, dp_size: int, limit: int) -> str:
    """Return a line with the memory that a rank will need on this kind of machine, and the `limit` bytes that it may
    hold.

    Raises: ConfigError with the changes that fit, if the need is more.
    """
    plan = plan_memory(config, dp_size, "gpu" if has_gpu() else "cpu")
    peak = f"a rank needs {amount(plan.peak)} at its peak ({plan.peak_phase})"
    if plan.peak <= limit:
        return f"{peak}, which fits {amount(limit)}"
    advice = advise(config, plan, limit)
    if advice and advice[-1].peak <= limit:
        fix = f"write {', '.join(one.change for one in advice)}, which needs {amount(advice[-1].peak)}"
    else:
        fix = f"no change here is enough: {_what_else(plan, limit)}"
    raise ConfigError([f"--memory: got {amount(limit)}, but {peak}; {fix}"], "job")


def _record(config: Config, plan: MemoryPlan, limit: int | None) -> dict[str, object]:
    fits, experts = None if limit is None else plan.peak <= limit, expert_rows(config, plan, limit)
    advice = advise(config, plan, limit) if limit is not None and not fits else []
    return {
        **dataclasses.asdict(plan), "resident": plan.resident, "peak": plan.peak, "peak_phase": plan.peak_phase,
        "memory": limit, "fits": fits, "experts": experts and experts._asdict(),
        "shards": dict(by_shard(config, plan)),
        "advice": [one._asdict() for one in advice],
    }  # fmt: skip


def _table(config: Config, plan: MemoryPlan, limit: int | None) -> Iterator[str]:
    kind = "a GPU" if plan.machine == "gpu" else "a CPU"
    mesh = Topology.place(0, ep_size=plan.ep_size, **plan.axes)
    of_stage = f"; those of pp rank {plan.pp_rank}, which need the most" if mesh.pp.size > 1 else ""
    yield (
        f"{mesh}, each on {kind}: {plan.parameters:,} parameters in {plan.buckets} bucket(s), "
        f"micro_batch_size {plan.micro_batch_size}, accumulation {plan.grad_accum_steps}{of_stage}"
    )
    if plan.matrices is not None:
        yield str(plan.matrices)
    yield from _rows("held between steps", plan.held, plan.resident)
    yield from _rows("beside it in forward and backward", plan.in_step, sum(plan.in_step.values()))
    yield "the most at once"
    for phase, size in plan.phases.items():
        yield _row(phase, size) + (" <- peak" if phase == plan.peak_phase else "")
    beside = "beside it in the same memory" if plan.machine == "cpu" else "on the host"
    yield from _rows(beside, plan.host, sum(plan.host.values()))
    if not config.checkpoint.mirror:
        yield _row("checkpoint.mirror = 1 would take", int(mirrored(plan.held, config.checkpoint)))


def _expert_rows(config: Config, plan: MemoryPlan, limit: int | None) -> Iterator[str]:
    experts = expert_rows(config, plan, limit)
    if experts is None:
        return
    yield "rows of a layer's experts on this rank, of a micro-batch"
    if experts.worst == experts.even:
        yield _cells("however tokens choose", f"{experts.even:,}")
        return
    yield _cells("even routing, as counted above", f"{experts.even:,}")
    yield _cells("if all tokens choose experts here", f"{experts.worst:,}") + f", peak {amount(experts.worst_peak)}"
    if experts.factor is not None:
        most = _cells("the most that fits, of the even rows", f"{experts.factor:.2f}") + " times as many"
        saves = config.model.recompute != "full" and experts.factor < experts.worst / experts.even
        yield most + '; model.recompute = "full" keeps the least of a row' * saves


def _shard_rows(config: Config, plan: MemoryPlan, limit: int | None) -> Iterator[str]:
    own, count, shards = config.parallelism.shard, plan.grad_accum_steps, dict(by_shard(config, plan))
    stay = count > 1 and config.parallelism.accumulate == "local"
    yield "the peak by parallelism.shard" + f'; gradients stay for {count} micro-batches (accumulate = "local")' * stay
    fits = [shard for shard, peak in shards.items() if isinstance(peak, int) and peak <= (limit or 0)]
    for shard, peak in shards.items():
        marks = [" <- this job"] * (shard == own) + [" <- the first that fits"] * ([shard] == fits[:1])
        yield (_row(shard, peak) if isinstance(peak, int) else f"  {shard:<36} left out: {peak}") + "".join(marks)


def _rows(title: str, sizes: dict[str, int], total: int) -> Iterator[str]:
    yield title
    yield from (_row(name, size) for name, size in sizes.items() if size)
    yield _row("in all", total)


def _row(name: str, size: int) -> str:
    return _cells(name, amount(size))


def _cells(name: str, figure: str) -> str:
    return f"  {name:<36} {figure:>12}"


def _verdict(config: Config, plan: MemoryPlan, limit: int | None) -> Iterator[str]:
    if limit is None:
        return
    if plan.peak <= limit:
        yield f"fits: {amount(limit - plan.peak)} of {amount(limit)} are left at the peak"
        return
    yield Failed(f"does NOT fit: the peak ({plan.peak_phase}) is {amount(plan.peak - limit)} more than {amount(limit)}")
    for number, one in enumerate(advice := advise(config, plan, limit)):
        left = limit - one.peak
        verdict = f"fits, {amount(left)} left" if left >= 0 else f"{amount(-left)} too much"
        yield f"  {'and ' * (number > 0)}{one.change}: {amount(one.peak)}, {verdict}"
    if all(one.peak > limit for one in advice):
        yield f"  that is not enough: {_what_else(plan, limit)}"


def _what_else(plan: MemoryPlan, limit: int) -> str:
    whole = plan.held["half parameters"] + plan.held["half gradients"]
    if whole > limit:
        return (
            f"half parameters and gradients, {amount(whole)}, are more by themselves; the model must be cut into more "
            "parts (parallelism.shard, tensor, pipeline, and ranks for them) or be smaller"
        )
    return "a smaller model, or a shorter model.seq_len"
