"""Checks of the mesh of ranks: what its sizes must divide and multiply to, and what a pipeline's schedule takes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megamix.axes import AXES, OWN_AXES
from megamix.config.model_and_data import default_ffn_hidden_size
from megamix.config.sections import ParallelismConfig, Tables
from megamix.machine import torch_version
from megamix.tuned import DEALT_CHUNKS

Found = Iterator[tuple[str, str]]  # the key of each contradiction, and what to write instead

# Each schedule's fewest and most stages per rank, and what it takes where the key is not set.
_STAGES = {
    "1f1b": (1, 1, 1),
    "interleaved_1f1b": (2, None, 2),
    "interleaved_zero_bubble": (1, None, 2),
    "zbv_zero_bubble": (2, 2, 2),
}


SPLITS_BACKWARD = 2, 13  # torch's version, at least: before, it splits no backward of a Python function

# The key of each axis that has a setting of its own.
AXIS_KEYS = {
    "pp": "pp_size", "replicas": "replicas", "dp": "dp_size", "cp": "cp_size", "ep": "ep_size", "tp": "tp_size",
}  # fmt: skip


def axis_sizes(section: ParallelismConfig) -> dict[str, int]:
    """Return the ranks along each axis of the job's mesh, in its order, without dp: dp gets the ranks that these
    leave.
    """
    own = {"pp": section.pp_size, "replicas": section.replicas, "cp": section.cp_size, "tp": section.tp_size}
    tables = {name: getattr(section, name, None) for name in AXES if name not in OWN_AXES}
    sizes = own | {name: 1 if table is None else table.size for name, table in tables.items()}
    return {name: sizes.get(name, 1) for name in AXES if name != "dp"}


def data_parallel_size(section: ParallelismConfig, world_size: int) -> int:
    """Return the size of dp: the ranks that all other axes leave, at least one."""
    return max(1, world_size // math.prod(axis_sizes(section).values()))


def reading_ranks(section: ParallelismConfig, dp_size: int | None = None) -> int:
    """Return the number of ranks that read different samples. `dp_size`: None for the section's own, or 1."""
    return (dp_size or section.dp_size or 1) * math.prod(
        size for name, size in axis_sizes(section).items() if AXES[name].reads
    )


