"""A family's models as Hugging Face has them: the names of tensors and of the keys in config.json. And those of GPT-2,
Llama, Qwen 2 and Qwen 3, with the names of transformers' modeling_*.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megamix.config import DecoderConfig, ModelConfig
from megamix.model import config_json


class Location(NamedTuple):
    """Where a module's weight and bias lie: a name, `{}` for the block's number."""

    name: str
    part: int = 0  # of a tensor that holds several of our modules behind each other
    transposed: bool = False  # whether a matrix is stored (in, out)


# A module, a dim of its weight as (out, in), and the sizes of the section [model] whose product that is.
Factor = tuple[str, int, tuple[str, ...]]


@dataclass(frozen=True, eq=False, slots=True)
class Format:
    """One `model_type`. Where config.json holds more than sizes, a subclass says how it is read and written."""

    model_type: str
    architecture: str
    base: str  # what all names but the head's begin with; a folder saved without the head leaves it out
    places: Mapping[str, Location]  # by our module's name, `blocks` without its number
    size_keys: Mapping[str, str]  # config.json's name of the sizes in the section [model]
    section: type[DecoderConfig]
    factors: tuple[Factor, ...] = ()  # by which sizes are held against the tensors, before anything is built by them

    def read(self, json: config_json.Json) -> DecoderConfig:
        """Read a config.json. Raises: ValueError naming what our model does not do, or the keys that are missing."""
        return config_json.model_of(self.section, json, self.size_keys, {})

    def write(self, config: Any) -> dict[str, Any]:
        """Return the keys of config.json that are not every model's."""
        return config_json.sizes_of(dict(config), self.size_keys)

    def allowed(self, config: Any) -> dict[str, tuple[Any, ...]]:
        """Return the values that it has, by key of the section [model]; of a key that is left out any."""
        return {}


class TransformerFormat(Format):
    """One of those of our transformer."""

    def read(self, json: config_json.Json) -> ModelConfig:
        return config_json.read_config(self.model_type, json)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return config_json.write_config(self.model_type, config)

    def allowed(self, config: ModelConfig) -> dict[str, tuple[Any, ...]]:
        return config_json.allowed(self.model_type, config)


_GPT2 = {
    "embedding": Location("transformer.wte"),
    "position_embedding": Location("transformer.wpe"),
    "blocks.attention_norm": Location("transformer.h.{}.ln_1"),
    "blocks.attention.query": Location("transformer.h.{}.attn.c_attn", 0, True),
    "blocks.attention.key": Location("transformer.h.{}.attn.c_attn", 1, True),
    "blocks.attention.value": Location("transformer.h.{}.attn.c_attn", 2, True),
    "blocks.attention.out": Location("transformer.h.{}.attn.c_proj", 0, True),
    "blocks.feed_forward_norm": Location("transformer.h.{}.ln_2"),
    "blocks.feed_forward.up": Location("transformer.h.{}.mlp.c_fc", 0, True),
    "blocks.feed_forward.down": Location("transformer.h.{}.mlp.c_proj", 0, True),
    "norm": Location("transformer.ln_f"),
    "head": Location("lm_head"),
}
_LLAMA = {
    "embedding": Location("model.embed_tokens"),
    "blocks.attention_norm": Location("model.layers.{}.input_layernorm"),
    "blocks.attention.query": Location("model.layers.{}.self_attn.q_proj"),
    "blocks.attention.key": Location("model.layers.{}.self_attn.k_proj"),
    "blocks.attention.value": Location("model.layers.{}.self_attn.v_proj"),
    "blocks.attention.query_norm": Location("model.layers.{}.self_attn.q_norm"),
    "blocks.attention.key_norm": Location("model.layers.{}.self_attn.k_norm"),
    "blocks.attention.out": Location("model.layers.{}.self_attn.o_proj"),
    "blocks.feed_forward_norm": Location("model.layers.{}.post_attention_layernorm"),
    "blocks.feed_forward.gate": Location("model.layers.{}.mlp.gate_proj"),
    "blocks.feed_forward.up": Location("model.layers.{}.mlp.up_proj"),
    "blocks.feed_forward.down": Location("model.layers.{}.mlp.down_proj"),
    "norm": Location("model.norm"),
    "head": Location("lm_head"),
}
# A bias is as long as its weight.
_FACTORS: tuple[Factor, ...] = (
    ("embedding", 0, ("vocab_size",)),
    ("embedding", 1, ("hidden_size",)),
    ("position_embedding", 0, ("seq_len",)),
    ("blocks.attention.query_norm", 0, ("head_dim",)),
    ("blocks.attention.query", 0, ("num_heads", "head_dim")),
    ("blocks.attention.key", 0, ("num_kv_heads", "head_dim")),
    ("blocks.feed_forward.up", 0, ("ffn_hidden_size",)),
)
_ROTARY = (("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM"))
FORMATS = (
    TransformerFormat("gpt2", "GPT2LMHeadModel", "transformer.", _GPT2, config_json.GPT2_SIZES, ModelConfig, _FACTORS),
    *(
        TransformerFormat(*names, "model.", _LLAMA, config_json.ROTARY_SIZES, ModelConfig, _FACTORS)
        for names in _ROTARY
    ),
)
