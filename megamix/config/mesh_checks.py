"""Checks of the mesh of ranks: what its sizes must divide, and what they must multiply to."""

import math
from collections.abc import Iterator

from megamix.config.model_section import default_ffn_hidden_size
from megamix.config.sections import Config


def data_parallel_size(config: Config, world_size: int) -> int:
    """The ranks that read different data: what tensor and pipeline parallelism leave, at least one."""
    return max(1, world_size // (config.parallelism.tp_size * config.parallelism.pp_size))


def mesh_problems(config: Config, world_size: int) -> Iterator[str]:
    """Why this number of ranks is no mesh of the configured sizes."""
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


def tensor_parallel_divides(config: Config) -> Iterator[str]:
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
    return max(size for size in range(1, tp_size + 1) if common % size == 0)
