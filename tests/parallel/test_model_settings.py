"""Settings of our transformer beyond Llama's train on every kind of mesh as one rank in FP64 does: YaRN, layers without
rotary positions, norms over all heads, norms of outputs, factors, and latent attention. What ranks cannot divide is
refused.
"""

import pytest
import torch

from megamix.config import ConfigError, ModelConfig, model_problems
from megamix.model.transformer import Transformer
from tests.builders import tiny_job
from tests.conftest import FULL
from tests.tools.verify.catalogue.run import judged_layouts
from tests.tools.verify.jobs import make_config

LATENT = {"kv_rank": 12, "query_rank": 20, "unrotated_dim": 8, "rotary_dim": 4, "value_dim": 10}
SETTINGS = {
    "yarn": {"rope": {"scaling": {"rule": "yarn", "factor": 4.0, "original_seq_len": 16}}},
    "unrotated": {"rope": {"unrotated_layers": [1]}},
    "norm over all heads": {"qk_norm": "all"},
    "norms of outputs": {"norm_place": "after"},
    "latents": {"num_kv_heads": None, "latent_attention": LATENT, "recompute": "selective"},
    "norms of both": {"norm_place": "both", "recompute": "selective"},
    "first layers again": {"recompute": {"full": 0.5}},
    "factors": {"attention_scale": 0.3, "embedding_scale": 2.5, "residual_scale": 0.6, "logit_divisor": 3.0},
    "latents of keys": {
        "num_kv_heads": None,
        "latent_attention": {**LATENT, "query_rank": None, "value_dim": 16},
        "window": {"sizes": [5, 0], "rope_theta": 100.0},
    },
    "windows": {"window": {"sizes": [5, 0]}},
    "windows with their own wavelengths": {"window": {"sizes": [5, 0], "rope_theta": 100.0}},
    "rotary dim": {"rope": {"dim": 4}},
    "capped scores": {"window": {"sizes": [5, 0]}, "attention_softcap": 2.0},
    "capped logits": {"logit_softcap": 1.0, "z_loss": 0.01},
    "gated attention": {"attention_gate": True, "activation": "relu2"},
    "Gemma's norms": {"norm": "rmsnorm_1p", "qk_norm": "head", "norm_place": "both", "activation": "geglu"},
}
LAYOUTS = ("tp2", "tp2sp", "pp2", "cp2")
CASES = [
    (setting, layout, dtype)
    for number, setting in enumerate(SETTINGS if FULL else [*SETTINGS][::2])
    for turn, layout in enumerate(LAYOUTS)
    for dtype in (("fp32", "bf16", "fp16") if FULL else ("fp16",))
    if (FULL or turn == number % len(LAYOUTS)) and not (setting == "norm over all heads" and layout.startswith("tp"))
]


def test_each_setting_passes_verify_on_a_divided_mesh(run_ranks):
    configs = [
        make_config(
            layout, dtype=dtype, model=SETTINGS[setting],
            cp_method="heads" if "attention_softcap" in SETTINGS[setting] else "gather",
        )
        for setting, layout, dtype in CASES
    ]  # fmt: skip
    for case, verdict in zip(CASES, judged_layouts(run_ranks, 2, configs), strict=True):
        assert not verdict.differences, (case, str(verdict.differences[0]))


def test_windows_end_at_documents_whose_positions_ranks_divide(run_ranks):
    config = make_config("cp2", dtype="fp16", packing="documents", model={"window": {"sizes": [5, 0]}, "seq_len": 32})
    (verdict,) = judged_layouts(run_ranks, 2, [config])
    assert verdict.differences == []


def test_gradients_of_latents_that_tp_ranks_do_not_sum_are_caught(run_ranks):
    config = make_config("tp2", loss_scale=4.0, model=SETTINGS["latents"])
    (verdict,) = judged_layouts(run_ranks, 2, [config], ["heads_of_one_rank"], None, 1)
    wrong = {one.where.partition("attention.")[2] for one in verdict.differences if one.check == "gradient"}
    assert wrong == {f"{name}.weight" for name in ("query_down", "query_norm", "kv_down", "kv_norm", "rotated_key")}


def test_norms_of_both_stand_around_each_part():
    sizes = {"vocab_size": 8, "seq_len": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
    model = Transformer(ModelConfig(**sizes, norm_place="both", residual_scale=0.5))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    block, x, rotary = model.blocks[0], torch.randn(1, 8, 8), model.rotary(8)
    middle = x + 0.5 * block.attention_end_norm(block.attention(block.attention_norm(x), rotary, None, None))
    want = middle + 0.5 * block.feed_forward_end_norm(block.feed_forward(block.feed_forward_norm(middle)))
    assert torch.equal(block(x, rotary, None, None), want)


def test_a_norm_over_all_heads_is_not_divided(tmp_path):
    with pytest.raises(ConfigError, match='tensor.size: got 2, but model.qk_norm = "all" needs all heads on one rank'):
        tiny_job(tmp_path, model=SETTINGS["norm over all heads"], tensor={"size": 2})


def test_an_unrotated_layer_is_one_of_the_model():
    sizes = {"vocab_size": 8, "seq_len": 8, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
    (problem,) = model_problems(ModelConfig(**sizes, rope={"unrotated_layers": (2,)}))
    assert problem == "model.rope.unrotated_layers: got [2], but num_layers is 2; write layers from 0 to 1"
