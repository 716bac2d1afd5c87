"""Tiny models of each family from transformers, the same in our keys, and their weights copied by hand.

The copy is written out here, and not taken from megamix's import, so that the model is judged by itself.
"""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megamix.config import ModelConfig
from megamix.model.transformer import Transformer

SEQ_LEN, VOCAB = 48, 83
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

# Shapes that differ in every size that can: heads over hidden_size, groups, inner width, layers, tied or not.
SHAPES = {
    "square": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 72, "tie_embeddings": True},
    "grouped": {
        "hidden_size": 48, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "ffn_hidden_size": 40,
        "tie_embeddings": False,
    },
    "wide heads": {
        "hidden_size": 24, "num_layers": 1, "num_heads": 4, "num_kv_heads": 1, "head_dim": 16, "ffn_hidden_size": 64,
        "tie_embeddings": True,
    },
}  # fmt: skip
NORMS = ("norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
LLAMA = {"norm_eps": 1e-6, "rope_theta": 500000.0, "scaled_init": False}

# family: (what our configuration adds to a shape, the shapes that the family can have)
FAMILIES = {
    "gpt2": ({"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "bias": True}, ["square"]),
    "llama2": ({**LLAMA, "rope_theta": 10000.0}, [*SHAPES]),
    "llama2 stretched": ({**LLAMA, "rope_scaling": {"rule": "linear", "factor": 3.0}}, ["grouped"]),
    "llama3": (
        {**LLAMA, "rope_scaling": {"rule": "llama3", "factor": 8.0, **LLAMA3, "original_seq_len": 16}},
        [*SHAPES],
    ),
    "qwen2": ({**LLAMA, "qkv_bias": True}, ["square", "grouped"]),
    "qwen3": ({**LLAMA, "qk_norm": True}, [*SHAPES]),
}
CASES = [(family, shape) for family, (_, shapes) in FAMILIES.items() for shape in shapes]


def config_of(family, shape):
    return ModelConfig(vocab_size=VOCAB, seq_len=SEQ_LEN, **SHAPES[shape], **FAMILIES[family][0])


def pair(family, shape):
    """(ours, transformers') in FP32 with the same weights, all of them random: norms and biases too."""
    config = config_of(family, shape)
    torch.manual_seed(0)
    theirs = _theirs(family, config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if name.endswith(NORMS) else 0.0, 0.2)
    ours = Transformer(config)
    weights = {name: weight.detach().clone() for name, weight in theirs.state_dict().items()}
    ours.load_state_dict(_from_gpt2(weights) if family == "gpt2" else _from_llama(weights))
    return ours.eval(), theirs


def _theirs(family, config):
    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_positions=SEQ_LEN,
                n_embd=config.hidden_size,
                n_layer=config.num_layers,
                n_head=config.num_heads,
                n_inner=config.ffn_hidden_size,
                tie_word_embeddings=config.tie_embeddings,
            )
        )
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= {"rope_type": scaling.rule, "factor": scaling.factor}
        if scaling.rule == "llama3":
            rope |= {**LLAMA3, "original_max_position_embeddings": scaling.original_seq_len}
    kinds = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    make_config, make_model = kinds.get(family, (LlamaConfig, LlamaForCausalLM))
    head_dim = {} if family == "qwen2" else {"head_dim": config.head_dim or config.hidden_size // config.num_heads}
    return make_model(
        make_config(
            vocab_size=VOCAB,
            max_position_embeddings=SEQ_LEN,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads or config.num_heads,
            intermediate_size=config.ffn_hidden_size,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters=rope,
            **head_dim,
        )
    )


def _from_llama(weights):
    renamed = {}
    for name, weight in weights.items():
        for theirs, ours in [
            ("model.embed_tokens.", "embedding."), ("model.layers.", "blocks."), ("model.norm.", "norm."),
            ("lm_head.", "head."), ("input_layernorm.", "attention_norm."),
            ("post_attention_layernorm.", "feed_forward_norm."), ("self_attn.", "attention."), ("q_proj.", "query."),
            ("k_proj.", "key."), ("v_proj.", "value."), ("o_proj.", "out."), ("q_norm.", "query_norm."),
            ("k_norm.", "key_norm."), ("mlp.", "feed_forward."), ("gate_proj.", "gate."), ("up_proj.", "up."),
            ("down_proj.", "down."),
        ]:  # fmt: skip
            name = name.replace(theirs, ours)
        renamed[name] = weight
    return renamed


def _from_gpt2(weights):
    """Conv1D stores its weight transposed, and query, key and value as one."""
    renamed = {}
    for name, weight in weights.items():
        for theirs, ours in [
            ("transformer.wte.", "embedding."), ("transformer.wpe.", "position_embedding."),
            ("transformer.h.", "blocks."), ("transformer.ln_f.", "norm."), ("lm_head.", "head."),
            ("ln_1.", "attention_norm."), ("ln_2.", "feed_forward_norm."), ("attn.c_proj.", "attention.out."),
            ("mlp.c_fc.", "feed_forward.up."), ("mlp.c_proj.", "feed_forward.down."),
        ]:  # fmt: skip
            name = name.replace(theirs, ours)
        if name.endswith(("out.weight", "up.weight", "down.weight", "c_attn.weight")):
            weight = weight.t()
        if "attn.c_attn." in name:
            parts = zip(("query", "key", "value"), weight.chunk(3), strict=True)
            renamed |= {name.replace("attn.c_attn", f"attention.{part}"): piece for part, piece in parts}
        else:
            renamed[name] = weight
    return renamed
