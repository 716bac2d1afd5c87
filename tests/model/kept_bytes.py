"""The bytes that a block keeps from forward to backward, by arithmetic: docs/memory.md has them as a table."""

from megamix.model import sizes


def kept_bytes_per_token(config):
    """Return the bytes that one block keeps of each token, with activations in halves and weights left out.

    It is what our own operations keep (FP16 on a CPU) and what torch's fused kernels keep on a GPU. Compiled blocks
    keep a little less with "selective", and packed sequences on a CPU attention's output once more.
    """
    hidden, query, key = config.hidden_size, *_head_sizes(config)
    if config.recompute == "full":
        return 2 * hidden
    gates = 2 if config.activation == "swiglu" else 1
    numbers = 2 * hidden  # the residual stream, in front of each norm
    numbers += query + 2 * key + query  # query, key, value and output of attention
    if latent := config.latent_attention:
        numbers += (1 if config.recompute == "selective" else 2) * sum(_latents(config))  # as projected, and as normed
        if latent.value_dim < sizes.head_dim(config):
            numbers += config.num_heads * latent.value_dim  # the output without padding
    numbers += gates * sizes.ffn_hidden_size(config)
    if config.recompute == "none":
        numbers += 2 * hidden + sizes.ffn_hidden_size(config)  # outputs of norms and activation function
    if config.qk_norm != "none":
        numbers += query + key if config.recompute == "none" else 0  # as projected, and as normed and rotated
    masks = 2 * hidden if config.dropout else 0
    return 2 * numbers + 4 * _statistics(config) + masks


def _head_sizes(config):
    head_dim = sizes.head_dim(config)
    return config.num_heads * head_dim, sizes.num_kv_heads(config) * head_dim


def _latents(config):
    latent = config.latent_attention
    return [rank for rank in (latent.query_rank, latent.kv_rank) if rank] if latent else []


def _statistics(config):
    """FP32 numbers: of attention's softmax one a head, of RMSNorm one a row, of LayerNorm two."""
    of_norms = 2 * (2 if config.norm == "layernorm" else 1)
    of_heads = config.num_heads + sizes.num_kv_heads(config) if config.qk_norm != "none" else 0
    return config.num_heads + of_norms + of_heads + len(_latents(config))
