"""The formats of GPT-2, Llama, Mistral, Ministral, Mixtral, Qwen 2, 3 and 3 MoE, Gemma 2 and 3 (text), OLMo 2 and 3,
OLMoE, Phi 3 and 4, Granite, SmolLM3 and Seed-OSS in the library transformers, with the tensor names of its
modeling_*.py and the defaults and rules of its configuration_*.py. `FORMATS`, at the end, has a row for each.

A model that megamix's transformer cannot compute is refused. Keys that change neither weights nor logits, such as
`use_cache`, are not read. Dropout is not read: it belongs to a training, not to a model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from megamix.config import DecoderConfig, Llama3Scaling, ModelConfig, RopeConfig, RopeScaling, YarnScaling
from megamix.model.formats import OTHERS, Format, Json, Keys, Location, first_problem, shown
from megamix.model.sizes import attention_scale, effective, head_dim, rotary_dim, rotates, window

_GELU = {"gelu_new": "gelu_tanh", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
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
# transformers' defaults of keys that a rotary format's config.json may lack, unless its row has others.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "attention_out_bias": False, "mlp_bias": False,
    "sliding_window": 4096, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    "logits_scaling": 1.0, "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 10000.0,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
_GPT2 = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT2_BLOCKS = {
    "blocks.attention_norm": "transformer.h.{}.ln_1",
    "blocks.attention.query": "transformer.h.{}.attn.c_attn",
    "blocks.attention.key": "transformer.h.{}.attn.c_attn",
    "blocks.attention.value": "transformer.h.{}.attn.c_attn",
    "blocks.attention.out": "transformer.h.{}.attn.c_proj",
    "blocks.feed_forward_norm": "transformer.h.{}.ln_2",
    "blocks.feed_forward.up": "transformer.h.{}.mlp.c_fc",
    "blocks.feed_forward.down": "transformer.h.{}.mlp.c_proj",
}
_LLAMA = {
    "embedding": "model.embed_tokens",
    "blocks.attention_norm": "model.layers.{}.input_layernorm",
    "blocks.attention.query": "model.layers.{}.self_attn.q_proj",
    "blocks.attention.key": "model.layers.{}.self_attn.k_proj",
    "blocks.attention.value": "model.layers.{}.self_attn.v_proj",
    "blocks.attention.query_norm": "model.layers.{}.self_attn.q_norm",
    "blocks.attention.key_norm": "model.layers.{}.self_attn.k_norm",
    "blocks.attention.out": "model.layers.{}.self_attn.o_proj",
    "blocks.feed_forward_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.feed_forward.gate": "model.layers.{}.mlp.gate_proj",
    "blocks.feed_forward.up": "model.layers.{}.mlp.up_proj",
    "blocks.feed_forward.down": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_OLMO = _LLAMA | {
    "blocks.attention_end_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.feed_forward_end_norm": "model.layers.{}.post_feedforward_layernorm",
}
_GEMMA = _OLMO | {"blocks.feed_forward_norm": "model.layers.{}.pre_feedforward_layernorm"}
_PHI3 = _LLAMA | {
    "blocks.attention.query": "model.layers.{}.self_attn.qkv_proj",
    "blocks.attention.key": "model.layers.{}.self_attn.qkv_proj",
    "blocks.attention.value": "model.layers.{}.self_attn.qkv_proj",
    "blocks.feed_forward.gate": "model.layers.{}.mlp.gate_up_proj",
    "blocks.feed_forward.up": "model.layers.{}.mlp.gate_up_proj",
}
_MIXTURE = _LLAMA | {
    "blocks.feed_forward.router": "model.layers.{}.mlp.gate",
    "blocks.feed_forward.gate.*": "model.layers.{}.mlp.experts.{}.gate_proj",
    "blocks.feed_forward.up.*": "model.layers.{}.mlp.experts.{}.up_proj",
    "blocks.feed_forward.down.*": "model.layers.{}.mlp.experts.{}.down_proj",
}
_MIXTRAL = _LLAMA | {
    "blocks.feed_forward.router": "model.layers.{}.block_sparse_moe.gate",
    "blocks.feed_forward.gate.*": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "blocks.feed_forward.up.*": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    "blocks.feed_forward.down.*": "model.layers.{}.block_sparse_moe.experts.{}.w2",
}
_SCALINGS = {"linear": RopeScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
_ORIGINAL = "original_max_position_embeddings"


def _places(names: Mapping[str, str], transposed: bool = False) -> dict[str, Location]:
    return {ours: Location(theirs, transposed) for ours, theirs in names.items()}


class GPT2Format(Format):
    def read(self, json: Json) -> DecoderConfig:
        json = Keys(json, {"n_inner": None})
        problems = _unlike(json, "scale_attn_weights", True)
        problems += _unlike(json, "scale_attn_by_inverse_layer_idx", False)
        problems += _unlike(json, "add_cross_attention", False)
        problems += _unlike(json, "activation_function", *_GELU)
        _refuse(json, problems)
        return self.config_of(
            json, norm="layernorm", rope=None,
            norm_eps=json.get("layer_norm_epsilon", 1e-5), bias=True,
            activation=_GELU[json.get("activation_function", "gelu_new")],
        )  # fmt: skip

    def write(self, config: ModelConfig) -> Json:
        names = {ours: theirs for theirs, ours in reversed(_GELU.items())}  # reversed: the first name wins
        return {
            **self.sizes_of(effective(config)),
            "activation_function": names.get(config.activation, "gelu_new"), "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0,
        }  # fmt: skip


_Section = dict[str, Any]  # the keys of [model]


class _Part:
    """A feature of some formats that takes more than a key to read or to write."""

    def read(self, keys: Keys, given: _Section, problems: list[str]) -> None:
        """Add to the section [model] what config.json says of the feature, and to `problems` reasons to refuse it. Take
        away keys that no other may see.

        Raises: ValueError with a reason, if nothing can be added.
        """

    def write(self, config: ModelConfig) -> Json:
        """Return the keys of config.json that describe the feature."""
        return {}


Slides = Callable[[Json, Json, int], bool]  # (keys, section, layer) -> whether the layer has the window
_KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class _Windows(_Part):
    """The windows of layers. `layer_types` names the layers that have one, if it is there; otherwise the rule does.

    `by_layer`: False if transformers reads no `layer_types`. `switch`: whether a key turns windows on.
    """

    rule: Slides = lambda keys, given, layer: True
    by_layer: bool = True
    switch: bool = False

    def read(self, keys: Keys, given: _Section, problems: list[str]) -> None:
        layers = _whole(keys, "num_hidden_layers")
        size, kinds = keys["sliding_window"], keys.get("layer_types")
        if self.switch and not keys.get("use_sliding_window"):
            size = None
        if not self.by_layer and kinds is not None:
            raise ValueError('layer_types is not read by such a model; leave it out, or write model_type = "ministral"')
        if kinds is None:
            slides = [self.rule(keys, given, layer) and size is not None for layer in range(layers)]
        elif len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
            told = f"must be a list with num_hidden_layers {layers} entries, {' or '.join(_KINDS)}"
            raise ValueError(f"layer_types is {shown(kinds)}, and {told}")
        else:
            slides = [kind == _KINDS[0] for kind in kinds]
        if not any(slides):
            return
        size = _whole({"sliding_window": size}, "sliding_window")
        windows = tuple(size if slide else 0 for slide in slides)
        period = next(n for n in range(1, layers + 1) if all(windows[at] == windows[at % n] for at in range(layers)))
        given["window"] = {"sizes": windows[:period]}

    def write(self, config: ModelConfig) -> Json:
        windows = [window(config, layer) for layer in range(config.num_layers)]
        # Without windows transformers' Gemma still asks for a number.
        unused = config.seq_len if self.by_layer and not self.switch else None
        keys: dict[str, Any] = {"sliding_window": max(windows) or unused}
        if self.by_layer:
            keys["layer_types"] = [_KINDS[not size] for size in windows]
        if self.switch:
            keys["use_sliding_window"] = any(windows)
        return keys


class _Unrotated(_Part):
    """Layers without rotary positions, as SmolLM3 has."""

    def read(self, keys: Keys, given: _Section, problems: list[str]) -> None:
        layers, rotated = _whole(keys, "num_hidden_layers"), keys.get("no_rope_layers")
        if rotated is None:
            interval = _whole(keys, "no_rope_layer_interval")
            rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if len(rotated) != layers:
            raise ValueError(f"no_rope_layers is {shown(rotated)}, and must be a list with an entry for each layer")
        given["rope"]["unrotated_layers"] = tuple(layer for layer, turns in enumerate(rotated) if not turns)

    def write(self, config: ModelConfig) -> Json:
        rotated = [int(rotates(config, layer)) for layer in range(config.num_layers)]
        return {"no_rope_layers": rotated, "pad_token_id": None}  # the default of it is beyond a small vocabulary


class _Rope(_Part):
    """The wavelengths of rotary positions. Older files have theta beside `rope_scaling`, newer files have it inside
    `rope_parameters`.
    """

    def read(self, keys: Keys, given: _Section, problems: list[str]) -> None:
        rope = _rope_table(keys)
        theta = rope.get("rope_theta", keys["rope_theta"])
        if theta != keys["rope_theta"]:  # the table wins
            keys.asked.discard("rope_theta")
        problems += [
            f"partial_rotary_factor is {shown(table['partial_rotary_factor'])}, megamix rotates whole heads"
            for table in (keys, rope)
            if table.get("partial_rotary_factor") not in (None, 1, 1.0)
        ]
        if any(isinstance(value, Mapping) for value in rope.values()):
            problems.append("rope_parameters differ by layer, megamix has one table for all layers")
        original = _first_set(keys.get(_ORIGINAL), rope.get(_ORIGINAL), keys["max_position_embeddings"])
        # Beside a table for the layers with a window, this one is for the others, if there are any.
        windowed = given.get("window", {})
        is_used = not all(windowed.get("sizes", (0,))) or "rope_theta" not in windowed
        given["rope"] |= {"theta": theta, "scaling": _read_scaling(rope, original, is_used)}
        if given["rope"]["scaling"] is None and windowed.get("rope_theta") == theta:
            del windowed["rope_theta"]

    def write(self, config: ModelConfig) -> Json:
        # transformers 4 and 5 both read these two keys; 4 does not know 5's `rope_parameters`.
        return {"rope_theta": _rope(config).theta, "rope_scaling": _scaling(config)}


class _PartlyRotated(_Part):
    """A share of each head that rotates, as in Phi, whose wavelengths megamix does not stretch."""

    def read(self, keys: Keys, given: _Section, problems: list[str]) -> None:
        rope = _rope_table(keys)
        if _rule(rope) != "default":
            raise ValueError(f"rope_scaling is {shown(rope)}, megamix does not stretch Phi's wavelengths")
        share = _first_set(rope.get("partial_rotary_factor"), keys.get("partial_rotary_factor"), 1.0)
        size = keys["head_dim"] or keys["hidden_size"] // keys["num_attention_heads"]
        rope["partial_rotary_factor"] = keys["partial_rotary_factor"] = keys["rope_scaling"] = None
        keys["rope_parameters"] = rope
        given["rope"]["dim"] = None if share == 1 else int(size * share)

    def write(self, config: ModelConfig) -> Json:
        return {"partial_rotary_factor": rotary_dim(config) / head_dim(config)}


class _TwoRopes(_Part):
    """Wavelengths of their own in layers with a window. Newer files have two tables in `rope_parameters`."""

    def read(self, keys: Keys, given: _Section, problems: list[str]) -> None:
        rope, windowed = keys.get("rope_parameters"), {}
        if rope:
            if not all(isinstance(rope.get(kind), Mapping) for kind in _KINDS):
                raise ValueError(f"rope_parameters is {shown(rope)}, and must have a table for each of {_KINDS}")
            windowed, whole = (rope[kind] for kind in _KINDS)
            if scaling := keys.get("rope_scaling"):
                whole.update(scaling)
                scaling.asked.update(scaling)
            keys |= {"rope_parameters": whole, "rope_scaling": None}
        keys.pop(_ORIGINAL, None)  # it counts where there is one table
        if _rule(windowed) != "default":
            raise ValueError(f"rope_parameters of sliding_attention are {shown(windowed)}: megamix stretches none such")
        theta = _first_set(windowed.get("rope_theta"), keys["rope_local_base_freq"], 10000.0)
        if "window" in given:
            given["window"]["rope_theta"] = theta

    def write(self, config: ModelConfig) -> Json:
        theta = _rope(config).theta
        own = _first_set(config.window and config.window.rope_theta, theta)
        whole = (_scaling(config) or {"rope_type": "default"}) | {"rope_theta": theta}
        ropes = {"full_attention": whole, "sliding_attention": {"rope_type": "default", "rope_theta": own}}
        return {"rope_parameters": ropes, "rope_local_base_freq": own}  # transformers 5 reads the first, 4 the second


@dataclass(frozen=True, slots=True)
class _Experts(_Part):
    """Experts of a softmax router. Losses for balance belong to a training, not to a model.

    `width`: the key of an expert's inner width. `normalize`: the key that says whether scores are normalised; None:
    they are. `mixes`: whether some layers may have none.
    """

    width: str = "intermediate_size"
    normalize: str | None = None
    mixes: bool = False

    def read(self, keys: Keys, given: _Section, problems: list[str]) -> None:
        problems += _unlike(keys, "decoder_sparse_step", 1) + _unlike(keys, "clip_qkv", None)
        dense: Any = (keys.get("mlp_only_layers") or []) if self.mixes else []
        if dense != [*range(len(dense))]:
            problems.append(f"mlp_only_layers is {shown(dense)}, megamix has layers without experts before all others")
        given["experts"] = {
            "num_experts": _first_set(keys.get("num_experts"), keys["num_local_experts"]),
            "top_k": keys["num_experts_per_tok"], "ffn_hidden_size": keys.get(self.width),
            "dense_layers": len(dense), "normalize": self.normalize is None or keys[self.normalize], "bias_rate": 0.0,
        }  # fmt: skip

    def write(self, config: ModelConfig) -> Json:
        if config.experts is None:
            return {}
        keys: dict[str, Any] = {
            "num_experts": config.experts.num_experts, "num_local_experts": config.experts.num_experts,
            "num_experts_per_tok": config.experts.top_k, self.width: config.experts.ffn_hidden_size,
        }  # fmt: skip
        if self.normalize is not None:
            keys[self.normalize] = config.experts.normalize
        if self.mixes:
            keys |= {"mlp_only_layers": [*range(config.experts.dense_layers)], "decoder_sparse_step": 1}
        return keys


class _GemmaFactors(_Part):
    """Gemma's activation, and its factors, which follow from sizes."""

    def read(self, keys: Keys, given: _Section, problems: list[str]) -> None:
        problems += _unlike(keys, "hidden_activation", "gelu_pytorch_tanh")
        if "attention_softcap" not in given:
            problems += _unlike(keys, "attn_logit_softcapping", None)  # transformers' Gemma 3 does not read it
        if keys.get("use_bidirectional_attention"):
            problems.append("use_bidirectional_attention is set, attention in megamix is causal")
        scalar = _whole(keys, "query_pre_attn_scalar")
        given["embedding_scale"] = math.sqrt(keys["hidden_size"])
        given["attention_scale"] = None if scalar == keys["head_dim"] else scalar**-0.5

    def write(self, config: ModelConfig) -> Json:
        # The whole number of which the factor of the products of queries and keys is 1 / sqrt(number).
        number = max(1, round(max(attention_scale(config), 1e-9) ** -2))
        return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": number}


