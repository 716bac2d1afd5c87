"""Random Hugging Face models of each family in every way that ours can be them, and jobs that begin from one."""

import random

import torch

from megamix.checkpoint.boxes import Box
from megamix.config import ModelConfig, load_config
from megamix.hf.convert import export_model
from megamix.hf.source import Source
from megamix.model.transformer import Transformer
from tests.builders import SEQ_LEN, VOCAB
from tests.conftest import FULL

GPT2 = ModelConfig(
    vocab_size=VOCAB, seq_len=SEQ_LEN, hidden_size=12, num_layers=2, num_heads=2, norm="layernorm", rope=False,
    activation="gelu_tanh", bias=True,
)  # fmt: skip
LLAMA = ModelConfig(
    vocab_size=VOCAB, seq_len=SEQ_LEN, hidden_size=12, num_layers=2, num_heads=2, num_kv_heads=1, tie_embeddings=False
)
STEPS = 10 if FULL else 3
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "olmo2", "granite", "smollm3", "seed_oss")
WINDOWED = ("mistral", "ministral", "gemma2", "gemma3_text", "olmo3", "phi3")
MIXTURES = ("qwen3_moe", "mixtral", "olmoe")
BY_LOOP = {"experts_implementation": "eager"}  # for transformers: torch's grouped product takes no odd sizes
_WHOLE_HEADS = ("qwen2", "olmo2", "olmo3", "granite", "smollm3", "gemma2", "gemma3_text", "phi3", "olmoe")
_FULL, _SLIDES = "full_attention", "sliding_attention"


def shapes(family, count):
    """Keyword arguments of the family's configuration in transformers; the first two are tied and untied."""
    rng = random.Random(family)
    for number in range(count):
        tied, kv_heads, head_dim = number % 2 == 0, rng.choice((1, 2)), 2 * rng.randint(4, 8)
        heads = kv_heads * rng.choice((1, 2, 3))
        common = {"vocab_size": VOCAB, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": None}
        if family == "gpt2":
            yield common | {
                "n_positions": SEQ_LEN, "n_layer": rng.randint(1, 3), "n_head": heads, "n_embd": heads * head_dim,
                "n_inner": rng.choice((None, 40)), "activation_function": ("gelu_new", "gelu")[number % 2],
            }  # fmt: skip
            continue
        layers = rng.randint(1, 3)
        hidden = heads * head_dim if family in _WHOLE_HEADS or rng.random() < 0.5 else heads * 10
        rope = {"rope_type": "default", "rope_theta": rng.choice((500.0, 1e6))}
        if number % 3 == 1:
            rope |= {"rope_type": "linear", "factor": 4.0}
        if number % 3 == 0:
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope |= {"original_max_position_embeddings": 16}
        if number % 4 == 2:
            rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": SEQ_LEN}
            rope |= {} if tied else {"beta_fast": 20.0, "attention_factor": 1.3}
        half = not tied and head_dim % 4 == 0  # of a head, an even number of elements
        gemma = {"sliding_window": 5, "query_pre_attn_scalar": head_dim if tied else 7}
        gemma |= {"attention_bias": number % 4 > 1}
        experts = {"num_local_experts": 4 + 2 * tied, "num_experts_per_tok": 1 + number % 3}
        two_ropes = {"rope_parameters": {_FULL: rope, _SLIDES: {"rope_type": "default", "rope_theta": 300.0}}}
        yield common | {
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": rng.choice((24, 40)),
            "max_position_embeddings": 2 * SEQ_LEN, "rms_norm_eps": 1e-6, "rope_parameters": rope,
        } | {
            "llama": {"attention_bias": number % 2 == 1, "mlp_bias": number % 4 > 1},
            "mistral": {"sliding_window": (5, 2 * SEQ_LEN, None)[number % 3]},  # the second is as long as a sequence
            "ministral": {"sliding_window": 5, "layer_types": None if tied else [_FULL, _SLIDES, _SLIDES][:layers]},
            "gemma2": gemma | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": None if tied else 2.0},
            "gemma3_text": gemma | two_ropes | {"final_logit_softcapping": 2.0 if number % 4 == 1 else None},
            "phi3": {
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5 if half else 1.0},
                "pad_token_id": None, "sliding_window": 5 if number % 4 == 2 else None,
            },
            "olmo3": {"sliding_window": 5, "layer_types": [_FULL, _SLIDES, _SLIDES][:layers]} | two_ropes,
            "qwen2": {} if tied else {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
            "qwen3": {} if tied else {"use_sliding_window": True, "sliding_window": 64, "attention_bias": True},
            "olmo2": {"attention_bias": not tied},
            "granite": {
                "attention_bias": not tied, "embedding_multiplier": 2.5, "residual_multiplier": 0.6,
                "attention_multiplier": 0.2, "logits_scaling": 3.0,
            },
            "smollm3": {
                "no_rope_layers": None if tied else [0, 1, 1][:layers], "no_rope_layer_interval": 2,
                "pad_token_id": None,
            },
            "qwen3_moe": experts | {
                "moe_intermediate_size": 20, "norm_topk_prob": tied, "attention_bias": not tied,
                "mlp_only_layers": [0] if layers > 1 and number % 3 == 1 else [],
            } | ({} if tied else {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
            "mixtral": experts | {"sliding_window": None if tied else 5},
            "olmoe": experts | {"norm_topk_prob": not tied, "attention_bias": tied},
            "seed_oss": {"attention_bias": tied, "attention_out_bias": not tied, "mlp_bias": number % 4 == 1},
        }[family]  # fmt: skip


def random_model(family, shape):
    """Return a model of transformers. No weight of it is zero or one, so that each shows in the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **shape)
    model = AutoModelForCausalLM.from_config(config, **BY_LOOP).eval().requires_grad_(False)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def job_from(imported, data, folder, **overrides):
    """Return a job on data as `write_data` writes them, which begins from an imported model by its model.toml."""
    path = folder.with_suffix(".toml")
    path.write_text(
        f'base = "{imported / "model.toml"}"\n[data]\ntrain = "{data / "train"}"\n[checkpoint]\nfolder = "{folder}"\n'
        "[optimizer]\nlr = 1e-3\ncompile = false\n[training]\nmicro_batch_size = 2\nglobal_batch_size = 4\n"
        f"steps = {STEPS}\n"
        "[metrics]\ntensorboard = false\nprecision_interval = 0\n"
    )
    return load_config(path, [f"{key}={value}" for key, value in overrides.items()])


class InMemory:
    """The weights of a model of our own."""

    def __init__(self, model):
        self.params = dict(model.named_parameters())

    def read(self, param, box):
        value = self.params[param].detach()
        return value[box.slices_in(Box.whole(tuple(value.shape)))]

    def where(self, param, place):
        return f"{param} {list(place)}"


def own_model(config):
    """Return a model of our own with weights like those of random_model."""
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def write_hugging_face(config, folder, model=None, dtype="fp32", **settings):
    """Write a Hugging Face folder without transformers. Return its model, `own_model` unless one is given."""
    model = model or own_model(config)
    export_model(Source(folder, config, InMemory(model), "fp32", None), folder, dtype, **settings)
    return model
