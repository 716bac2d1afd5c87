"""The formats of GPT-2, Llama, Mistral, Ministral, Qwen 2 and 3, Gemma 2 and 3 (text), OLMo 2 and 3, Phi 3 and 4,
Granite, SmolLM3 and Seed-OSS in the library transformers, with the tensor names of its modeling_*.py and the defaults
and rules of its configuration_*.py.

A model that megamix's transformer cannot compute is refused. Keys that change neither weights nor logits, such as
`use_cache`, are not read. Dropout is not read: it belongs to a training, not to a model.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megamix.config import ModelConfig, RopeScaling, model_problems
from megamix.model.formats import OTHERS, Factor, Format, Json, Location, first_problem, shown
from megamix.model.sizes import effective, head_dim, mlp_bias, qkv_bias, rotary_dim, window

_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_UNSET_OR_ONE = (None, 1, 1.0)
_MOST_LAYERS = 10_000  # of a list with an entry for each layer
# The sizes of the section [model], each with its key in config.json.
GPT2_SIZES = {
    "vocab_size": "vocab_size", "seq_len": "n_positions", "hidden_size": "n_embd", "num_layers": "n_layer",
    "num_heads": "n_head", "ffn_hidden_size": "n_inner",
}  # fmt: skip
ROTARY_SIZES = {
    "vocab_size": "vocab_size", "seq_len": "max_position_embeddings", "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "ffn_hidden_size": "intermediate_size",
}  # fmt: skip
# transformers' defaults of keys that config.json may lack.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    "ministral": {"max_position_embeddings": 131072, "num_key_value_heads": 8},
    "gemma2": {
        "max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
        "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
    },
    "olmo3": {
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_local_base_freq": 500000.0,
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
    "granite": {"max_position_embeddings": 2048},
    "smollm3": {
        "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "rope_theta": 2000000.0, "no_rope_layer_interval": 4, "sliding_window": None,
    },
    "seed_oss": {
        "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True
    },
}  # fmt: skip
# Settings of a block that distinguish families: those of a Llama, and what another family has in their place.
_BLOCK: dict[str, Any] = {
    "norm": "rmsnorm", "activation": "swiglu", "windows": (), "window_rope_theta": None, "attention_gate": False,
    "latent_attention": None, "attention_softcap": None, "logit_softcap": None,
    "norm_place": "before", "qk_norm": False, "qk_norm_over": "head", "unrotated_layers": (), "attention_scale": None,
    "embedding_scale": 1.0, "residual_scale": 1.0, "logit_divisor": 1.0,
}  # fmt: skip
_OLMO: dict[str, Any] = {"norm_place": "after", "qk_norm": True, "qk_norm_over": "all"}
_GEMMA: dict[str, Any] = {"norm": "rmsnorm_1p", "activation": "geglu", "norm_place": "both"}
_BLOCK_OF: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True},
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"qk_norm": True},
}
# Settings that a family's config.json names, each with its key there.
_CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
_NAMED_BLOCK: dict[str, dict[str, str]] = {
    "granite": {
        "attention_scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_divisor": "logits_scaling",
    },
    "gemma2": _CAPS,
    "gemma3_text": _CAPS,
}  # fmt: skip
_GPT2 = {
    "embedding": Location("transformer.wte"),
    "position_embedding": Location("transformer.wpe"),
    "blocks.attention_norm": Location("transformer.h.{}.ln_1"),
    "blocks.attention.query": Location("transformer.h.{}.attn.c_attn", transposed=True),
    "blocks.attention.key": Location("transformer.h.{}.attn.c_attn", transposed=True),
    "blocks.attention.value": Location("transformer.h.{}.attn.c_attn", transposed=True),
    "blocks.attention.out": Location("transformer.h.{}.attn.c_proj", transposed=True),
    "blocks.feed_forward_norm": Location("transformer.h.{}.ln_2"),
    "blocks.feed_forward.up": Location("transformer.h.{}.mlp.c_fc", transposed=True),
    "blocks.feed_forward.down": Location("transformer.h.{}.mlp.c_proj", transposed=True),
    "norm": Location("transformer.ln_f"),
    "head": Location("lm_head"),
}
_QKV = ("blocks.attention.query", "blocks.attention.key", "blocks.attention.value")
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
_OLMO2 = {
    name: place
    for name, place in _LLAMA.items()
    if not name.endswith("attention_norm") and name != "blocks.feed_forward_norm"
} | {
    "blocks.attention_end_norm": Location("model.layers.{}.post_attention_layernorm"),
    "blocks.feed_forward_end_norm": Location("model.layers.{}.post_feedforward_layernorm"),
}
_GEMMA_PLACES = _LLAMA | {
    "blocks.attention_end_norm": Location("model.layers.{}.post_attention_layernorm"),
    "blocks.feed_forward_norm": Location("model.layers.{}.pre_feedforward_layernorm"),
    "blocks.feed_forward_end_norm": Location("model.layers.{}.post_feedforward_layernorm"),
}
_PHI3 = _LLAMA | {
    **dict.fromkeys(_QKV, Location("model.layers.{}.self_attn.qkv_proj")),
    **dict.fromkeys(
        ("blocks.feed_forward.gate", "blocks.feed_forward.up"), Location("model.layers.{}.mlp.gate_up_proj")
    ),
}
# Only sizes of weights: they determine those of the biases.
_FACTORS: tuple[Factor, ...] = (
    ("embedding", 0, ("vocab_size",)),
    ("embedding", 1, ("hidden_size",)),
    ("position_embedding", 0, ("seq_len",)),
    ("blocks.attention.query_norm", 0, ("head_dim",)),
    ("blocks.attention.query", 0, ("num_heads", "head_dim")),
    ("blocks.attention.key", 0, ("num_kv_heads", "head_dim")),
    ("blocks.feed_forward.up", 0, ("ffn_hidden_size",)),
)


_PHI3_FACTORS: tuple[Factor, ...] = (
    *_FACTORS[:2],
    ("blocks.attention.out", 1, ("num_heads", "head_dim")),
    ("blocks.feed_forward.down", 1, ("ffn_hidden_size",)),
)
_OLMO2_FACTORS = tuple(one for one in _FACTORS if one[0] != "blocks.attention.query_norm")  # it spans all heads
# Families with windows.
_SLIDING = ("mistral", "phi3", "ministral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "olmo3")
_IN_ALL_LAYERS = ("mistral", "phi3")  # families whose windows are not by layer
_TWO_ROPES = ("gemma3_text", "olmo3")  # families whose layers with a window have wavelengths of their own
# Keys of a scaling of rotary positions beside its factor, each with our key.
_ROPE_KEYS: dict[str, dict[str, str]] = {
    "linear": {},
    "llama3": {
        "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_seq_len",
    },
    "yarn": {
        "beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attention_factor",
        "original_max_position_embeddings": "original_seq_len",
    },
}  # fmt: skip


class GPT2Format(Format):
    def read(self, json: Json) -> ModelConfig:
        activation = json.get("activation_function", "gelu_new")
        problems = _unlike(json, "scale_attn_weights", True, (True,))
        problems += _unlike(json, "scale_attn_by_inverse_layer_idx", False, (False,))
        problems += _unlike(json, "add_cross_attention", False, (False,))
        problems += _unlike(json, "activation_function", "gelu_new", tuple(_GELU))
        _refuse(json, problems)
        return _possible(self.config_of(
            {"n_inner": None, **json}, norm="layernorm", position="learned",
            norm_eps=json.get("layer_norm_epsilon", 1e-5), activation=_GELU[activation], bias=True,
        ))  # fmt: skip

    def write(self, config: ModelConfig) -> dict[str, Any]:
        names = {ours: theirs for theirs, ours in reversed(_GELU.items())}  # reversed: the first name wins
        return {
            **self.sizes_of(effective(config)),
            "activation_function": names[config.activation], "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0,
        }  # fmt: skip

    def allowed(self, config: ModelConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "norm": ("layernorm",), "position": ("learned",), "activation": ("gelu_tanh", "gelu"), "bias": (True,),
            "qkv_bias": (True,), "mlp_bias": (True,), "num_kv_heads": (config.num_heads,),
            "head_dim": (config.hidden_size // config.num_heads,),
            **{key: (value,) for key, value in _BLOCK.items() if key not in ("norm", "activation")},
        }  # fmt: skip


class RotaryFormat(Format):
    """The format of Llama and of families that differ from it in biases, norms and factors. A Mistral without a window
    is a Llama, and is exported as one.
    """

    def read(self, json: Json) -> ModelConfig:
        json = {"num_key_value_heads": None, "head_dim": None, **_DEFAULTS[self.model_type], **json}
        attention_bias, feed_forward_bias = json.get("attention_bias", False), json.get("mlp_bias", False)
        given = _BLOCK | _BLOCK_OF.get(self.model_type, {})
        match self.model_type:
            case "llama" | "granite" | "smollm3":
                given |= {"bias": attention_bias, "mlp_bias": feed_forward_bias}
            case "qwen2":
                given |= {"qkv_bias": True}
            case "qwen3" | "olmo2" | "olmo3" | "gemma2" | "gemma3_text":
                given |= {"bias": attention_bias, "mlp_bias": False}
            case "seed_oss":
                out_bias = json.get("attention_out_bias", False)
                given |= {"bias": out_bias, "qkv_bias": attention_bias, "mlp_bias": feed_forward_bias}
        named = _NAMED_BLOCK.get(self.model_type, {})
        given |= {ours: json.get(key, 1.0 if named is not _CAPS else None) for ours, key in named.items()}
        if given["activation"] == "geglu":
            problems = _unlike(json, "hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
            if json.get("use_bidirectional_attention"):
                problems.append("use_bidirectional_attention is set, attention in megamix is causal")
            given |= _gemma_factors(json, problems)
        else:
            problems = _unlike(json, "hidden_act", "silu", ("silu", "swish"))
        for key in ("attention_bias", "attention_out_bias", "mlp_bias"):
            problems += _unlike(json, key, False, (False, True))
        if self.model_type == "smollm3":
            given["unrotated_layers"], more = _unrotated(json)
            problems += more
        if self.model_type in _SLIDING:
            given["windows"], more = _windows(self.model_type, json, given["unrotated_layers"])
            problems += more
        if self.model_type == "phi3":
            json, given["rotary_dim"], more = _partial(json)
            problems += more
        if self.model_type in _TWO_ROPES:
            json, given["window_rope_theta"], more = _apart(json)
            problems += more
        theta, scaling, rope_problems = _read_rope(json)
        if given["window_rope_theta"] == theta and scaling is None:
            given["window_rope_theta"] = None
        _refuse(json, problems + rope_problems)
        return _possible(self.config_of(
            json, norm_eps=json.get("rms_norm_eps", 1e-6),
            position="rotary", rope_theta=theta, rope_scaling=scaling,
            tie_embeddings=json.get("tie_word_embeddings", False), scaled_init=False, **given,
        ))  # fmt: skip

    def write(self, config: ModelConfig) -> dict[str, Any]:
        scaling: dict[str, Any] | None = None
        if config.rope_scaling is not None:
            scaling = {"rope_type": config.rope_scaling.rule, "factor": config.rope_scaling.factor}
            keys = _ROPE_KEYS[config.rope_scaling.rule]
            values = {theirs: getattr(config.rope_scaling, ours) for theirs, ours in keys.items()}
            scaling |= {key: value for key, value in values.items() if value is not None}
        named = _NAMED_BLOCK.get(self.model_type, {})
        more: dict[str, Any] = {key: getattr(config, ours) for ours, key in named.items()}
        if self.model_type in _SLIDING:
            windows = [window(config, layer) for layer in range(config.num_layers)]
            more["sliding_window"] = max(windows) or None
            if self.model_type not in _IN_ALL_LAYERS:
                more["layer_types"] = ["sliding_attention" if size else "full_attention" for size in windows]
            if self.model_type in ("qwen2", "qwen3", "smollm3"):
                more["use_sliding_window"] = any(windows)
        if self.model_type in _TWO_ROPES:
            own = _first_set(config.window_rope_theta, config.rope_theta)
            whole = (scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_theta}
            windowed = {"rope_type": "default", "rope_theta": own}
            # transformers 5 reads the first, 4 the second.
            more["rope_parameters"] = {"full_attention": whole, "sliding_attention": windowed}
            more["rope_local_base_freq"] = own
        match self.model_type:
            case "llama" | "granite":
                more["mlp_bias"] = mlp_bias(config)
            case "smollm3":
                rotated = [int(layer not in config.unrotated_layers) for layer in range(config.num_layers)]
                more |= {"mlp_bias": mlp_bias(config), "no_rope_layers": rotated}
                more["pad_token_id"] = None  # transformers' default is beyond a small vocabulary
            case "seed_oss":
                more |= {"mlp_bias": mlp_bias(config), "attention_out_bias": config.bias}
            case "phi3":
                more["partial_rotary_factor"] = rotary_dim(config) / head_dim(config)
            case "gemma2" | "gemma3_text":
                scale = _first_set(config.attention_scale, head_dim(config) ** -0.5)
                more |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": round(scale**-2)}
        return {
            **self.sizes_of(effective(config)), "hidden_act": "silu", "rms_norm_eps": config.norm_eps,
            # transformers 4 and 5 both read these two keys; 4 does not know 5's `rope_parameters`.
            "rope_theta": config.rope_theta, "rope_scaling": scaling, "attention_dropout": 0.0,
            "attention_bias": qkv_bias(config) if self.model_type == "seed_oss" else config.bias, **more,
        }  # fmt: skip

    def allowed(self, config: ModelConfig) -> dict[str, tuple[Any, ...]]:
        alike = config.bias, config.bias, mlp_bias(config)
        in_attention = config.bias, config.bias, False
        bias, of_projections, of_feed_forward = {
            "mistral": (False, False, False),
            "phi3": (False, False, False),
            "ministral": (False, False, False),
            "qwen2": (False, True, False),
            **dict.fromkeys(("qwen3", "olmo2", "olmo3", "gemma2", "gemma3_text"), in_attention),
            "seed_oss": (config.bias, qkv_bias(config), mlp_bias(config)),
        }.get(self.model_type, alike)
        block = _BLOCK | _BLOCK_OF.get(self.model_type, {})
        named = {*_NAMED_BLOCK.get(self.model_type, {})}
        named |= {"unrotated_layers"} if self.model_type == "smollm3" else set()
        named |= {"window_rope_theta"} if self.model_type in _TWO_ROPES else set()
        if self.model_type in _SLIDING and len({*config.windows} - {0}) == 1:  # config.json has one size
            block["windows"] = config.windows if self.model_type not in _IN_ALL_LAYERS or all(config.windows) else ()
        if block["activation"] == "geglu":
            block["embedding_scale"] = math.sqrt(config.hidden_size)
            scale = config.attention_scale
            block["attention_scale"] = None if scale is None else round(scale**-2) ** -0.5
        rotates, scales = (head_dim(config),), (config.rope_scaling,)
        if self.model_type == "phi3":
            rotates, scales = (int(head_dim(config) * (rotary_dim(config) / head_dim(config))),), (None,)
        return {
            "position": ("rotary",), "rotary_dim": rotates, "rope_scaling": scales,
            "bias": (bias,), "qkv_bias": (of_projections,), "mlp_bias": (of_feed_forward,),
            **{key: (value,) for key, value in block.items() if key not in named},
        }  # fmt: skip


def _possible(model: ModelConfig) -> ModelConfig:
    """Return the section. Raises: ValueError naming a size that does not go with the others."""
    for problem in model_problems(model):
        raise ValueError(f"config.json: {problem}")
    return model


def _read_rope(json: Json) -> tuple[float, RopeScaling | None, list[str]]:
    """Return theta, the scaling, and the reasons to refuse them. Older files have theta beside `rope_scaling`, newer
    files have it inside `rope_parameters`.
    """
    rope = _first_set(json.get("rope_parameters"), json.get("rope_scaling"), {})
    if not isinstance(rope, Mapping):
        return 0.0, None, [f"rope_parameters or rope_scaling is {shown(rope)}, and must be a table"]
    theta: float = _first_set(rope.get("rope_theta"), json.get("rope_theta"), 10000.0)
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    problems = [
        f"partial_rotary_factor is {shown(table['partial_rotary_factor'])}, megamix rotates whole heads"
        for table in (json, rope)
        if table.get("partial_rotary_factor") not in _UNSET_OR_ONE
    ]
    if any(isinstance(value, Mapping) for value in rope.values()):
        problems.append("rope_parameters differ by layer, megamix has one table for all layers")
    if kind == "default" or problems:
        return theta, None, problems
    if kind not in [*_ROPE_KEYS]:  # a list compares by ==: the kind may be anything
        known = ", ".join(map(repr, ("default", *_ROPE_KEYS)))
        return theta, None, [*problems, f"rope_type is {shown(kind)}, megamix has {known}"]
    for key in ("mscale", "mscale_all_dim", "truncate"):  # DeepSeek's and gpt-oss's
        if rope.get(key) not in (None, True):
            problems.append(f"rope_scaling: {key} is {shown(rope[key])}, which megamix does not have")
    keys = {"factor": "factor", **_ROPE_KEYS[kind]}
    given = {ours: rope[key] for key, ours in keys.items() if rope.get(key) is not None}
    if kind != "linear":
        given.setdefault("original_seq_len", json["max_position_embeddings"])
        if isinstance(given["original_seq_len"], int) and given["original_seq_len"] >= 2**63:
            told = shown(given["original_seq_len"])
            return theta, None, [*problems, f"rope_scaling: original_max_position_embeddings is {told}"]
    try:
        return theta, RopeScaling(rule=kind, **given), problems
    except ValidationError as error:
        return theta, None, [f"rope_scaling: {first_problem(error, {})}"]


def _partial(json: Json) -> tuple[Json, int | None, list[str]]:
    """Return the keys without Phi's share of a head that rotates, its elements, and the reasons to refuse them."""
    rope = _first_set(json.get("rope_parameters"), json.get("rope_scaling"), {})
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) != "default":
        return json, None, [f"rope_scaling is {shown(rope)}, megamix does not stretch Phi's wavelengths"]
    share = _first_set(rope.get("partial_rotary_factor"), json.get("partial_rotary_factor"), 1.0)
    heads: Any = json.get("num_attention_heads")
    size: Any = json.get("head_dim")
    if size is None and _at_least(heads, 1) and _at_least(json.get("hidden_size"), 1):
        size = json["hidden_size"] // heads
    if not (isinstance(share, float | int) and 0 < share <= 1 and _at_least(size, 1)):
        return json, None, [f"partial_rotary_factor is {shown(share)} of heads of {shown(size)}, and must be a share"]
    json = {**json, "partial_rotary_factor": None, "rope_parameters": {**rope, "partial_rotary_factor": None}}
    return json, None if share == 1 else int(size * share), []


