"""Checks of the mesh of ranks: what its sizes must divide and multiply to, and what a pipeline's schedule takes."""

import math
from collections.abc import Callable, Iterator

from megamix.config.model_and_data import default_ffn_hidden_size
from megamix.config.sections import Config, ParallelismConfig

# Each schedule's fewest and most stages per rank, and what it takes where the key is not set.
_STAGES = {
    "1f1b": (1, 1, 1),
    "interleaved_1f1b": (2, None, 2),
    "interleaved_zero_bubble": (1, None, 2),
    "zbv_zero_bubble": (2, 2, 2),
}


def data_parallel_size(config: Config, world_size: int) -> int:
    """Return the ranks that read different data: what tensor and pipeline parallelism leave, at least one."""
    return max(1, world_size // (config.parallelism.tp_size * config.parallelism.pp_size))


def mesh_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield why this number of ranks is no mesh of the configured sizes."""
    section = config.parallelism
    dp_size, tp_size, pp_size = section.dp_size, section.tp_size, section.pp_size
    model_size = tp_size * pp_size
    if world_size % model_size:
        yield (
            f"parallelism.tp_size: got {tp_size}, tp_size {tp_size} * pp_size {pp_size} = {model_size} must divide the "
            f"number of ranks, but {world_size} were started; write tp_size = "
            f"{_largest_fit(config, tp_size, world_size)} and pp_size = 1, or start {model_size}"
        )
    elif dp_size is not None and dp_size * model_size != world_size:
        yield (
            f"parallelism.dp_size: got {dp_size}, parallel sizes must multiply to the number of ranks: "
            f"pp {pp_size} * dp {dp_size} * tp {tp_size} = {dp_size * model_size}, but {world_size} were started; "
            f"write dp_size = {world_size // model_size} or start {dp_size * model_size}"
        )


def _tensor_parallel_divides(config: Config) -> Iterator[str]:
    """Every layer is cut in tp_size equal parts: whole heads, columns of the feed-forward part, rows of the table."""
    tp_size = config.parallelism.tp_size
    for key, size, share in _divided(config):
        if size % tp_size:
            yield (
                f"parallelism.tp_size: got {tp_size}, must divide model.{key} {size}, since each rank has its own "
                f"{share}; write tp_size = {_largest_fit(config, tp_size)}"
            )


def _divided(config: Config) -> Iterator[tuple[str, int, str]]:
    """(key, size, what a rank gets a share of) of everything that tensor parallelism cuts."""
    model = config.model
    yield "num_heads", model.num_heads, "query heads"
    if model.num_kv_heads is not None:
        yield "num_kv_heads", model.num_kv_heads, "key and value heads"
    ffn_hidden_size = model.ffn_hidden_size or default_ffn_hidden_size(model.activation, model.hidden_size)
    yield "ffn_hidden_size", ffn_hidden_size, "columns"
    yield "vocab_size", model.vocab_size, "rows of the embedding table"
    if config.parallelism.sequence_parallel:
        yield "seq_len", model.seq_len, "positions (sequence_parallel = false keeps them whole)"


def _largest_fit(config: Config, tp_size: int, world_size: int = 0) -> int:
    """The largest tp_size up to this one that cuts the model evenly and divides the ranks. gcd(n, 0) is n."""
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


def micro_batch_problems(config: Config, dp_size: int) -> Iterator[str]:
    """Yield why the schedule cannot run the micro-batches into which the global batch divides."""
    section, training = config.parallelism, config.training
    schedule, pp_size = section.pp_schedule, section.pp_size
    if pp_size == 1:
        return
    share = training.micro_batch_size * dp_size
    count = training.global_batch_size // share
    rounds = max(1, count // pp_size)
    got = f"training.global_batch_size: got {training.global_batch_size}, which is {count} micro-batches a step, but "
    if schedule == "1f1b" and count < pp_size:
        yield f'{got}pp_schedule = "1f1b" needs at least pp_size {pp_size}; write global_batch_size = {pp_size * share}'
    if schedule.startswith("interleaved") and count % rounds:
        yield (
            f'{got}pp_schedule = "{schedule}" runs them in {rounds} equal rounds (count / pp_size, rounded down); '
            f"write global_batch_size = {rounds * pp_size * share}"
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


MESH_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _tensor_parallel_divides,
    _stages_suit_schedule,
    _stages_have_layers,
    _stages_keep_their_parameters,
    _split_backward_is_not_compiled,
)
