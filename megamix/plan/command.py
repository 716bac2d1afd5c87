"""The verb `plan`: a table of what a rank will hold, whether it fits, and what to change if it does not."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megamix.comm.topology import Topology
from megamix.config import Config, ConfigError, check_world_size
from megamix.config.checks import check_config
from megamix.plan.activations import Machine
from megamix.plan.memory_plan import MemoryPlan, amount, plan_memory

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Of a GPU's memory, for its context, the workspaces of cuBLAS and cuDNN, and NCCL. Not measured.
RESERVED = 2 * 2**30


def plan_lines(config: Config, world: int | None, memory: str | None, device: str | None, as_json: bool) -> list[str]:
    """Return what to print. `world`: None for parallelism.dp_size, or 1; `device`: None for what this machine has.

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
    mesh = Topology.place(0, pp_size=plan.pp_size, dp_size=plan.dp_size, tp_size=plan.tp_size)
    of_stage = f"; those of pp rank {plan.pp_rank}, which need the most" if plan.pp_size > 1 else ""
    yield (
        f"{mesh}, each on {kind}: {plan.parameters:,} parameters in {plan.buckets} bucket(s), "
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


MOST_RANKS = 16384
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
