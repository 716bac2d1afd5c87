"""The verb `plan`: a table of what a rank will hold, whether it fits, and what to change if it does not."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator

import torch

from megamix.config import Config, ConfigError, check_world_size
from megamix.plan.activations import Machine
from megamix.plan.memory_advice import MOST_RANKS, Advice, advise
from megamix.plan.memory_plan import MemoryPlan, amount, plan_memory

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Of a GPU's memory, for its context, the workspaces of cuBLAS and cuDNN, and NCCL. Not measured.
RESERVED = 2 * 2**30


def plan_lines(config: Config, world: int | None, memory: str | None, device: str | None, as_json: bool) -> list[str]:
    """What to print. `world`: None for parallelism.dp_size, or 1; `device`: None for what this machine has.

    Raises: ConfigError for what cannot be planned.
    """
    machine: Machine = "gpu" if device == "gpu" or (device is None and torch.cuda.is_available()) else "cpu"
    section = config.parallelism
    parts = section.tp_size * section.pp_size
    if world is None:
        world = (section.dp_size or 1) * parts
    if 1 <= world <= MOST_RANKS:
        problems = check_world_size(config, world)
    else:
        problems = [f"--world: got {world}, must be from 1 to {MOST_RANKS}; write --world {8 * parts}"]
    limit = _limit(memory, machine, problems)
    if problems:
        raise ConfigError(problems, "plan")
    plan = plan_memory(config, world // parts, machine)
    advice = advise(config, plan, limit) if limit is not None and plan.peak > limit else []
    if as_json:
        return [json.dumps(_record(plan, limit, advice), indent=2)]
    return [*_table(plan), *_verdict(plan, limit, advice)]


def _limit(memory: str | None, machine: Machine, problems: list[str]) -> int | None:
    """Bytes that tensors may take; None where nobody has said and the machine has no GPU."""
    if memory is not None:
        match = re.fullmatch(r"([0-9.]+) *([kMGT]i?|)B?", memory)
        if match is not None and match[1].count(".") <= 1 and match[1] != ".":
            return int(float(match[1]) * UNITS[match[2]])
        problems.append(f"--memory: got {memory!r}, must be a number and a unit; write --memory 80GiB")
        return None
    if machine == "gpu" and torch.cuda.is_available():  # pragma: CUDA only
        return torch.cuda.get_device_properties(0).total_memory - RESERVED
    return None


def _record(plan: MemoryPlan, limit: int | None, advice: list[Advice]) -> dict[str, object]:
    fits = None if limit is None else plan.peak <= limit
    return {
        **dataclasses.asdict(plan), "resident": plan.resident, "peak": plan.peak, "peak_phase": plan.peak_phase,
        "memory": limit, "fits": fits, "advice": [dataclasses.asdict(one) for one in advice],
    }  # fmt: skip


def _table(plan: MemoryPlan) -> Iterator[str]:
    kind = "a GPU" if plan.machine == "gpu" else "a CPU"
    sizes, of_stage = f"{plan.dp_size} rank(s)", ""
    if plan.tp_size * plan.pp_size > 1:
        sizes = (
            f"{plan.dp_size * plan.tp_size * plan.pp_size} rank(s) "
            f"(pp {plan.pp_size} x dp {plan.dp_size} x tp {plan.tp_size})"
        )
    if plan.pp_size > 1:
        of_stage = f"; those of pp rank {plan.pp_rank}, which need the most"
    yield (
        f"{sizes}, each on {kind}: {plan.parameters:,} parameters in {plan.buckets} bucket(s), "
        f"micro_batch_size {plan.micro_batch_size}, accumulation {plan.grad_accum_steps}{of_stage}"
    )
    yield from _rows("held between steps", plan.held, plan.resident)
    yield from _rows("beside it in forward and backward", plan.in_step, sum(plan.in_step.values()))
    yield "the most at once"
    for phase, size in plan.phases.items():
        yield _row(phase, size) + (" <- peak" if phase == plan.peak_phase else "")
    beside = "beside it in the same memory" if plan.machine == "cpu" else "on the host"
    yield from _rows(beside, plan.host, sum(plan.host.values()))


def _rows(title: str, sizes: dict[str, int], total: int) -> Iterator[str]:
    yield title
    yield from (_row(name, size) for name, size in sizes.items() if size)
    yield _row("in all", total)


def _row(name: str, size: int) -> str:
    return f"  {name:<36} {amount(size):>12}"


def _verdict(plan: MemoryPlan, limit: int | None, advice: list[Advice]) -> Iterator[str]:
    if limit is None:
        return
    if plan.peak <= limit:
        yield f"fits: {amount(limit - plan.peak)} of {amount(limit)} are left at the peak"
        return
    yield f"does NOT fit: the peak ({plan.peak_phase}) is {amount(plan.peak - limit)} more than {amount(limit)}"
    for one in advice:
        left = limit - one.peak
        verdict = f"fits, {amount(left)} left" if left >= 0 else f"{amount(-left)} too much"
        yield f"  {one.change}: {amount(one.peak)}, {verdict}"
    if all(one.peak > limit for one in advice):
        yield f"  none of these is enough: {_what_else(plan, limit)}"


def _what_else(plan: MemoryPlan, limit: int) -> str:
    whole = plan.held["half parameters"] + plan.held["half gradients"]
    if whole > limit:
        return (
            f"half parameters and gradients, {amount(whole)}, are on every data-parallel rank; the model must be cut "
            "into more parts (parallelism.tp_size, pp_size, and ranks for them) or be smaller"
        )
    return "a smaller model, or a shorter model.seq_len"