@dataclass(frozen=True, eq=False, slots=True)
class RotaryFormat(Format):
    """The format of Llama and of families that differ from it in norms, biases, factors and windows. A Mistral without
    a window is a Llama, and is exported as one.
    """

    base: str = "model."
    places: Mapping[str, Location] = field(default_factory=lambda: _places(_LLAMA))
    size_keys: Mapping[str, str] = field(default_factory=lambda: ROTARY_SIZES)
    section: type[DecoderConfig] = ModelConfig
    block: Mapping[str, Any] = field(default_factory=dict)  # keys of [model] whose value is the family's
    named: Mapping[str, str] = field(default_factory=dict)  # further keys of [model], each with its key in config.json
    parts: tuple[_Part, ...] = ()
    defaults: Json = field(default_factory=dict)  # transformers', of keys that config.json may lack

    def read(self, json: Json) -> DecoderConfig:
        keys = Keys(json, {**_DEFAULTS, **self.defaults})
        keys.asked.update(self.defaults)  # one may decide what another is read for
        given: _Section = {"rope": {}, **self.block, **{ours: keys[theirs] for ours, theirs in self.named.items()}}
        problems = list[str]()
        if self.block.get("activation") != "geglu":
            problems += _unlike(keys, "hidden_act", "silu", "swish")
        for key in ("attention_bias", "attention_out_bias", "mlp_bias"):
            problems += _unlike(keys, key, False, True)
        for part in (*self.parts, _Rope()):
            try:
                part.read(keys, given, problems)
            except ValueError as error:
                problems.append(str(error))
            except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # a file that is damaged
                problems.append(f"it lacks a value or has one of another kind ({type(error).__name__}: {error})")
        _refuse(json, problems)
        return self.config_of(
            keys, norm_eps=keys["rms_norm_eps"], tie_embeddings=keys["tie_word_embeddings"], scaled_init=False, **given
        )

    def write(self, config: ModelConfig) -> Json:
        values = effective(config)
        keys = {
            **self.sizes_of(values), "rms_norm_eps": config.norm_eps,
            "attention_bias": False, "attention_dropout": 0.0,
            **{theirs: values[ours] for ours, theirs in self.named.items()},
        }  # fmt: skip
        if config.activation == "swiglu":
            keys["hidden_act"] = "silu"
        for part in (*self.parts, _Rope()):
            keys |= part.write(config)
        return keys