def mesh_problems(config: Tables, world_size: int) -> Found:
    """Yield why this number of ranks is no mesh of the configured sizes."""
    sizes, dp_size = axis_sizes(config.parallelism), config.parallelism.dp_size
    others = math.prod(sizes.values())
    product = " * ".join(f"{_key(name)} {size}" for name, size in sizes.items() if size > 1)
    if world_size % others:
        largest = max(sizes, key=lambda name: sizes[name])
        yield (
            f"parallelism.{_key(largest)}",
            f"{product} must divide the number of ranks, which is {world_size}; start a multiple of {others}, or write "
            "smaller sizes",
        )
    elif dp_size is not None and dp_size * others != world_size:
        yield (
            "parallelism.dp_size",
            f"all sizes multiply to {dp_size * others} ranks, but {world_size} were started; write dp_size = "
            f"{world_size // others} or start {dp_size * others}",
        )
    else:
        yield from _owners_divide_experts(config, sizes | {"dp": world_size // others})


def _owners_divide_experts(config: Tables, sizes: Mapping[str, int]) -> Found:
    owners = {_key(name): sizes[name] for name in AXES if AXES[name].weights == "sharded"}
    if (number := math.prod(owners.values())) % config.parallelism.ep_size:
        product = " * ".join(f"{key} {size}" for key, size in owners.items())
        fix = math.gcd(number, config.parallelism.ep_size)
        yield (
            "parallelism.ep_size",
            f"must divide {product} = {number}, whose ranks divide the experts; write ep_size = {fix}",
        )


def _key(axis: str) -> str:
    return AXIS_KEYS.get(axis, f"{axis}.size")


def _modules(config: Any) -> Found:
    """Yield why no axis may divide the modules or the loss of a model, for a family whose modules are not ours."""
    for axis, size in axis_sizes(config.parallelism).items() if config.model.family == "transformers" else ():
        if size > 1 and (AXES[axis].weights == "divided" or not AXES[axis].reads):
            whole = 'but family = "transformers" computes by modules that ranks do not divide'
            yield f"parallelism.{_key(axis)}", f'{whole}; write {_key(axis)} = 1, and for memory shard = "parameters"'


def _tensor_parallel(config: Any) -> Found:
    """Check that every layer divides into equal parts: whole heads, columns of the feed-forward part, table rows."""
    model, tp_size = config.model, config.parallelism.tp_size
    if not tp_size > 1:
        return
    if getattr(model, "qk_norm", False) and model.qk_norm_over == "all":
        yield "parallelism.tp_size", 'but model.qk_norm_over = "all" needs all heads on one rank; write tp_size = 1'
    ffn_hidden_size = model.ffn_hidden_size or default_ffn_hidden_size(model.activation, model.hidden_size)
    sizes = {"num_heads": model.num_heads, "ffn_hidden_size": ffn_hidden_size, "vocab_size": model.vocab_size}
    sizes |= {} if model.num_kv_heads is None else {"num_kv_heads": model.num_kv_heads}
    sizes |= {"seq_len": model.seq_len} if config.parallelism.sequence_parallel else {}
    for name, size in sizes.items():
        if size % tp_size:
            fix = largest_divisor(math.gcd(*sizes.values()), tp_size)
            yield "parallelism.tp_size", f"must divide model.{name} {size}; write tp_size = {fix}"


def _expert_parallel(config: Any) -> Found:
    """Check that ranks divide experts evenly, where there are any, and that no others divide the model."""
    section, experts = config.parallelism, getattr(config.model, "experts", None)
    ep_size, key = section.ep_size, "parallelism.ep_size"
    if experts is None:
        if ep_size > 1:
            yield key, "but the model has no experts; write ep_size = 1, or a table [model.experts]"
        return
    if experts.num_experts % ep_size:
        fix = largest_divisor(experts.num_experts, ep_size)
        yield key, f"must divide model.experts.num_experts {experts.num_experts}; write ep_size = {fix}"
    if ep_size > 1 and section.ep_method == "gather":
        instead = 'write ep_method = "exchange"'
        if ep_size > experts.top_k:
            more = f"which sends more than an exchange where ep_size {ep_size} exceeds top_k {experts.top_k}"
            yield "parallelism.ep_method", f"{more}; {instead}"
        if config.precision.dtype in ("fp16", "fp32"):
            alone = "but a GPU groups the products of experts in BF16 alone"
            yield "parallelism.ep_method", f'{alone}; {instead}, or precision.dtype = "bf16"'
    for axis, size in axis_sizes(section).items():
        if size > 1 and axis != "pp" and AXES[axis].weights == "divided":
            whole = f"but ranks along {axis} do not divide experts"
            yield f"parallelism.{_key(axis)}", f"{whole}; write {_key(axis)} = 1, and ep_size for more memory"


def _context_parallel(config: Any) -> Found:
    """Check that each rank gets equal chunks of every sequence, which tensor-parallel ranks may divide again, and ranks
    that divide the heads as many of each.
    """
    section, seq_len, key = config.parallelism, config.model.seq_len, "parallelism.cp_size"
    cp_size, by_heads = section.cp_size, section.cp_method == "heads"
    if not cp_size > 1:
        return
    if section.cp_method == "gather" and getattr(config.model, "attention_softcap", None) is not None:
        needs = "but model.attention_softcap needs all keys of a head on one rank"
        yield key, f'{needs}; write cp_method = "heads", or cp_size = 1'
    chunks = 1 if by_heads else DEALT_CHUNKS if config.data.packing == "documents" else 2
    divisor = chunks * cp_size
    if section.sequence_parallel and section.tp_size > 1:
        divisor = math.lcm(divisor, cp_size * section.tp_size)
    if seq_len % divisor:
        fix = seq_len // divisor * divisor or divisor
        yield key, f"needs a model.seq_len that is a multiple of {divisor}, not {seq_len}; write seq_len = {fix}"
    heads, ranks = config.model.num_kv_heads or config.model.num_heads, cp_size * section.tp_size
    if by_heads and heads % ranks:
        divide = f"but cp_size * tp_size = {ranks} must divide the {heads} heads of keys and values"
        yield "parallelism.cp_method", f'{divide}; write cp_method = "gather"'


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor up to `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def stages_per_rank(section: ParallelismConfig) -> int:
    """Return runs of neighbouring layers on each rank."""
    return section.pp_stages_per_rank or _STAGES[section.pp_schedule][2]


def evaluated_at_once(count: int, pp_size: int) -> int:
    """Return how many of a rank's `count` micro-batches a pipeline evaluates at a time: the fewest that divide `count`,
    suit every schedule, and leave ranks idle for less than a fifth of the time. It is `count` if there is no such part.
    """
    return next((part for part in range(4 * pp_size, count, pp_size) if count % part == 0), count)


def micro_batch_problems(config: Tables, key: str, size: int, count: int) -> Found:
    """Yield why the schedule cannot run the `count` micro-batches of a rank into which a global batch divides. `key`:
    the setting of [training] for the batch's `size`.
    """
    schedule, pp_size = config.parallelism.pp_schedule, config.parallelism.pp_size
    if pp_size == 1:
        return
    share, rounds = size // count, max(1, count // pp_size)
    got = f'which is {count} micro-batch{"es" * (count > 1)} a step, but pp_schedule = "{schedule}"'
    if schedule == "1f1b" and count < pp_size:
        yield f"training.{key}", f"{got} needs at least pp_size {pp_size}; write {key} = {pp_size * share}"
    if schedule.startswith("interleaved") and count % rounds:
        fix = f"write {key} = {rounds * pp_size * share}"
        yield f"training.{key}", f"{got} runs them in {rounds} equal rounds (count / pp_size, rounded down); {fix}"


def _pipeline(config: Any) -> Found:
    section, num_layers, key = config.parallelism, config.model.num_layers, "parallelism.pp_size"
    pp_size, schedule = section.pp_size, section.pp_schedule
    if not pp_size > 1:
        return
    if section.shard == "parameters":
        twice = "but a pipeline would gather each stage twice for every micro-batch"
        yield "parallelism.shard", f'{twice}; write shard = "gradients", or pp_size = 1'
    if section.accumulate == "owner":
        several = "but a pipeline's stages have several micro-batches under way at a time"
        yield "parallelism.accumulate", f'{several}; write accumulate = "local", or pp_size = 1'
    for name, size in axis_sizes(section).items():
        if size > 1 and name not in OWN_AXES:
            shapes = "but a pipeline does not know the shapes that a plugin's axis leaves"
            yield key, f"{shapes}; write pp_size = 1, or {name}.size = 1"
    stages = pp_size * stages_per_rank(section)
    if stages > num_layers:
        yield key, f"these are {stages} stages, but model.num_layers is {num_layers}; write pp_size = 1, or more layers"
    fewest, most, usual = _STAGES[schedule]
    if section.pp_stages_per_rank and not fewest <= section.pp_stages_per_rank <= (most or math.inf):
        takes = f'but pp_schedule = "{schedule}" takes {fewest}{"" if most else " or more"}'
        yield "parallelism.pp_stages_per_rank", f"{takes}; write pp_stages_per_rank = {usual}"
    if config.model.compile and schedule.endswith("zero_bubble"):
        splits = "which splits backward in two, and that of compiled blocks (model.compile = true) cannot be"
        yield "parallelism.pp_schedule", f'{splits}; write pp_schedule = "interleaved_1f1b", or compile = false'


def torch_problems(config: Tables) -> Found:
    """Yield why this version of torch cannot run the schedule. A run's file still loads, to export it for example."""
    schedule, (major, minor) = config.parallelism.pp_schedule, torch_version()
    if config.parallelism.pp_size > 1 and schedule.endswith("zero_bubble") and (major, minor) < SPLITS_BACKWARD:
        splits = f"which splits backward in two, and torch {major}.{minor} cannot split that of our operations"
        fix = 'install torch >= 2.13, or write pp_schedule = "interleaved_1f1b"'
        yield "parallelism.pp_schedule", f"{splits}; {fix}"


MESH_CHECKS = (_modules, _tensor_parallel, _expert_parallel, _context_parallel, _pipeline)
