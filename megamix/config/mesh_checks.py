"""Checks of the mesh of ranks: what its sizes must divide and multiply to, and what a pipeline's schedule takes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megamix.base.axes import AXES, OWN_AXES
from megamix.base.constants import DEALT_CHUNKS
from megamix.base.machine import torch_version
from megamix.config.model_and_data import default_ffn_hidden_size
from megamix.config.sections import (
    ContextConfig,
    ExpertConfig,
    ParallelismConfig,
    PipelineConfig,
    Tables,
    TensorConfig,
)

Found = Iterator[tuple[str, str]]  # the key of each contradiction, and what to write instead

# Each schedule's fewest and most stages per rank, and what it takes where the key is not set.
_STAGES = {
    "1f1b": (1, 1, 1),
    "interleaved_1f1b": (2, None, 2),
    "interleaved_zero_bubble": (1, None, 2),
    "zbv_zero_bubble": (2, 2, 2),
}


SPLITS_BACKWARD = 2, 13  # torch's version, at least: before, it splits no backward of a Python function


# The table of each axis of our own that has one. That of a plugin's axis has the axis' name.
_TABLES: dict[str, tuple[str, Any]] = {
    "pp": ("pipeline", PipelineConfig), "cp": ("context", ContextConfig), "ep": ("expert", ExpertConfig),
    "tp": ("tensor", TensorConfig),
}  # fmt: skip


def axis_table(axis: str) -> str:
    """Return the name of an axis' table in [parallelism]."""
    return _TABLES[axis][0] if axis in _TABLES else axis


def axis_key(axis: str) -> str:
    """Return the key of [parallelism] that says how many ranks lie along an axis."""
    return {"dp": "dp_size", "replicas": "replicas"}.get(axis) or f"{axis_table(axis)}.size"


def _one(axis: str) -> str:
    return "replicas = 1" if axis == "replicas" else f"parallelism.{axis_table(axis)} = false"


def ranks_along(section: ParallelismConfig, axis: str) -> int:
    """Return the ranks along an axis that has a table, those of ep too."""
    table = getattr(section, axis_table(axis), None)
    size: int = 1 if table is None else table.size
    return size


def axis_sizes(section: ParallelismConfig) -> dict[str, int]:
    """Return the ranks along each axis of the job's mesh, in its order, without dp: dp gets the ranks that these
    leave.
    """
    return {
        name: section.replicas if name == "replicas" else ranks_along(section, name) for name in AXES if name != "dp"
    }


