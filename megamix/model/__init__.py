"""A decoder-only transformer as plain modules: it knows nothing of optimizers, loss scales or ranks.

`transformer` is read first; `layers` and `rotary` are its leaves, `documents` keeps packed sequences apart, `ops`
decides how each operation is computed, `wide` and `wide_attention` compute half tensors in FP32 on a CPU,
`cross_entropy` is head and loss, `recompute` trades operations for memory, `generation` samples text with what
`key_value_cache` keeps of it, `flops` and `activation_bytes` count.
"""

from megamix.model.activation_bytes import kept_bytes_per_token
from megamix.model.flops import (
    dense_peak,
    flops_per_token,
    halved_flops_per_token,
    hardware_flops_per_token,
    matmul_weights,
    parameter_count,
)
from megamix.model.generation import generate
from megamix.model.ops import Ops, cpu_multiplies_fp16
from megamix.model.transformer import Block, Transformer

__all__ = [
    "Block",
    "Ops",
    "Transformer",
    "cpu_multiplies_fp16",
    "dense_peak",
    "flops_per_token",
    "generate",
    "halved_flops_per_token",
    "hardware_flops_per_token",
    "kept_bytes_per_token",
    "matmul_weights",
    "parameter_count",
]
