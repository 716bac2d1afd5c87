from typing import Any

import pytest
import torch
from torch import nn

from megamix.config import ModelConfig
from megamix.model.flops import dense_peak, flops_per_token, halved_flops_per_token, matmul_weights, parameter_count
from megamix.model.transformer import Transformer

SIZES = {"vocab_size": 97, "seq_len": 12, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"activation": "gelu", "position": "learned", "norm": "layernorm", "bias": True},
    {"num_kv_heads": 2, "tie_embeddings": False, "norm": "layernorm"},
    {"num_kv_heads": 1, "bias": True, "ffn_hidden_size": 40, "tie_embeddings": False},
]


def config_of(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("changes", CONFIGS)
def test_counts_equal_those_of_the_module(changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    model = Transformer(config)
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    linear = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)]
    assert matmul_weights(config) == sum(linear)


def test_the_12_m_gpt_counted_by_hand() -> None:
    config = ModelConfig(vocab_size=4096, seq_len=256, hidden_size=384, num_layers=6, num_heads=6)
    # 8/3 * 384 = 1024. A block: 4 * 384 * 384 + 3 * 384 * 1024 = 1,769,472; head 4096 * 384 = 1,572,864.
    assert matmul_weights(config) == 6 * 1_769_472 + 1_572_864 == 12_189_696
    assert parameter_count(config) == 12_189_696 + 13 * 384
    assert flops_per_token(config) == 6 * 12_189_696 + 12 * 6 * 6 * 64 * 256
    assert halved_flops_per_token(config) == 6 * 12_189_696 + 6 * 6 * 6 * 64 * 256


def test_defaults_of_the_inner_width() -> None:
    assert Transformer(config_of(hidden_size=200)).blocks[0].feed_forward.up.out_features == 576  # 533.3, up to 64s
    assert Transformer(config_of(activation="gelu")).blocks[0].feed_forward.up.out_features == 128


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("AMD EPYC", None),
    ],
)
def test_peaks_are_known_by_name_and_dtype_or_not_at_all(name: str, peak: float | None) -> None:
    assert dense_peak(name, torch.float16) == dense_peak(name, torch.bfloat16) == peak
    assert dense_peak(name, torch.float32) is None
