"""Small models of transformers' causal language models: the default configuration of a kind, with small sizes and two
layers, that differ where the kind has layers that differ.
"""

import torch

from tests.model.their_models import SEQ_LEN, VOCAB

_SIZES = {
    64: "hidden_size d_model n_embd embedding_size emb_dim embedding_dim word_embed_proj_dim lru_width "
    "block_multiple_of input_embedding_size output_embedding_size attention_hidden_size dim_model_base "
    "hidden_size_per_layer_input",
    96: "intermediate_size ffn_dim d_inner dff dim_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
    "feed_forward_size moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "expert_ffn_hidden_size n_inner intermediate_size_mlp dense_intermediate_size shared_experts_intermediate_size "
    "moe_shared_expert_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads "
    "linear_num_heads index_n_heads num_experts n_routed_experts num_local_experts moe_num_experts index_topk "
    "hc_lowrank zero_expert_num",
    2: "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads swa_num_key_value_heads num_kv_heads linear_num_key_heads "
    "num_query_groups num_experts_per_tok moe_topk moe_k num_experts_per_token num_layers_per_stack",
    1: "topk_group n_group num_expert_group first_k_dense_replace num_dense_layers moe_layer_start_index n_group "
    "num_kv_shared_layers moe_layer_end_index n_groups mamba_n_groups o_groups mamba_ngroups",
    16: "head_dim swa_head_dim kv_channels dim_head d_head qk_head_dim v_head_dim linear_key_head_dim mamba_d_state "
    "linear_value_head_dim linear_head_dim index_head_dim kv_lora_rank q_lora_rank state_size ssm_state_size "
    "o_lora_rank mamba_chunk_size chunk_size mamba_d_head mamba_head_dim mamba_headdim attention_head_size "
    "sliding_window window_size attention_window_size local_attention sliding_window_size attention_chunk_size "
    "time_step_rank mamba_dt_rank adapter_rank laurel_rank router_hidden_size local_attn_chunk_length "
    "lsh_attn_chunk_length query_pre_attn_scalar block_size index_block_size",
    8: "qk_nope_head_dim qk_rope_head_dim rotary_dim mamba_n_heads mamba_num_heads",
}  # fmt: skip
_WORDS = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "context_length",
    "max_target_positions",
)  # fmt: skip
SMALL = {key: size for size, keys in _SIZES.items() for key in keys.split()}
SMALL |= dict.fromkeys(_WORDS, VOCAB) | dict.fromkeys(_LENGTHS, 2 * SEQ_LEN)
# Keys that are given where the default is none, too.
_GIVEN = ("num_experts_per_tok", "n_routed_experts", "head_dim", "num_key_value_heads")
_PADDED = {"pad_token_id": 1}  # the positions count from it
_HEADS = {"num_key_value_heads": 4}
# Further settings of a kind, so that its sizes go together.
_OWN = {
    "axk2": _HEADS, "deepseek_v2": _HEADS, "deepseek_v32": _HEADS, "dots3_note_text": _HEADS, "glm_moe_dsa": _HEADS,
    "minicpm3": _HEADS, "youtu": _HEADS,
    "camembert": _PADDED, "data2vec-text": _PADDED, "roberta": _PADDED, "roberta-prelayernorm": _PADDED,
    "xlm-roberta": _PADDED, "xlm-roberta-xl": _PADDED, "prophetnet": _PADDED, "xmod": _PADDED,
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0}, "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True},
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def small_config(kind):
    """Return transformers' configuration of a small model of a kind."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    known = default.to_dict()
    layers = getattr(default, "num_hidden_layers", None)
    lists = {key: value for key, value in known.items() if isinstance(value, list) and len(value) == layers}
    keys = {key: SMALL[key] for key, value in known.items() if key in SMALL and (value is not None or key in _GIVEN)}
    if lists:
        rows = [tuple(value[layer] for value in lists.values()) for layer in range(layers)]
        other = next((layer for layer in range(layers) if rows[layer] != rows[0]), 1)
        keys |= {key: [value[0], value[other]] for key, value in lists.items()}
    if "qk_rope_head_dim" in keys and "head_dim" in keys:
        keys["head_dim"] = keys["qk_rope_head_dim"]
    keys |= _OWN.get(kind, {})
    ends = [key for key in known if key.endswith("token_id") and key not in keys]
    try:
        return AutoConfig.for_model(kind, **keys | dict.fromkeys(ends))
    except Exception:  # it asks for numbers
        return AutoConfig.for_model(kind, **keys | {key: number for number, key in enumerate(sorted(ends))})


# Kinds that are not built: their defaults do not go together with small sizes, or take millions of parameters.
_NOT_BUILT = (
    "blt cohere_compass_text dbrx gemma4_assistant git musicgen musicgen_melody phi4_multimodal qwen4_exp_text "
    "reformer xlm xmod zamba zamba2"
)  # fmt: skip
# A job refuses these kinds with these words. Composite models have a text model inside.
_SAID = {
    "a buffer that is saved": (
        "apertus axk1 axk2 bailing_hybrid beam deepseek_v3 deepseek_v32 deepseek_v4 dots1 dots3_note_text "
        "exaone_moe gemma4_text gemma4_unified_text glm4_moe glm4_moe_lite glm_moe_dsa hy_v3 hy_v4 "
        "inkling2_text inkling_text kimi_linear kolibri1 lfm2_moe longcat_flash mimo_v2_flash minimax "
        "minimax_m2 minimax_m3_vl_text nemotron_h solar_open zaya"
    ),
    "a parameter without a gradient": (
        "afmoe ernie4_5_moe hrm_text laguna marian pegasus roformer"
    ),
    "sees later tokens": (
        "bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert rembert "
        "roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl"
    ),
    "is no text model of its own": (
        "dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified gemma4_unified_assistant got_ocr2 llama4 "
        "mllama moss_transcribe_diarize qwen3_5 qwen3_5_moe qwen4_exp"
    ),
    "transformers gives no values to .*per_layer_projection_scale, a buffer": "gemma3n_text",
    "transformers computes no such model": "jetmoe prophetnet",
    "transformers builds no such model": "modernbert-decoder",
    "was written in place": "rwkv",
    "max_position_embeddings -1": "xlnet",
}  # fmt: skip
REFUSED = {kind: told for told, kinds in _SAID.items() for kind in kinds.split()}


def small_kinds():
    """Return the kinds of transformers' causal language models that are built small, and the composite ones."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in _NOT_BUILT.split()]


def save_small(kind, folder):
    """Write a small model whose weights show in the loss; of a composite one config.json alone."""
    from transformers import AutoModelForCausalLM

    config = small_config(kind)
    if config.get_text_config() is not config:
        config.save_pretrained(folder)
        return
    for key, value in config.to_dict().items():
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.05)
    model.save_pretrained(folder)