def _apart(json: Json) -> tuple[Json, float, list[str]]:
    """Return the keys with the rotary positions of layers without a window, theta of the others, and the reasons to
    refuse them. Newer files have two tables in `rope_parameters`.
    """
    rope, windowed = json.get("rope_parameters"), {}
    if isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values()):
        windowed, whole = (_first_set(rope.get(kind), {}) for kind in ("sliding_attention", "full_attention"))
        json = {**json, "rope_parameters": whole}
    if not isinstance(windowed, Mapping) or windowed.get("rope_type", "default") != "default":
        return json, 0.0, [f"rope_parameters of sliding_attention are {shown(windowed)}, megamix does not stretch them"]
    return json, _first_set(windowed.get("rope_theta"), json["rope_local_base_freq"]), []


def _gemma_factors(json: Json, problems: list[str]) -> dict[str, Any]:
    """Return the factors that Gemma's sizes decide. Add the reasons to refuse them."""
    width: Any = json.get("hidden_size")
    scalar: Any = json.get("query_pre_attn_scalar", 256)
    if not _at_least(scalar, 1) or scalar >= 2**63:
        problems.append(f"query_pre_attn_scalar is {shown(scalar)}, and must be a positive whole number")
        return {}
    factor = math.sqrt(width) if _at_least(width, 1) and width < 2**63 else 1.0  # a wrong width is refused by itself
    return {"embedding_scale": factor, "attention_scale": None if scalar == json["head_dim"] else scalar**-0.5}