def _rope_table(keys: Keys) -> Any:
    """Return the table of rotary positions. transformers 5 reads `rope_scaling` alone where both tables are there, and
    a theta beside it. Raises: ValueError if the other one says something else.
    """
    table, added = (keys.get(key) or Keys({}) for key in ("rope_parameters", "rope_scaling"))
    if not added or not table:
        return added or table
    usual = {"rope_type": added.get("type", table.get("type", "default")), "rope_theta": keys["rope_theta"]}
    one, other = ({**usual, **each, "type": None} for each in (added, table))
    if one != other:
        raise ValueError(
            f"rope_scaling is {shown(added)}, and rope_parameters {shown(table)}: transformers reads the first alone, "
            f"with rope_theta {one['rope_theta']}; write all into rope_parameters, and take rope_scaling out"
        )
    table.asked.update(table)
    return added


def _rule(rope: Json) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _read_scaling(rope: Json, original_seq_len: Any, is_used: bool) -> RopeScaling | None:
    """Return the scaling of rotary positions. `original_seq_len`: that of the earlier training. `is_used`: whether any
    layer has it; transformers does not read it otherwise.

    Raises: ValueError with the reason to refuse it.
    """
    kind = _rule(rope)
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise ValueError(f"rope_type is {shown(kind)}, megamix has {', '.join(map(repr, ('default', *_SCALINGS)))}")
    known = _scaling_keys(kind)
    given = {key: rope[key] for key in known if rope.get(key) is not None}
    absent = [key for key in known[: 1 if kind == "yarn" else None] if key not in given]
    if absent and is_used:
        raise ValueError(f"rope_scaling: {kind} needs {' and '.join(absent)}, which config.json must have")
    if kind != "linear":
        given["original_seq_len"] = original_seq_len
    if kind == "yarn" and not rope.get("truncate", True):  # gpt-oss's
        raise ValueError(f"rope_scaling: truncate is {shown(rope['truncate'])}, which megamix does not have")
    ours, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")  # DeepSeek's
    if kind == "yarn" and ours and all_dim:
        given.setdefault("attention_factor", _magnified(given["factor"], ours) / _magnified(given["factor"], all_dim))
    try:
        return _SCALINGS[kind](rule=kind, **given)
    except ValidationError as error:
        raise ValueError(f"rope_scaling: {first_problem(error, {})}") from None


