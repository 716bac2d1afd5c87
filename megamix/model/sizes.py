"""Sizes that follow from a ModelConfig, and the peak operations of devices. Importing this module imports no torch."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from megamix.config import (
    DecoderConfig,
    ExpertsConfig,
    FirstLayers,
    ModelConfig,
    RopeConfig,
    TransformersConfig,
    WindowConfig,
    default_ffn_hidden_size,
)

if TYPE_CHECKING:
    import torch


def head_dim(config: ModelConfig) -> int:
    """Return the elements of one head in attention's kernels, which have one number for query, key and value."""
    if latent := config.latent_attention:
        return max(latent.unrotated_dim + latent.rotary_dim, latent.value_dim)
    return config.head_dim or config.hidden_size // config.num_heads


def rotary_dim(config: ModelConfig) -> int:
    """Return the elements of a head that rotary positions turn."""
    if config.latent_attention:
        return config.latent_attention.rotary_dim
    return (config.rope and config.rope.dim) or head_dim(config)


def rotates(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has rotary positions."""
    return config.rope is not None and layer not in config.rope.unrotated_layers


def window(config: ModelConfig, layer: int) -> int:
    """Return how many keys a query of a layer sees, its own included; 0 for all."""
    return config.window.sizes[layer % len(config.window.sizes)] if config.window else 0


def has_windows(config: ModelConfig) -> bool:
    return config.window is not None and any(config.window.sizes)


def attention_flops(config: ModelConfig, layer: int, elements: int) -> int:
    """Return the operations of a token's scores and weighted sums, forward and backward. `elements`: of all heads of a
    query and of a value.
    """
    # For all positions, and for twice the keys of a window: the causal half is not subtracted.
    seen = min(window(config, layer) or config.seq_len, config.seq_len)
    return 6 * elements * (2 * config.seq_len - seen) * seen // config.seq_len


def is_gated(activation: str) -> bool:
    """Return whether the feed-forward part multiplies two projections."""
    return activation in ("swiglu", "geglu")


def num_kv_heads(config: ModelConfig) -> int:
    return config.num_kv_heads or config.num_heads


def ffn_hidden_size(config: ModelConfig) -> int:
    """Return the inner width of the feed-forward part."""
    return config.ffn_hidden_size or default_ffn_hidden_size(config.activation, config.hidden_size)


def experts(config: ModelConfig, layer: int) -> ExpertsConfig | None:
    """Return the experts of a layer; None for a layer without."""
    section = config.experts
    return section if section is not None and layer >= section.dense_layers else None


def qkv_bias(config: ModelConfig) -> bool:
    return config.bias if config.qkv_bias is None else config.qkv_bias


def mlp_bias(config: ModelConfig) -> bool:
    return config.bias if config.mlp_bias is None else config.mlp_bias


def branch_end_std(config: ModelConfig) -> float:
    """Return the standard deviation of the initial weights at the end of a branch. With scaled_init it is init_std /
    sqrt(2 * num_layers) (GPT-2, Radford et al. 2019, section 2.3). In transformers' Llama and Qwen it is init_std, as
    for all other weights.
    """
    # 2 * num_layers branches add up in the residual stream: without the factor its variance would grow with the depth.
    return config.init_std / math.sqrt(2 * config.num_layers if config.scaled_init else 1)


def fewest_params(config: ModelConfig) -> int:
    """Return the number of parameters in matrices and in tables of tokens. It is a lower bound of the number of all
    parameters, and nearly as large.
    """
    with_experts = expert_layers(config)
    inner, routers = (config.num_layers - with_experts) * ffn_hidden_size(config), 0
    if config.experts is not None:
        inner += with_experts * (config.experts.shared_ffn_hidden_size or 0)
        routers = with_experts * config.experts.num_experts
    others = table_params(config) + config.hidden_size * (_num_matrices(config) * inner + routers)
    return others + expert_params(config) + config.num_layers * _attention_params(config)


def table_params(config: ModelConfig) -> int:
    """Return the number of parameters in the tables of tokens, the head's included."""
    return config.hidden_size * config.vocab_size * (1 if config.tie_embeddings else 2)


def rank_params(config: ModelConfig, parts: int, ep_size: int) -> float:
    """Return `fewest_params` of one rank, on average. `parts`: tensor- and pipeline-parallel ranks that divide all
    layers. Expert-parallel ranks divide the experts on top.
    """
    experts = expert_params(config)
    return (fewest_params(config) - experts + experts / ep_size) / parts


def expert_layers(config: ModelConfig) -> int:
    return 0 if config.experts is None else max(0, config.num_layers - config.experts.dense_layers)


def expert_params(config: ModelConfig) -> int:
    """Return the elements of all experts' matrices, without shared experts."""
    if (section := config.experts) is None:
        return 0
    inner = expert_layers(config) * section.num_experts * section.ffn_hidden_size
    return config.hidden_size * _num_matrices(config) * inner


def _num_matrices(config: ModelConfig) -> int:
    return 3 if is_gated(config.activation) else 2


def _attention_params(config: ModelConfig) -> int:
    hidden_size, num_heads = config.hidden_size, config.num_heads
    if (latent := config.latent_attention) is None:
        return 2 * hidden_size * head_dim(config) * (num_heads + num_kv_heads(config))
    query = num_heads * (latent.unrotated_dim + latent.rotary_dim)
    query_rank, kv_width = latent.query_rank, latent.kv_rank + latent.rotary_dim
    return (
        (hidden_size * query if query_rank is None else query_rank * (hidden_size + query))
        + hidden_size * (kv_width + num_heads * latent.value_dim)
        + latent.kv_rank * num_heads * (latent.unrotated_dim + latent.value_dim)
    )


def attention_scale(config: ModelConfig) -> float:
    """Return the factor of the products of queries and keys."""
    latent = config.latent_attention
    size = latent.unrotated_dim + latent.rotary_dim if latent else head_dim(config)
    return size**-0.5 if config.attention_scale is None else config.attention_scale


def _rope(config: ModelConfig) -> RopeConfig | None:
    if config.rope is None:
        return None
    unrotated = tuple(sorted({*config.rope.unrotated_layers}))
    return config.rope.model_copy(update={"dim": rotary_dim(config), "unrotated_layers": unrotated})


def _window(config: ModelConfig) -> WindowConfig | None:
    """Return the window of each layer, and theta of those with one; None: no layer has one."""
    if config.window is None or not any(config.window.sizes):
        return None
    theta, rope = config.window.rope_theta, config.rope
    if theta is None and rope is not None and rope.scaling is None:  # else these layers are stretched as the others are
        theta = rope.theta
    sizes = tuple(window(config, layer) for layer in range(config.num_layers))
    return WindowConfig(sizes=sizes, rope_theta=theta)


def effective(config: ModelConfig) -> dict[str, Any]:
    """Return the section's values; values that are not set, or that could be written otherwise, are replaced by those
    in effect.
    """
    values = (head_dim, num_kv_heads, ffn_hidden_size, qkv_bias, mlp_bias, attention_scale)
    tables = {"rope": _rope(config), "window": _window(config)}
    return dict(config) | {value.__name__: value(config) for value in values} | tables


# Dense peak of FP16 and BF16 products in operations per second, by the driver's name of the device. A slice of a device
# (MIG) has a longer name and no entry here, because the name does not say how much of the peak it has.
DENSE_PEAKS = (
    (r"NVIDIA H100 \d+GB HBM\d\w*", 989.4e12),
    (r"NVIDIA H100 PCIe", 756e12),
    (r"NVIDIA H100 NVL", 835e12),
    (r"NVIDIA H200", 989.4e12),
    (r"(NVIDIA )?A100-(SXM\d|PCIE)-\d+GB|NVIDIA A100 \d+GB PCIe", 312e12),
)


def dense_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """Return a device's peak operations per second of products in `dtype`; None if DENSE_PEAKS has no figure for it."""
    import torch

    if dtype not in (torch.float16, torch.bfloat16):
        return None
    return next((peak for pattern, peak in DENSE_PEAKS if re.fullmatch(pattern, device_name)), None)


def num_repeated(config: DecoderConfig | TransformersConfig) -> int:
    """Return how many layers backward computes again as a whole."""
    return sum(is_repeated(config, layer) for layer in range(config.num_layers))


def is_repeated(config: DecoderConfig | TransformersConfig, layer: int) -> bool:
    """Return whether backward computes the whole block of a layer again."""
    if not isinstance(config.recompute, FirstLayers):
        return config.recompute == "full"
    full = config.recompute.full
    return layer < (full if full >= 1 else full * config.num_layers)
