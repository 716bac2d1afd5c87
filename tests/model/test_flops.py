"""Numbers of parameters are the published ones, FLOPs those counted by hand; a device's peak is known by name or not at
all.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from megamix.config import ModelConfig, check_world_size, default_ffn_hidden_size, load_config, ranks_along
from megamix.model.family import flops_per_token, parameter_count
from megamix.model.sizes import dense_peak
from megamix.model.transformer import Transformer
from megamix.parallel.stages import plan_stages

SIZES = {"vocab_size": 97, "seq_len": 12, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
CONFIGS = [
    {"activation": "gelu", "rope": False, "norm": "layernorm", "bias": True},
    {"num_kv_heads": 1, "bias": True, "ffn_hidden_size": 40, "tie_embeddings": False},
    {"num_kv_heads": 2, "head_dim": 20, "qk_norm": "head"},
    {"qkv_bias": False, "bias": True},
    {"activation": "geglu", "norm": "rmsnorm_1p", "norm_place": "both", "attention_gate": True},
]
# As their makers publish them; transformers counts the same.
PUBLISHED = {
    "gpt2-124m": 124_439_808 + 47 * 768,  # its table has 50,304 rows, not 50,257
    "llama-1.3b": 1_345_423_360,  # Sheared-LLaMA's
    "llama3.2-1b": 1_235_814_400,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "gemma3-270m": 268_098_176,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmoe-1b-7b": 6_919_161_856,
}
CONFIG_FILES = Path(__file__).parents[2] / "configs"


def config_of(**changes):
    return ModelConfig(**SIZES | changes)


@pytest.mark.parametrize("changes", CONFIGS)
def test_counts_equal_those_of_the_module(changes):
    config = config_of(**changes)
    model = Transformer(config)
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    linear = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)]
    attention = [block.attention.query.out_features * config.seq_len for block in model.blocks]
    assert flops_per_token(config) == 6 * sum(linear) + 12 * sum(attention)


def test_the_12_m_gpt_counted_by_hand():
    config = ModelConfig(vocab_size=4096, seq_len=256, hidden_size=384, num_layers=6, num_heads=6)
    # 8/3 * 384 = 1024. A block: 4 * 384 * 384 + 3 * 384 * 1024 = 1,769,472; head 4096 * 384 = 1,572,864.
    assert 6 * 1_769_472 + 1_572_864 == 12_189_696
    assert parameter_count(config) == 12_189_696 + 13 * 384
    assert flops_per_token(config) == 6 * 12_189_696 + 12 * 6 * 6 * 64 * 256


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_configuration_has_its_family_s_published_parameters_and_starts_on_8_devices(name, count):
    config = load_config(CONFIG_FILES / f"{name}.toml")
    with torch.device("meta"):
        model = Transformer(config.model.model_copy(update={"compile": False}))  # compile loads the compiler
    assert parameter_count(config.model) == sum(parameter.numel() for parameter in model.parameters()) == count
    copy = ranks_along(config.parallelism, "tp") * ranks_along(config.parallelism, "pp")
    assert check_world_size(config, max(8, copy)) == []


def test_a_window_counts_the_pairs_of_query_and_key_that_it_leaves():
    whole, windowed = (flops_per_token(config_of(window=window)) for window in (None, {"sizes": (5, 0, 0)}))
    # A query of the first layer sees 1, 2, 3, 4 and then 5 keys of 12; each pair costs four products and their
    # gradients, 12 operations an element, and what is counted is twice the causal half less the diagonal's.
    pairs = 1 + 2 + 3 + 4 + 8 * 5
    assert whole - windowed == 12 * 32 * (12 - (2 * pairs - 5) / 12)


def test_the_70_b_configuration_s_layout_fits_its_comment():
    config = load_config(CONFIG_FILES / "llama3.1-70b.toml")
    stages = plan_stages(config.model, ranks_along(config.parallelism, "pp"), 1)
    largest = max(stage.params for stage in stages) / ranks_along(config.parallelism, "tp")
    assert [round(largest * (4 + 12 / dp_size) / 1e9) for dp_size in (1, 2, 16)] == [36, 23, 11]
    assert {len(stage.layers) for stage in stages} == {19, 20, 21}


def test_defaults_of_the_inner_width():
    assert default_ffn_hidden_size("swiglu", 200) == 576  # 533.3, up to 64s
    assert default_ffn_hidden_size("gelu", 32) == 128


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989.4e12),
        ("A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_peaks_are_known_by_name_and_dtype_or_not_at_all(name, peak):
    assert dense_peak(name, torch.float16) == dense_peak(name, torch.bfloat16) == peak
    assert dense_peak(name, torch.float32) is None