def _unrotated(json: Json) -> tuple[tuple[int, ...], list[str]]:
    """Return SmolLM3's layers without rotary positions, and the reasons to refuse them."""
    layers, interval = json.get("num_hidden_layers"), json["no_rope_layer_interval"]
    rotated = json.get("no_rope_layers")
    if rotated is None and isinstance(layers, int) and layers <= _MOST_LAYERS and _at_least(interval, 1):
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers:
        return (), [f"no_rope_layers is {shown(rotated)}, and must be a list with an entry for each layer"]
    return tuple(layer for layer, turns in enumerate(rotated) if not turns), []


def _windows(model_type: str, json: Json, unrotated: tuple[int, ...]) -> tuple[tuple[int, ...], list[str]]:
    """Return the windows of a model's layers, and the reasons to refuse them. `layer_types` names the layers that have
    the window, if it is there; otherwise each family has a rule.
    """
    size, kinds = json.get("sliding_window", 4096), json.get("layer_types")
    layers: Any = json.get("num_hidden_layers")
    if not _at_least(layers, 1):
        return (), []  # refused as a size
    if layers > _MOST_LAYERS:
        return (), [f"num_hidden_layers is {shown(layers)}, megamix reads the windows of at most {_MOST_LAYERS}"]
    if model_type in ("qwen2", "qwen3", "smollm3") and not json.get("use_sliding_window"):
        size = None
    if model_type in _IN_ALL_LAYERS or kinds is None:
        patterns = {"gemma2": 2, "olmo3": 4, "gemma3_text": json.get("sliding_window_pattern")}
        every: Any = patterns.get(model_type, layers + 1)
        first: Any = json.get("max_window_layers", 28) if model_type in ("qwen2", "qwen3") else 0
        for key, value, least in (("sliding_window_pattern", every, 1), ("max_window_layers", first, 0)):
            if not _at_least(value, least):
                return (), [f"{key} is {shown(value)}, and must be a whole number, at least {least}"]
        slides = [layer >= first and (layer + 1) % every != 0 for layer in range(layers)]
        if model_type == "smollm3":
            slides = [layer in unrotated for layer in range(layers)]
        slides = [slide and size is not None for slide in slides]
    else:
        known = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            told = f"must be a list with num_hidden_layers {layers} entries, {' or '.join(known)}"
            return (), [f"layer_types is {shown(kinds)}, and {told}"]
        slides = [kind == known[0] for kind in kinds]
    if not any(slides) or _at_least(size, json["max_position_embeddings"]):  # a window as long as any sequence is none
        return (), []
    if not _at_least(size, 1):
        return (), [f"sliding_window is {shown(size)}, and must be a positive whole number"]
    windows = tuple(size if slide else 0 for slide in slides)
    period = next(n for n in range(1, layers + 1) if all(windows[at] == windows[at % n] for at in range(layers)))
    return windows[:period], []