def _scaling_keys(kind: str) -> list[str]:
    """Return the keys of a scaling, but for the earlier length, which has another name in config.json."""
    return [key for key in _SCALINGS[kind].model_fields if key not in ("rule", "original_seq_len")]


def _magnified(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _rope(config: ModelConfig) -> RopeConfig:
    """Return what is written of rotary positions. Learned ones are in no format with rotary ones."""
    return config.rope or RopeConfig()


def _scaling(config: ModelConfig) -> dict[str, Any] | None:
    if (scaling := _rope(config).scaling) is None:
        return None
    values = {key: getattr(scaling, key) for key in _scaling_keys(scaling.rule)}
    if isinstance(scaling, Llama3Scaling | YarnScaling):
        values[_ORIGINAL] = scaling.original_seq_len
    return {"rope_type": scaling.rule, **{key: value for key, value in values.items() if value is not None}}


def _whole(keys: Json, key: str, least: int = 1) -> int:
    """Return a whole number in config.json. Raises: ValueError with the reason to refuse it."""
    value = keys.get(key)
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{key} is {shown(value)}, and must be a whole number of at least {least}")
    return value


def _unlike(json: Json, key: str, *allowed: Any) -> list[str]:
    """Return the reason to refuse a value of the key that is not allowed. The first allowed one is the default."""
    value = json.get(key, allowed[0])
    is_ours = type(value) is type(allowed[0]) and value in allowed  # 1 == True
    return [] if is_ours else [f"{key} is {shown(value)}, megamix has {' or '.join(map(shown, allowed))}"]


def _refuse(json: Json, problems: list[str]) -> None:
    if json.get("per_layer_config"):
        problems.append("per_layer_config is set, megamix has one setting for all layers")
    if json.get("quantization_config"):
        problems.append("quantization_config: the weights are quantised, give a folder of plain weights")
    if problems:
        raise ValueError(f"config.json: not supported by megamix.model.transformer: {'; '.join(problems)}; {OTHERS}")


def _first_set(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


_BIAS = {"bias": "attention_bias"}
_BIASES = _BIAS | {"mlp_bias": "mlp_bias"}
_CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
_QK_BLOCK = {"qk_norm": "head", "mlp_bias": False}
_OLMO_BLOCK = _QK_BLOCK | {"norm_place": "after", "qk_norm": "all"}
_GEMMA_BLOCK = {"norm": "rmsnorm_1p", "activation": "geglu", "norm_place": "both", "mlp_bias": False}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_QWEN = {"max_position_embeddings": 32768, "max_window_layers": 28}
_QWEN_WINDOWS = _Windows(lambda keys, given, layer: layer >= _whole(keys, "max_window_layers", 0), switch=True)
_SMOL_WINDOWS = _Windows(lambda keys, given, layer: layer in given["rope"].get("unrotated_layers", ()), switch=True)
_GEMMA3_WINDOWS = _Windows(lambda keys, given, layer: (layer + 1) % _whole(keys, "sliding_window_pattern") != 0)
FORMATS: tuple[Format, ...] = (
    GPT2Format(
        "gpt2", "GPT2LMHeadModel", "transformer.", _places(_GPT2) | _places(_GPT2_BLOCKS, transposed=True), GPT2_SIZES,
        ModelConfig,
    ),
    RotaryFormat("llama", "LlamaForCausalLM", named=_BIASES),
    RotaryFormat("mistral", "MistralForCausalLM", parts=(_Windows(by_layer=False),), defaults=_MISTRAL),
    RotaryFormat("ministral", "MinistralForCausalLM", parts=(_Windows(),), defaults=_MISTRAL),
    RotaryFormat("qwen2", "Qwen2ForCausalLM", block={"qkv_bias": True}, parts=(_QWEN_WINDOWS,), defaults=_QWEN),
    RotaryFormat(
        "qwen3", "Qwen3ForCausalLM", block=_QK_BLOCK, named=_BIAS, parts=(_QWEN_WINDOWS,),
        defaults=_QWEN | {"head_dim": 128},
    ),
    RotaryFormat(
        "qwen3_moe", "Qwen3MoeForCausalLM", places=_places(_MIXTURE), block=_QK_BLOCK, named=_BIAS,
        parts=(_Experts("moe_intermediate_size", "norm_topk_prob", mixes=True), _Windows(by_layer=False, switch=True)),
        defaults=_QWEN | {
            "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False,
            "moe_intermediate_size": 768,
        },
    ),
    RotaryFormat(
        "mixtral", "MixtralForCausalLM", places=_places(_MIXTRAL), parts=(_Experts(), _Windows(by_layer=False)),
        defaults=_MISTRAL | {
            "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
            "rope_theta": 1000000.0,
        },
    ),
    RotaryFormat(
        "olmoe", "OlmoeForCausalLM", places=_places(_MIXTURE),
        block=_QK_BLOCK | {"qk_norm": "all"}, named=_BIAS,
        parts=(_Experts(normalize="norm_topk_prob"),),
        defaults={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_local_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
    RotaryFormat(
        "granite", "GraniteForCausalLM", named=_BIASES | {
            "attention_scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_divisor": "logits_scaling",
        },
    ),
    RotaryFormat(
        "smollm3", "SmolLM3ForCausalLM", named=_BIASES, parts=(_Unrotated(), _SMOL_WINDOWS),
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
            "rope_theta": 2000000.0, "no_rope_layer_interval": 4, "sliding_window": None,
        },
    ),
    RotaryFormat(
        "seed_oss", "SeedOssForCausalLM", named=_BIASES | {"bias": "attention_out_bias", "qkv_bias": "attention_bias"},
        defaults=_MISTRAL | {"max_position_embeddings": 524288, "head_dim": 128, "attention_bias": True},
    ),
    RotaryFormat(
        "olmo2", "Olmo2ForCausalLM", places=_places(_OLMO), block=_OLMO_BLOCK, named=_BIAS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    RotaryFormat(
        "olmo3", "Olmo3ForCausalLM", places=_places(_OLMO), block=_OLMO_BLOCK, named=_BIAS,
        parts=(_Windows(lambda keys, given, layer: (layer + 1) % 4 != 0), _TwoRopes()),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_local_base_freq": 500000.0},
    ),
    RotaryFormat(
        "phi3", "Phi3ForCausalLM", places=_places(_PHI3),
        parts=(_Windows(by_layer=False), _PartlyRotated()),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
    ),
    RotaryFormat(
        "gemma2", "Gemma2ForCausalLM", places=_places(_GEMMA), block=_GEMMA_BLOCK, named=_BIAS | _CAPS,
        parts=(_GemmaFactors(), _Windows(lambda keys, given, layer: (layer + 1) % 2 != 0)),
        defaults={
            "max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    RotaryFormat(
        "gemma3_text", "Gemma3ForCausalLM", places=_places(_GEMMA), block=_GEMMA_BLOCK | {"qk_norm": "head"},
        named=_BIAS | {"logit_softcap": "final_logit_softcapping"},
        parts=(_GemmaFactors(), _GEMMA3_WINDOWS, _TwoRopes()),
        defaults={
            "max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
            "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
        },
    ),
)  # fmt: skip
