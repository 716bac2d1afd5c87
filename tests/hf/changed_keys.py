"""Folders of each format whose config.json has other values: what transformers makes of them, and what megamix does."""

import json
import random
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megamix.hf.convert import export_model
from megamix.hf.source import open_source
from tests.builders import SEQ_LEN, VOCAB
from tests.hf.folders import BY_LOOP, random_model, shapes

# Keys of older files, of other formats, and of none: a user adds them by hand or copies them from another model.
_ADDED = {
    "rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": None, "rope_local_base_freq": 10000.0,
    "sliding_window": None, "sliding_window_pattern": 6, "use_sliding_window": None, "layer_types": None,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": None, "head_dim": None,
    "clip_qkv": None, "logits_scaling": 1.0, "attention_multiplier": 1.0, "attention_bias": False, "mlp_bias": False,
    "attention_out_bias": False, "no_rope_layers": None, "original_max_position_embeddings": None, "num_experts": None,
    "mlp_only_layers": None, "quantization_config": None, "qk_layernorm": None, "torch_dtype": None, "no_such": None,
    "num_key_value_heads": None, "per_layer_config": {"0": {"no_such": 1}}, "scale_attn_weights": True, "dtype": None,
    "use_bidirectional_attention": None, "attention_chunk_size": None, "output_router_logits": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_TABLES = [
    None, {}, {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2}, {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}, {"rope_theta": 300.0}, {"rope_type": "dynamic"},
    YARN, YARN | {"rope_theta": 300.0}, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, YARN | {"mscale": 1.0},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}, YARN | {"mscale": True, "mscale_all_dim": 0.3},
    YARN | {"truncate": False}, YARN | {"truncate": 1}, YARN | {"attention_factor": 1.3, "mscale": 0.7},
    YARN | {"beta_fast": 20, "beta_slow": 0}, YARN | {"factor": None}, {"rope_type": "yarn", "factor": 2.0},
    _LLAMA3, _LLAMA3 | {"mscale": 1.0}, _LLAMA3 | {"rope_theta": 300.0}, {"rope_type": "no such"},
    {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "default", "factor": 3.0},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1},
]  # fmt: skip
_WORDS = {"hidden_act": ["gelu", "swish", "relu"], "hidden_activation": ["gelu", "silu", "gelu_pytorch_tanh"]}
_WORDS["activation_function"] = ["gelu", "relu", "gelu_pytorch_tanh"]
_WORDS["model_type"] = ["mistral", "qwen3", "llama"]
_KINDS = ["sliding_attention", "full_attention"]
TABLES = ("rope_parameters", "rope_scaling")


def _others(key, value, layers):
    """Return values that a key may have in place of this one."""
    if key in TABLES:
        return _TABLES
    if key in _WORDS:
        return _WORDS[key]
    if key == "layer_types":
        return [None, [], _KINDS[:1] * layers, _KINDS[1:] * layers, (_KINDS * layers)[:layers], ["no such"] * layers]
    if key in ("mlp_only_layers", "no_rope_layers"):
        return [None, [], [0], [1] * layers, [0] * layers, [*range(layers)]]
    match value:
        case bool():
            return [not value, None, int(value), int(not value), "no such"]
        case int() | float():
            return [2 * value, value + 1, None, 0, 1, float(value), value / 2, True]
        case str():
            return ["no such", None, 3]
        case list():
            return [[], None, value[::-1], value[:-1]]
        case dict():
            return [{}, None, {"no such": 1}]
    return [1, 2.0, 0.5, True, False, 0, "no such", {"bits": 4}, [1.0]]


def changes(written, count):
    """Yield config.json with each key changed to `count` other values, by what has changed. `written`: the file."""
    layers = written.get("num_hidden_layers", written.get("n_layer"))
    for key, value in {**_ADDED, **written}.items():
        rng = random.Random(f"{written['model_type']} {key}")
        others = [other for other in _others(key, value, layers) if repr(other) != repr(value)]
        chosen = others if key in TABLES and count > 2 else rng.sample(others, min(count, len(others)))
        for other in chosen:
            yield f"{key} = {other!r}", {**written, key: other}
        if key in TABLES and isinstance(value, dict):
            yield from _changed_tables(written, key, value, layers, count)
        if key in written:
            yield f"{key} absent", {name: kept for name, kept in written.items() if name != key}


def _changed_tables(written, key, table, layers, count):
    for name, value in table.items():
        if isinstance(value, dict):
            for told, other in _changed_tables({}, name, value, layers, count):
                yield f"{key}.{told}", {**written, key: {**table, **other}}
            continue
        rng = random.Random(f"{written.get('model_type')} {key} {name}")
        others = [each for each in _others(name, value, layers) if repr(each) != repr(value)]
        for other in rng.sample(others, min(count, len(others))):
            yield f"{key}.{name} = {other!r}", {**written, key: {**table, name: other}}
        yield f"{key}.{name} absent", {**written, key: {one: kept for one, kept in table.items() if one != name}}


def write_folder(family, number, folder):
    """Write a random model of a format. Return its config.json, and tokens for it."""
    shape = [*shapes(family, number + 1)][number]
    torch.manual_seed(number)
    random_model(family, shape).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    length = SEQ_LEN if family == "gpt2" else SEQ_LEN + 16  # beyond the lengths that stretched positions begin with
    return written, torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(number))


def _theirs(folder, tokens):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    sizes = (config.vocab_size, config.hidden_size, getattr(config, "intermediate_size", None) or 0)
    if max(sizes) > 1000 or config.num_hidden_layers > 4:
        raise ValueError("a size is transformers' default: the tensors have others")
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True, **BY_LOOP
    )
    if any(told.values()):
        raise ValueError(f"tensors are missing or left: {told}")
    return model.eval()(tokens, use_cache=False, return_dict=True).logits


def _exported(source, theirs, tokens):
    """Return transformers' logits of an export; those given where it is refused."""
    with TemporaryDirectory() as out:
        with suppress(ValueError):
            export_model(source, Path(out, "hf"), "fp32")
            theirs = None
        return _theirs(Path(out, "hf"), tokens) if theirs is None else theirs


@torch.no_grad()
def verdict(folder, config, tokens, *, exports=False):
    """Return how megamix takes the folder with this config.json: "equal", "wrong", "refused", "refused by both" or
    "refused by transformers"; and the reason. `exports`: whether an export that is not refused must be equal, too.
    """
    (folder / "config.json").write_text(json.dumps(config))
    ours = theirs = None
    told = ""
    try:
        theirs = _theirs(folder, tokens)
    except Exception as error:  # whatever a file makes transformers raise
        told = f"theirs: {type(error).__name__}: {error}"
    try:
        source = open_source(folder)
        ours = source.load(torch.float32, torch.device("cpu"))(tokens)
    except (ValueError, ZeroDivisionError) as error:  # the latter for a theta of 1
        told = f"{error} {told}"
    if ours is None or theirs is None:
        both = ours is theirs
        return "refused by both" if both else "refused" if ours is None else "refused by transformers", told
    gap = float((ours - theirs).abs().max() / theirs.abs().max())
    if exports and gap < 5e-6:
        gap = float((_exported(source, theirs, tokens) - theirs).abs().max() / theirs.abs().max())
    return "equal" if gap < 5e-6 else "wrong", f"{gap:.1e}"
