"""A decoder-only transformer as plain modules: it knows nothing of optimizers, loss scales or ranks.

`transformer` is read first; `layers` are its leaves, `ops` decides how each operation is computed, `wide` and
`wide_attention` compute half tensors in FP32 on a CPU, `cross_entropy` is the loss, `generation` samples text, with
what `key_value_cache` keeps of it, and `flops` counts.
"""

from megamix.model.flops import dense_peak, flops_per_token, halved_flops_per_token, matmul_weights, parameter_count
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
    "matmul_weights",
    "parameter_count",
]
