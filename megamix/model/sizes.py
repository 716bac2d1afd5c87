"""Sizes that follow from a ModelConfig: the defaults of what it leaves out.

Raises: ValueError where sizes do not divide. A configuration file is checked as a whole before it comes here; this is
for a ModelConfig made by hand.
"""

from megamix.config import ModelConfig, default_ffn_hidden_size


def head_dim(config: ModelConfig) -> int:
    if config.head_dim is not None:
        if config.position == "rotary" and config.head_dim % 2:
            raise ValueError(
                f"model.head_dim {config.head_dim} is odd, but rotary positions turn pairs: write "
                f'{config.head_dim + 1} or position = "learned"'
            )
        return config.head_dim
    size, rest = divmod(config.hidden_size, config.num_heads)
    if rest:
        fix = size * config.num_heads
        raise ValueError(
            f"model.hidden_size {config.hidden_size} must divide by num_heads {config.num_heads}: "
            f"write {fix} or {fix + config.num_heads}"
        )
    if config.position == "rotary" and size % 2:
        raise ValueError(
            f"model.hidden_size {config.hidden_size} over num_heads {config.num_heads} is a head of {size}, but rotary "
            f'positions turn pairs: write {(size + 1) * config.num_heads} or position = "learned"'
        )
    return size


def num_kv_heads(config: ModelConfig) -> int:
    if config.num_kv_heads is None:
        return config.num_heads
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"model.num_kv_heads {config.num_kv_heads} must divide num_heads {config.num_heads}: write 1 or "
            f"{config.num_heads}"
        )
    return config.num_kv_heads


def ffn_hidden_size(config: ModelConfig) -> int:
    """Inner width of the feed-forward part."""
    if config.ffn_hidden_size is not None:
        return config.ffn_hidden_size
    return default_ffn_hidden_size(config.activation, config.hidden_size)


def qkv_bias(config: ModelConfig) -> bool:
    return config.bias if config.qkv_bias is None else config.qkv_bias
