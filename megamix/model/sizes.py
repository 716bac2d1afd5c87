"""Sizes that follow from a ModelConfig, and counts of parameters and floating-point operations by them."""

import re
from typing import Any

import torch

from megamix.config import ModelConfig, default_ffn_hidden_size


def head_dim(config: ModelConfig) -> int:
    """Return what one head has of the width."""
    return config.head_dim or config.hidden_size // config.num_heads


def num_kv_heads(config: ModelConfig) -> int:
    return config.num_kv_heads or config.num_heads


def ffn_hidden_size(config: ModelConfig) -> int:
    """Inner width of the feed-forward part."""
    return config.ffn_hidden_size or default_ffn_hidden_size(config.activation, config.hidden_size)


def qkv_bias(config: ModelConfig) -> bool:
    return config.bias if config.qkv_bias is None else config.qkv_bias


def effective(config: ModelConfig) -> dict[str, Any]:
    """Return the section's values, those that are not set replaced by what they come to."""
    filled = {size.__name__: size(config) for size in (head_dim, num_kv_heads, ffn_hidden_size, qkv_bias)}
    return dict(config) | filled


# Dense peak of FP16 and BF16 products in operations per second, by the name the driver gives the device. A slice of a
# device (MIG) has a longer name and no entry: its share of the peak is not in its name.
DENSE_PEAKS = (
    (r"NVIDIA H100 \d+GB HBM\d\w*", 989.4e12),
    (r"NVIDIA H100 PCIe", 756e12),
    (r"NVIDIA H100 NVL", 835e12),
    (r"NVIDIA H200", 989.4e12),
    (r"(NVIDIA )?A100-(SXM\d|PCIE)-\d+GB|NVIDIA A100 \d+GB PCIe", 312e12),
)


def matmul_weights(config: ModelConfig) -> int:
    """Weights that multiply every token: projections, feed-forward part and head; no lookups, norms or biases."""
    heads = config.num_heads + num_kv_heads(config)
    attention = 2 * config.hidden_size * heads * head_dim(config)
    feed_forward = (3 if config.activation == "swiglu" else 2) * config.hidden_size * ffn_hidden_size(config)
    return config.num_layers * (attention + feed_forward) + config.vocab_size * config.hidden_size


def parameter_count(config: ModelConfig) -> int:
    """Return all parameters, shared ones once."""
    lookups = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    if config.position == "learned":
        lookups += config.seq_len * config.hidden_size
    norm = config.hidden_size * (2 if config.norm == "layernorm" and config.bias else 1)
    head_norms = 2 * config.num_layers * head_dim(config) if config.qk_norm else 0
    norms = (2 * config.num_layers + 1) * norm + head_norms
    biases = (config.num_heads + 2 * num_kv_heads(config)) * head_dim(config) if qkv_bias(config) else 0
    if config.bias:  # of attention's output and of the feed-forward part
        inner = (2 if config.activation == "swiglu" else 1) * ffn_hidden_size(config)
        biases += config.hidden_size + inner + config.hidden_size
    return matmul_weights(config) + lookups + norms + config.num_layers * biases


def flops_per_token(config: ModelConfig) -> int:
    """Forward and backward of one token in a full sequence: 6 per weight that multiplies it and 12 L H Q T for
    attention (layers, heads, head_dim, seq_len); the causal half is not subtracted, recompute is never counted."""
    attention = 12 * config.num_layers * config.num_heads * head_dim(config) * config.seq_len
    return 6 * matmul_weights(config) + attention


def dense_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak operations per second of products in `dtype`, or None where no published figure is known here."""
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    return next((peak for pattern, peak in DENSE_PEAKS if re.fullmatch(pattern, device_name)), None)
