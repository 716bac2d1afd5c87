"""Tiny models of transformers: for each kind the keys of its config.json beside the common ones."""

VOCAB, SEQ_LEN = 64, 32

_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": SEQ_LEN,
}  # fmt: skip
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_OLD = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "gemma3_text": _SIZES | _SLIDING,
    "gpt_oss": _SIZES | _SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None},
    "phi": _SIZES,
    "falcon": _OLD,
    "opt": _OLD | {"ffn_dim": 48, "max_position_embeddings": SEQ_LEN, "word_embed_proj_dim": 32},
    "gpt_neox": _SIZES,
    "starcoder2": _SIZES,
    "qwen3_moe": _SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "cohere2": _SIZES | _SLIDING,
    "olmo2": _SIZES,
}


def write_config(folder, kind, **keys):
    """Write a config.json into folder/kind, and return that folder."""
    from transformers import AutoConfig

    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = AutoConfig.for_model(kind, **ends | {"vocab_size": VOCAB} | KINDS[kind] | keys)
    config.architectures = None
    config.save_pretrained(folder / kind)
    return folder / kind