def _at_least(value: Any, other: Any) -> bool:
    return isinstance(value, int) and isinstance(other, int) and value >= other


def _unlike(json: Json, key: str, default: Any, allowed: tuple[Any, ...]) -> list[str]:
    value = json.get(key, default)
    is_ours = type(value) is type(default) and value in allowed  # 1 == True
    return [] if is_ours else [f"{key} is {shown(value)}, megamix has {' or '.join(map(shown, allowed))}"]


def _refuse(json: Json, problems: list[str]) -> None:
    if json.get("quantization_config"):
        problems = [*problems, "quantization_config: the weights are quantised, give a folder of plain weights"]
    if problems:
        raise ValueError(f"config.json: not supported by megamix.model.transformer:  {'; '.join(problems)}; {OTHERS}")


def _first_set(*values: Any) -> Any:
    """Return the first value that is not null."""
    return next(value for value in values if value is not None)


_ROTARY = (
    ("llama", "LlamaForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("ministral", "MinistralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("granite", "GraniteForCausalLM"),
    ("smollm3", "SmolLM3ForCausalLM"),
    ("seed_oss", "SeedOssForCausalLM"),
)
FORMATS = (
    GPT2Format("gpt2", "GPT2LMHeadModel", "transformer.", _GPT2, GPT2_SIZES, ModelConfig, _FACTORS),
    *(RotaryFormat(*names, "model.", _LLAMA, ROTARY_SIZES, ModelConfig, _FACTORS) for names in _ROTARY),
    RotaryFormat("olmo2", "Olmo2ForCausalLM", "model.", _OLMO2, ROTARY_SIZES, ModelConfig, _OLMO2_FACTORS),
    RotaryFormat("olmo3", "Olmo3ForCausalLM", "model.", _OLMO2, ROTARY_SIZES, ModelConfig, _OLMO2_FACTORS),
    RotaryFormat("phi3", "Phi3ForCausalLM", "model.", _PHI3, ROTARY_SIZES, ModelConfig, _PHI3_FACTORS),
    RotaryFormat("gemma2", "Gemma2ForCausalLM", "model.", _GEMMA_PLACES, ROTARY_SIZES, ModelConfig, _FACTORS),
    RotaryFormat("gemma3_text", "Gemma3ForCausalLM", "model.", _GEMMA_PLACES, ROTARY_SIZES, ModelConfig, _FACTORS),
)