def resized(section: ParallelismConfig, **sizes: int) -> dict[str, Any]:
    """Return the keys of [parallelism] that put so many ranks along these axes; the other keys of their tables stay."""
    keys = dict[str, Any]()
    for axis, size in sizes.items():
        if axis in ("dp", "replicas"):
            keys[axis_key(axis)] = size
        elif size == 1:
            keys[axis_table(axis)] = None
        elif (table := getattr(section, axis_table(axis))) is not None:
            keys[axis_table(axis)] = table.model_copy(update={"size": size})
        else:
            keys[axis_table(axis)] = _TABLES[axis][1](size=size)
    return keys


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
    product = " * ".join(f"{axis_key(name)} {size}" for name, size in sizes.items() if size > 1)
    if world_size % others:
        largest = max(sizes, key=lambda name: sizes[name])
        yield (
            f"parallelism.{axis_key(largest)}",
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
    owners = {axis_key(name): sizes[name] for name in AXES if AXES[name].weights == "sharded"}
    ep_size = ranks_along(config.parallelism, "ep")
    if (number := math.prod(owners.values())) % ep_size:
        product = " * ".join(f"{key} {size}" for key, size in owners.items())
        of = f"must divide {product} = {number}, whose ranks divide the experts"
        yield "parallelism.expert.size", f"{of}; {_size(math.gcd(number, ep_size), 'expert')}"


def _size(size: int, table: str) -> str:
    """Return what to write for a size that divides; of a single rank there is no table."""
    return f"write size = {size}" if size > 1 else f"write parallelism.{table} = false"


def _modules(config: Any) -> Found:
    """Yield why no axis may divide the modules or the loss of a model, for a family whose modules are not ours."""
    for axis, size in axis_sizes(config.parallelism).items() if config.model.family == "transformers" else ():
        if size > 1 and (AXES[axis].weights == "divided" or not AXES[axis].reads):
            whole = 'but family = "transformers" computes by modules that ranks do not divide'
            yield f"parallelism.{axis_key(axis)}", f'{whole}; write {_one(axis)}, and for memory shard = "parameters"'


def _tensor_parallel(config: Any) -> Found:
    """Check that every layer divides into equal parts: whole heads, columns of the feed-forward part, table rows."""
    model, tp_size = config.model, ranks_along(config.parallelism, "tp")
    if not tp_size > 1:
        return
    if getattr(model, "qk_norm", "none") == "all":
        yield (
            "parallelism.tensor.size",
            'but model.qk_norm = "all" needs all heads on one rank; write parallelism.tensor = false',
        )
    ffn_hidden_size = model.ffn_hidden_size or default_ffn_hidden_size(model.activation, model.hidden_size)
    sizes = {"num_heads": model.num_heads, "ffn_hidden_size": ffn_hidden_size, "vocab_size": model.vocab_size}
    sizes |= {} if model.num_kv_heads is None else {"num_kv_heads": model.num_kv_heads}
    sizes |= {"seq_len": model.seq_len} if config.parallelism.tensor.sequence_parallel else {}
    for name, size in sizes.items():
        if size % tp_size:
            fix = largest_divisor(math.gcd(*sizes.values()), tp_size)
            yield "parallelism.tensor.size", f"must divide model.{name} {size}; {_size(fix, 'tensor')}"


def _expert_parallel(config: Any) -> Found:
    """Check that ranks divide experts evenly, where there are any, and that no others divide the model."""
    section, experts = config.parallelism, getattr(config.model, "experts", None)
    ep_size, key = ranks_along(section, "ep"), "parallelism.expert.size"
    if experts is None:
        if ep_size > 1:
            yield key, "but the model has no experts; write parallelism.expert = false, or a table [model.experts]"
        return
    if experts.num_experts % ep_size:
        fix = largest_divisor(experts.num_experts, ep_size)
        yield key, f"must divide model.experts.num_experts {experts.num_experts}; {_size(fix, 'expert')}"
    if ep_size > 1 and section.expert.method == "gather":
        instead = 'write method = "exchange"'
        if ep_size > experts.top_k:
            more = f"which sends more than an exchange where size {ep_size} exceeds top_k {experts.top_k}"
            yield "parallelism.expert.method", f"{more}; {instead}"
        if config.precision.dtype in ("fp16", "fp32"):
            alone = "but a GPU groups the products of experts in BF16 alone"
            yield "parallelism.expert.method", f'{alone}; {instead}, or precision.dtype = "bf16"'
    for axis, size in axis_sizes(section).items():
        if size > 1 and axis != "pp" and AXES[axis].weights == "divided":
            whole = f"but ranks along {axis} do not divide experts"
            yield f"parallelism.{axis_key(axis)}", f"{whole}; write {_one(axis)}, and [parallelism.expert] for memory"


def _context_parallel(config: Any) -> Found:
    """Check that each rank gets equal chunks of every sequence, which tensor-parallel ranks may divide again, and ranks
    that divide the heads as many of each.
    """
    section, seq_len, key = config.parallelism, config.model.seq_len, "parallelism.context.size"
    cp_size, tp_size = ranks_along(section, "cp"), ranks_along(section, "tp")
    if not cp_size > 1:
        return
    by_heads = section.context.method == "heads"
    if section.context.method == "gather" and getattr(config.model, "attention_softcap", None) is not None:
        needs = "but model.attention_softcap needs all keys of a head on one rank"
        yield key, f'{needs}; write method = "heads", or parallelism.context = false'
    chunks = 1 if by_heads else DEALT_CHUNKS if config.data.packing != "none" else 2
    divisor = chunks * cp_size
    if tp_size > 1 and section.tensor.sequence_parallel:
        divisor = math.lcm(divisor, cp_size * tp_size)
    if seq_len % divisor:
        fix = seq_len // divisor * divisor or divisor
        yield key, f"needs a model.seq_len that is a multiple of {divisor}, not {seq_len}; write seq_len = {fix}"
    heads, ranks = config.model.num_kv_heads or config.model.num_heads, cp_size * tp_size
    if by_heads and heads % ranks:
        divide = f"but context.size * tensor.size = {ranks} must divide the {heads} heads of keys and values"
        yield "parallelism.context.method", f'{divide}; write method = "gather"'


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor up to `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def stages_per_rank(pipeline: PipelineConfig) -> int:
    """Return runs of neighbouring layers on each rank."""
    return pipeline.stages_per_rank or _STAGES[pipeline.schedule][2]


def evaluated_at_once(count: int, pp_size: int) -> int:
    """Return how many of a rank's `count` micro-batches a pipeline evaluates at a time: the fewest that divide `count`,
    suit every schedule, and leave ranks idle for less than a fifth of the time. It is `count` if there is no such part.
    """
    return next((part for part in range(4 * pp_size, count, pp_size) if count % part == 0), count)


def micro_batch_problems(config: Tables, key: str, size: int, count: int) -> Found:
    """Yield why the schedule cannot run the `count` micro-batches of a rank into which a global batch divides. `key`:
    the setting of [training] for the batch's `size`.
    """
    if config.parallelism.pipeline is None:
        return
    schedule, pp_size = config.parallelism.pipeline.schedule, config.parallelism.pipeline.size
    share, rounds = size // count, max(1, count // pp_size)
    got = f'which is {count} micro-batch{"es" * (count > 1)} a step, but pipeline.schedule = "{schedule}"'
    if schedule == "1f1b" and count < pp_size:
        yield f"training.{key}", f"{got} needs at least pipeline.size {pp_size}; write {key} = {pp_size * share}"
    if schedule.startswith("interleaved") and count % rounds:
        fix = f"write {key} = {rounds * pp_size * share}"
        yield (
            f"training.{key}",
            f"{got} runs them in {rounds} equal rounds (count / pipeline.size, rounded down); {fix}",
        )


def _pipeline(config: Any) -> Found:
    section, num_layers, key = config.parallelism, config.model.num_layers, "parallelism.pipeline.size"
    if section.pipeline is None:
        return
    pp_size, schedule = section.pipeline.size, section.pipeline.schedule
    if section.shard == "parameters":
        twice = "but a pipeline would gather each stage twice for every micro-batch"
        yield "parallelism.shard", f'{twice}; write shard = "gradients", or parallelism.pipeline = false'
    if section.accumulate == "owner":
        several = "but a pipeline's stages have several micro-batches under way at a time"
        yield "parallelism.accumulate", f'{several}; write accumulate = "local", or parallelism.pipeline = false'
    for name, size in axis_sizes(section).items():
        if size > 1 and name not in OWN_AXES:
            shapes = "but a pipeline does not know the shapes that a plugin's axis leaves"
            yield key, f"{shapes}; write parallelism.pipeline = false, or parallelism.{name} = false"
    stages = pp_size * stages_per_rank(section.pipeline)
    if stages > num_layers:
        fix = "write parallelism.pipeline = false, or more layers"
        yield key, f"these are {stages} stages, but model.num_layers is {num_layers}; {fix}"
    fewest, most, usual = _STAGES[schedule]
    if section.pipeline.stages_per_rank and not fewest <= section.pipeline.stages_per_rank <= (most or math.inf):
        takes = f'but schedule = "{schedule}" takes {fewest}{"" if most else " or more"}'
        yield "parallelism.pipeline.stages_per_rank", f"{takes}; write stages_per_rank = {usual}"
    if config.model.compile and schedule.endswith("zero_bubble"):
        splits = "which splits backward in two, and that of compiled blocks (model.compile = true) cannot be"
        yield "parallelism.pipeline.schedule", f'{splits}; write schedule = "interleaved_1f1b", or compile = false'


def torch_problems(config: Tables) -> Found:
    """Yield why this version of torch cannot run the schedule. A run's file still loads, to export it for example."""
    pipeline, (major, minor) = config.parallelism.pipeline, torch_version()
    if pipeline and pipeline.schedule.endswith("zero_bubble") and (major, minor) < SPLITS_BACKWARD:
        splits = f"which splits backward in two, and torch {major}.{minor} cannot split that of our operations"
        least = ".".join(map(str, SPLITS_BACKWARD))
        fix = f'install torch >= {least}, or write schedule = "interleaved_1f1b"'
        yield "parallelism.pipeline.schedule", f"{splits}; {fix}"


MESH_CHECKS = (_modules, _tensor_parallel, _expert_parallel, _context_parallel, _pipeline)
