"""Checks of the mesh of ranks: what its sizes must divide and multiply to, and what a pipeline's schedule takes."""

import math
from collections.abc import Callable, Iterator, Mapping

from megamix.axes import AXES, OWN_AXES
from megamix.config.model_and_data import default_ffn_hidden_size
from megamix.config.sections import Config, ParallelismConfig
from megamix.machine import torch_version
from megamix.tuned import DEALT_CHUNKS

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


def data_parallel_size(config: Config, world_size: int) -> int:
    """Return the size of dp: the ranks that all other axes leave, at least one."""
    return max(1, world_size // math.prod(axis_sizes(config.parallelism).values()))


def reading_ranks(section: ParallelismConfig, dp_size: int | None = None) -> int:
    """Return the number of ranks that read different samples. `dp_size`: None for the section's own, or 1."""
    return (dp_size or section.dp_size or 1) * math.prod(
        size for name, size in axis_sizes(section).items() if AXES[name].reads
    )


def mesh_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield why this number of ranks is no mesh of the configured sizes."""
    sizes, dp_size = axis_sizes(config.parallelism), config.parallelism.dp_size
    others = math.prod(sizes.values())
    if world_size % others:
        smaller = _sizes_that_fit(config, sizes, world_size)
        first = next(iter(smaller))
        factors = [f"{AXIS_KEYS.get(name, name)} {size}" for name, size in sizes.items() if size > 1]
        product = f"{' * '.join(factors)} = {others} " if len(factors) > 1 else ""
        fix = " and ".join(f"{_key(name)} = {size}" for name, size in smaller.items())
        yield (
            f"parallelism.{_key(first)}: got {sizes[first]}, {product}must divide the number of ranks, which is "
            f"{world_size}; start a multiple of {others}, or write {fix}"
        )
    elif dp_size is not None and dp_size * others != world_size:
        whole = {name: sizes.get(name, dp_size) for name in AXES}
        product = " * ".join(f"{name} {size}" for name, size in whole.items() if size > 1)
        yield (
            f"parallelism.dp_size: got {dp_size}, parallel sizes must multiply to the number of ranks: {product} = "
            f"{dp_size * others}, but {world_size} were started; write dp_size = {world_size // others} or start "
            f"{dp_size * others}"
        )
    else:
        yield from _owners_divide_experts(config, sizes | {"dp": world_size // others})


def _owners_divide_experts(config: Config, sizes: Mapping[str, int]) -> Iterator[str]:
    ep_size = config.parallelism.ep_size
    owners = {_key(name): sizes[name] for name in AXES if AXES[name].weights == "sharded"}
    if (number := math.prod(owners.values())) % ep_size:
        product = " * ".join(f"{key} {size}" for key, size in owners.items())
        yield (
            f"parallelism.ep_size: got {ep_size}, must divide {product} = {number}, whose ranks divide the experts; "
            f"write ep_size = {math.gcd(number, ep_size)}"
        )


def _key(axis: str) -> str:
    return AXIS_KEYS.get(axis, f"{axis}.size")


def _sizes_that_fit(config: Config, sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the axes that must be smaller to divide the ranks, with their sizes. Those that communicate most, which
    are the last ones, are kept first.
    """
    smaller, left = {}, world_size
    for name, size in reversed([*sizes.items()]):
        fits = _largest_fit(config, size, left) if name == "tp" else math.gcd(left, size)
        left //= fits
        if fits < size:
            smaller[name] = fits
    return smaller


def _modules_are_not_divided(config: Config) -> Iterator[str]:
    """Yield why no axis may divide the modules or the loss of a model, for a family whose modules are not ours."""
    for axis, size in axis_sizes(config.parallelism).items() if config.model.family == "transformers" else ():
        if size > 1 and (AXES[axis].weights == "divided" or not AXES[axis].reads):
            yield (
                f'parallelism.{_key(axis)}: got {size}, but family = "transformers" computes by modules that ranks do '
                f'not divide; write {_key(axis)} = 1, and for memory shard = "parameters"'
            )


def _tensor_parallel_divides(config: Config) -> Iterator[str]:
    """Check that every layer divides into equal parts: whole heads, columns of the feed-forward part, table rows."""
    tp_size = config.parallelism.tp_size
    for key, size, share in _divided(config):
        if size % tp_size:
            yield (
                f"parallelism.tp_size: got {tp_size}, must divide model.{key} {size}, since each rank has its own "
                f"{share}; write tp_size = {_largest_fit(config, tp_size)}"
            )


def _norms_are_whole(config: Config) -> Iterator[str]:
    if config.parallelism.tp_size > 1 and config.model.qk_norm and config.model.qk_norm_over == "all":
        yield (
            f'parallelism.tp_size: got {config.parallelism.tp_size}, but model.qk_norm_over = "all" needs all heads '
            "on one rank; write tp_size = 1"
        )


def _ranks_divide_experts(config: Config) -> Iterator[str]:
    """Check that ranks divide experts evenly, where there are any, and that no others divide the model."""
    section, experts = config.parallelism, getattr(config.model, "experts", None)
    if experts is None and section.ep_size > 1:
        yield (
            f"parallelism.ep_size: got {section.ep_size}, but the model has no experts; write ep_size = 1, or a table "
            "[model.experts]"
        )
    elif experts is not None and experts.num_experts % section.ep_size:
        yield (
            f"parallelism.ep_size: got {section.ep_size}, must divide model.experts.num_experts {experts.num_experts}; "
            f"write ep_size = {largest_divisor(experts.num_experts, section.ep_size)}"
        )
    for axis, size in axis_sizes(section).items() if experts is not None else ():
        if size > 1 and axis != "pp" and AXES[axis].weights == "divided":
            yield (
                f"parallelism.{_key(axis)}: got {size}, but ranks along {axis} do not divide experts; write "
                f"{_key(axis)} = 1, and ep_size for more memory"
            )


def _tokens_are_gathered_cheaply(config: Config) -> Iterator[str]:
    section, experts = config.parallelism, getattr(config.model, "experts", None)
    if experts is None or section.ep_size == 1 or section.ep_method != "gather":
        return
    if section.ep_size > experts.top_k:
        yield (
            f'parallelism.ep_method: got "gather", which sends more than an exchange where ep_size {section.ep_size} '
            f'exceeds model.experts.top_k {experts.top_k}; write ep_method = "exchange"'
        )
    if config.precision.dtype != "bf16":
        yield (
            f'parallelism.ep_method: got "gather", but a GPU groups the products of experts in BF16 alone, and '
            f'precision.dtype is "{config.precision.dtype}"; write ep_method = "exchange", or dtype = "bf16"'
        )


def _capped_scores_are_whole(config: Config) -> Iterator[str]:
    cp_size, cp_method = config.parallelism.cp_size, config.parallelism.cp_method
    if cp_size > 1 and cp_method == "gather" and config.model.attention_softcap is not None:
        yield (
            f"parallelism.cp_size: got {cp_size}, but model.attention_softcap needs all keys of a head on one rank; "
            'write cp_method = "heads", or cp_size = 1'
        )


def _divided(config: Config) -> Iterator[tuple[str, int, str]]:
    """Yield key, size, and the name of a rank's share, of everything that tensor parallelism divides."""
    model = config.model
    yield "num_heads", model.num_heads, "query heads"
    if model.num_kv_heads is not None:
        yield "num_kv_heads", model.num_kv_heads, "key and value heads"
    ffn_hidden_size = model.ffn_hidden_size or default_ffn_hidden_size(model.activation, model.hidden_size)
    yield "ffn_hidden_size", ffn_hidden_size, "columns"
    yield "vocab_size", model.vocab_size, "rows of the embedding table"
    if config.parallelism.sequence_parallel:
        yield "seq_len", model.seq_len, "positions (sequence_parallel = false keeps them whole)"


def _chunks_per_rank(section: ParallelismConfig, packing: str) -> int:
    """Return the number of chunks of a sequence on each context-parallel rank."""
    if section.cp_method == "heads":
        return 1
    return DEALT_CHUNKS if packing == "documents" else 2


def _context_parallel_divides(config: Config) -> Iterator[str]:
    """Check that each rank gets equal chunks of every sequence, which tensor-parallel ranks may divide again, and ranks
    that divide the heads as many of each.
    """
    section, seq_len = config.parallelism, config.model.seq_len
    if section.cp_size == 1:
        return
    chunks = _chunks_per_rank(section, config.data.packing)
    divisor = chunks * section.cp_size
    if section.sequence_parallel and section.tp_size > 1:
        divisor = math.lcm(divisor, section.cp_size * section.tp_size)
    if seq_len % divisor:
        fits = seq_len // divisor * divisor or divisor
        share = "ranks divide each sequence" if chunks == 1 else f"each rank has {chunks} equal chunks of each sequence"
        yield (
            f"parallelism.cp_size: got {section.cp_size}, needs a model.seq_len that is a multiple of {divisor}, not "
            f"{seq_len}, since {share}; write seq_len = {fits}"
        )
    heads = config.model.num_kv_heads or config.model.num_heads
    if section.cp_method == "heads" and heads % (ranks := section.cp_size * section.tp_size):
        yield (
            f'parallelism.cp_method: got "heads", with which cp_size {section.cp_size} * tp_size {section.tp_size} = '
            f'{ranks} must divide the {heads} heads of keys and values; write cp_method = "gather"'
        )


def _largest_fit(config: Config, tp_size: int, world_size: int = 0) -> int:
    """Return the largest tp_size up to this one that cuts the model evenly and divides the ranks. gcd(n, 0) is n."""
    common = math.gcd(world_size, *(size for _, size, _ in _divided(config)))
    return largest_divisor(common, tp_size)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor up to `most`, or of huge ones a divisor that is found soon."""
    most = min(number, most)
    near = range(most, max(0, most - 10_000), -1)
    return next((size for size in near if number % size == 0), math.gcd(number, most))


def stages_per_rank(section: ParallelismConfig) -> int:
    """Return runs of neighbouring layers on each rank."""
    return section.pp_stages_per_rank or _STAGES[section.pp_schedule][2]


def evaluated_at_once(count: int, pp_size: int) -> int:
    """Return how many of a rank's `count` micro-batches a pipeline evaluates at a time: the fewest that divide `count`,
    suit every schedule, and leave ranks idle for less than a fifth of the time. It is `count` if there is no such part.
    """
    return next((part for part in range(4 * pp_size, count, pp_size) if count % part == 0), count)


def micro_batch_problems(config: Config, key: str, size: int, count: int) -> Iterator[str]:
    """Yield why the schedule cannot run the `count` micro-batches of a rank into which a global batch divides. `key`:
    the setting of [training] for the batch's `size`.
    """
    schedule, pp_size = config.parallelism.pp_schedule, config.parallelism.pp_size
    if pp_size == 1:
        return
    share = size // count
    rounds = max(1, count // pp_size)
    parts = f"{count} micro-batch{'es' * (count > 1)}"
    got = f"training.{key}: got {size}, which is {parts} a step, but "
    if schedule == "1f1b" and count < pp_size:
        yield f'{got}pp_schedule = "1f1b" needs at least pp_size {pp_size}; write {key} = {pp_size * share}'
    if schedule.startswith("interleaved") and count % rounds:
        yield (
            f'{got}pp_schedule = "{schedule}" runs them in {rounds} equal rounds (count / pp_size, rounded down); '
            f"write {key} = {rounds * pp_size * share}"
        )


def _stages_suit_schedule(config: Config) -> Iterator[str]:
    section = config.parallelism
    given = section.pp_stages_per_rank
    if section.pp_size == 1 or given is None:
        return
    fewest, most, usual = _STAGES[section.pp_schedule]
    if not fewest <= given <= (most or given):
        yield (
            f'parallelism.pp_stages_per_rank: got {given}, pp_schedule = "{section.pp_schedule}" '
            f"takes {fewest if most else f'{fewest} or more'}; write pp_stages_per_rank = {usual}"
        )


def _stages_have_layers(config: Config) -> Iterator[str]:
    section, num_layers = config.parallelism, config.model.num_layers
    per_rank = stages_per_rank(section)
    num_stages = section.pp_size * per_rank
    if section.pp_size > 1 and num_stages > num_layers:
        yield (
            f"parallelism.pp_size: got {section.pp_size}, times {per_rank} stages per rank this is "
            f"{num_stages} stages, but model.num_layers is {num_layers}, and each needs one; "
            f"write pp_size = {max(1, num_layers // per_rank)}, or num_layers = {num_stages}"
        )


def _split_backward_is_not_compiled(config: Config) -> Iterator[str]:
    schedule = config.parallelism.pp_schedule
    if config.parallelism.pp_size > 1 and config.model.compile and schedule.endswith("zero_bubble"):
        yield (
            f'parallelism.pp_schedule: got "{schedule}", which splits backward in two, and that of compiled blocks '
            '(model.compile = true) cannot be; write pp_schedule = "interleaved_1f1b", or compile = false'
        )


def torch_problems(config: Config) -> Iterator[str]:
    """Yield why this version of torch cannot run the schedule. A run's file still loads, to export it for example."""
    schedule, (major, minor) = config.parallelism.pp_schedule, torch_version()
    if config.parallelism.pp_size > 1 and schedule.endswith("zero_bubble") and (major, minor) < SPLITS_BACKWARD:
        yield (
            f'parallelism.pp_schedule: got "{schedule}", which splits backward in two, and torch {major}.{minor} '
            'cannot split that of our operations; install torch >= 2.13, or write pp_schedule = "interleaved_1f1b"'
        )


def _stages_keep_their_parameters(config: Config) -> Iterator[str]:
    section = config.parallelism
    if section.shard == "parameters" and section.pp_size > 1:
        yield (
            f'parallelism.shard: got "parameters" with pp_size {section.pp_size}, but a pipeline would gather each '
            'stage twice for every micro-batch; write shard = "gradients", or pp_size = 1'
        )
    if section.accumulate == "owner" and section.pp_size > 1:
        yield (
            f'parallelism.accumulate: got "owner" with pp_size {section.pp_size}, whose stages have several '
            'micro-batches under way at a time; write accumulate = "local", or pp_size = 1'
        )


def _stages_hand_over_known_shapes(config: Config) -> Iterator[str]:
    pp_size = config.parallelism.pp_size
    for name, size in axis_sizes(config.parallelism).items():
        if pp_size > 1 and size > 1 and name not in OWN_AXES:
            yield (
                f"parallelism.pp_size: got {pp_size} with {name}.size {size}, but a pipeline does not know the shapes "
                f"that a plugin's axis leaves; write pp_size = 1, or {name}.size = 1"
            )


MESH_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _modules_are_not_divided,
    _tensor_parallel_divides,
    _norms_are_whole,
    _ranks_divide_experts,
    _tokens_are_gathered_cheaply,
    _capped_scores_are_whole,
    _context_parallel_divides,
    _stages_suit_schedule,
    _stages_have_layers,
    _stages_keep_their_parameters,
    _stages_hand_over_known_shapes,
    _split_backward_is_not_compiled,
)
