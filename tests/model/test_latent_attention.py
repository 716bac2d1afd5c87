"""Latent attention computes what transformers' DeepSeek-V3 computes; its texts with a cache, its documents and its
counts are those of the whole. What does not go together is refused in one line.
"""

import math

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from megamix.config import ModelConfig, config_from_dict, model_problems
from megamix.hf.links import format_of
from megamix.model.attention import LatentAttention
from megamix.model.context import KeyValueCache
from megamix.model.family import flops_per_token, parameter_count
from megamix.model.layers import RotaryTable
from megamix.model.ops import Ops
from megamix.model.sizes import fewest_params
from megamix.model.transformer import Transformer
from tests.config.test_errors import changed, problems_of

LATENT = {"kv_rank": 12, "query_rank": 20, "unrotated_dim": 8, "rotary_dim": 4, "value_dim": 10}
SIZES = {
    "vocab_size": 61, "seq_len": 24, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "norm_eps": 1e-6,
}  # fmt: skip
YARN = {"rule": "yarn", "factor": 4.0, "original_seq_len": 8, "attention_factor": 1.0}
MSCALE = 0.1 * math.log(4) + 1  # DeepSeek's YaRN puts it into the scale, twice
CASES = {  # our keys, and transformers'
    "latents": ({}, {}),
    "queries without one": ({"latent_attention": LATENT | {"query_rank": None}}, {"q_lora_rank": None}),
    "biases": ({"bias": True}, {"attention_bias": True}),
    "wide values": ({"latent_attention": LATENT | {"value_dim": 16}}, {"v_head_dim": 16}),
    "yarn": (
        {"rope": {"scaling": YARN}, "attention_scale": MSCALE**2 / math.sqrt(12)},
        {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0,
                "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            }
        },
    ),
}  # fmt: skip


def config_of(**changes):
    return ModelConfig(**(SIZES | {"latent_attention": LATENT} | changes))


def theirs_of(config, **changes):
    latent = config.latent_attention
    keys = {
        "hidden_size": config.hidden_size, "num_attention_heads": config.num_heads, "num_key_value_heads": 4,
        "kv_lora_rank": latent.kv_rank, "q_lora_rank": latent.query_rank, "v_head_dim": latent.value_dim,
        "qk_nope_head_dim": latent.unrotated_dim, "qk_rope_head_dim": latent.rotary_dim, "rope_interleave": False,
        "max_position_embeddings": config.seq_len, "attn_implementation": "eager",
    }  # fmt: skip
    theirs = DeepseekV3Attention(DeepseekV3Config(**(keys | changes)), 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return theirs


def weights_of(theirs, latent):
    """Return their weights by our names."""
    ours, names = {}, {
        "q_proj": "query", "q_a_proj": "query_down", "q_a_layernorm": "query_norm", "q_b_proj": "query",
        "kv_a_layernorm": "kv_norm", "o_proj": "out",
    }  # fmt: skip
    for name, weight in theirs.state_dict().items():
        module, leaf = name.split(".")
        if module == "kv_a_proj_with_mqa":
            ours[f"kv_down.{leaf}"], ours[f"rotated_key.{leaf}"] = weight.split((latent.kv_rank, latent.rotary_dim))
        elif module == "kv_b_proj":
            heads = weight.unflatten(0, (4, -1)).split((latent.unrotated_dim, latent.value_dim), 1)
            ours["key.weight"], ours["value.weight"] = (part.flatten(0, 1) for part in heads)
        else:
            ours[f"{names[module]}.{leaf}"] = weight
    return ours


@pytest.mark.parametrize("case", CASES)
def test_the_outputs_are_those_of_deepseek_v3(case):
    torch.manual_seed(0)
    changes, their_changes = CASES[case]
    config = config_of(**changes)
    latent = config.latent_attention
    theirs = theirs_of(config, **their_changes)
    ours = LatentAttention(config, latent, Ops(), 0)
    ours.load_state_dict(weights_of(theirs, latent))
    x = torch.randn(2, config.seq_len, config.hidden_size)
    positions = torch.arange(config.seq_len)[None]
    mask = torch.full((config.seq_len, config.seq_len), -math.inf).triu(1)[None, None]
    table = RotaryTable(config.seq_len, latent.rotary_dim, config.rope.theta, config.rope.scaling)
    with torch.no_grad():
        want, _ = theirs(x, DeepseekV3RotaryEmbedding(theirs.config)(x, positions), mask)
        got = ours(x, table(config.seq_len), None, None)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_cache_gives_the_logits_of_the_whole_text_and_packed_documents_those_alone():
    torch.manual_seed(0)
    model = Transformer(config_of(init_std=0.3)).double()
    tokens, cache = torch.randint(61, (3, 12)), KeyValueCache(2, 12)
    with torch.no_grad():
        whole = model(tokens)
        for start, end in ((0, 4), (4, 5), (5, 12)):
            last = model(tokens[:, start:end], cache=cache)[:, 0]
            assert torch.allclose(last, whole[:, end - 1], rtol=0, atol=1e-10)
    tokens, positions = torch.randint(61, (1, 24)), torch.cat((torch.arange(9), torch.arange(15)))[None]
    with torch.no_grad():
        alone = torch.cat((model(tokens[:, :9]), model(tokens[:, 9:])), 1)
        assert torch.allclose(model(tokens, positions=positions), alone, rtol=0, atol=1e-10)
        assert not torch.allclose(model(tokens), alone, rtol=0, atol=1e-2)


def test_unrotated_layers_and_learned_positions_turn_nothing():
    for changes in ({"rope": False}, {"rope": {"unrotated_layers": (0, 1)}}):
        torch.manual_seed(0)
        model = Transformer(config_of(**changes, init_std=0.3)).double()
        attention = model.blocks[0].attention
        x = torch.randn(1, 24, 32, dtype=torch.float64)
        rotary = None if model.rotary is None else model.rotary(24)
        # Without positions the order of earlier tokens does not matter to the last one.
        swapped = x[:, [*reversed(range(23)), 23]]
        one, other = (attention(hidden, rotary, None, None)[:, -1] for hidden in (x, swapped))
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("query_rank", [None, 20])
def test_parameters_and_operations_are_those_counted_by_hand(query_rank):
    config = config_of(latent_attention=LATENT | {"query_rank": query_rank}, tie_embeddings=False)
    query = 32 * 48 if query_rank is None else 32 * 20 + 20 * 48
    block = query + 32 * (12 + 4) + 12 * 4 * (8 + 10) + 40 * 32 + 3 * 32 * 128
    norms = 2 * (2 * 32 + 12 + (query_rank or 0)) + 32
    assert fewest_params(config) == 2 * block + 2 * 61 * 32
    assert parameter_count(config) == 2 * block + 2 * 61 * 32 + norms
    assert flops_per_token(config) == 6 * (2 * block + 61 * 32) + 2 * 6 * 4 * (12 + 10) * 24
    assert sum(table.nbytes for table in Transformer(config).buffers()) == 4 * 24 * 4


def test_what_does_not_go_together_is_refused_and_right_sizes_need_no_other():
    said = "model.qkv_bias: got false, but [model.latent_attention] has no such thing; leave qkv_bias or"
    for latent, keys, told in (
        ({}, {"qkv_bias": False}, said),
        ({"rotary_dim": 5}, {}, "model.latent_attention.rotary_dim: got 5, but rotary positions turn pairs and need"),
        ({"kv_rank": 0}, {}, "model.latent_attention.kv_rank: got 0, must be greater than 0; write"),
    ):
        (problem,) = problems_of(changed(model={"latent_attention": LATENT | latent, **keys}))
        assert problem.startswith(told)
    (problem,) = model_problems(config_of(qkv_bias=False))
    assert problem.startswith(said)
    right = changed(model={"latent_attention": LATENT, "hidden_size": 30, "num_heads": 4})
    assert config_from_dict(right).model.head_dim is None


def test_no_format_of_hugging_face_has_it():
    with pytest.raises(ValueError, match=r"model\.latent_attention is .*kv_rank=12.*, \w+ has None"):
        format_of(config_of())
