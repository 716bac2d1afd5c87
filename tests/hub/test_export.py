"""An export is whole or missing, and its shards have bounded sizes; a weight beyond FP16, a model of no family, a
damaged checkpoint are refused.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megamix.checkpoint.boxes import Box
from megamix.cli import main
from megamix.config import ModelConfig
from megamix.data.tokenizer import END_OF_TEXT, Tokenizer
from megamix.hub.convert import export_model, import_model
from megamix.hub.links import format_of, formats
from megamix.hub.source import Source, open_source
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.checkpoint.faults import listing
from tests.hub.folders import GPT2, LLAMA, InMemory, job_from, own_model, write_hugging_face


def test_a_weight_beyond_fp16_is_refused_by_name_and_nothing_is_left(tmp_path, capsys):
    model = own_model(LLAMA)
    with torch.no_grad():
        model.blocks[1].feed_forward.up.weight[3, 2] = -65505.0
    source = Source(tmp_path, LLAMA, InMemory(model), "fp32", None)
    export_model(source, tmp_path / "hf", "fp32")
    assert main(["export", str(tmp_path / "hf"), "--to", "hf", str(tmp_path / "out"), "--dtype", "fp16"]) == 2
    assert (
        "model.layers.1.mlp.up_proj.weight has a weight of 65505, torch.float16 ends at 65504; export with "
        "--dtype bf16 or fp32" in capsys.readouterr().err
    )
    assert listing(tmp_path) == ["hf"]
    with torch.no_grad():
        model.blocks[1].feed_forward.up.weight[3, 2] = -65504.0
    export_model(source, tmp_path / "out", "fp16")
    weights = load_file(tmp_path / "out/model.safetensors")
    assert float(weights["model.layers.1.mlp.up_proj.weight"].min()) == -65504.0
    with pytest.raises(ValueError, match="out is there already; give a new name"):
        export_model(source, tmp_path / "out", "fp32")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name_whatever_the_dtype(value, tmp_path):
    model = own_model(LLAMA)
    with torch.no_grad():
        model.blocks[1].feed_forward.up.weight[3, 2] = value
    source = Source(tmp_path, LLAMA, InMemory(model), "fp32", None)
    for dtype in ("fp32", "fp16"):
        with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight has a weight of (nan|inf): .* is damaged"):
            export_model(source, tmp_path / "out", dtype)
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (GPT2.model_copy(update={"position": "rotary"}), "model.position is rotary, gpt2 has learned"),
        (LLAMA.model_copy(update={"activation": "gelu"}), "model.activation is gelu, llama has swiglu"),
        (LLAMA.model_copy(update={"qk_norm": True, "qkv_bias": True}), "model.qk_norm is True, qwen2 has False"),
    ],
)
def test_a_model_that_no_family_has_is_refused_with_the_keys_in_the_way(config, told, tmp_path):
    with pytest.raises(ValueError, match="no family of Hugging Face that is known here") as error:
        export_model(Source(tmp_path, config, InMemory(own_model(config)), "fp32", None), tmp_path / "out", "fp32")
    assert told in str(error.value)
    assert listing(tmp_path) == []


def test_a_scale_of_attention_that_gemma_s_whole_number_cannot_say_is_exported_as_granite(tmp_path):
    write_hugging_face(LLAMA.model_copy(update={"attention_scale": 2.0}), tmp_path / "hf")
    found = json.loads((tmp_path / "hf/config.json").read_text())
    assert (found["model_type"], found["attention_multiplier"]) == ("granite", 2.0)


def test_shards_are_bounded_and_indexed(tmp_path):
    model = own_model(LLAMA)
    size = export_model(Source(tmp_path, LLAMA, InMemory(model), "fp32", None), tmp_path / "out", "bf16", 2000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert size == index["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            held = {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118 (it is no dict)
        assert {tensor for tensor, place in index["weight_map"].items() if place == name} == set(held)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 2000


def test_a_run_s_export_brings_its_tokenizer_and_the_token_that_ends_a_text(tmp_path):
    write_data(tmp_path / "data", tokenizer=True)
    tokenizer = str(tmp_path / "data/tokenizer.json")
    config = tiny_job(tmp_path, vocab_size=300, tokenizer=tokenizer, steps=2, eval_interval=0)
    run_on_ranks(config)
    export_model(open_source(tmp_path / "run"), tmp_path / "out", "fp32")
    assert listing(tmp_path / "out") == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    end = json.loads((tmp_path / "data/tokenizer.json").read_text())["model"]["vocab"]["<|endoftext|>"]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == end
    Path(tokenizer).unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json is missing; start in the folder that the run was started in"):
        export_model(open_source(tmp_path / "run"), tmp_path / "again", "fp32")


def test_a_run_that_began_from_an_imported_model_is_exported_with_its_tokens_and_settings(tmp_path):
    write_data(tmp_path / "data")
    write_hugging_face(LLAMA, tmp_path / "hf")
    settings = {"bos_token_id": 0, "eos_token_id": [7, 8], "pad_token_id": 3, "top_k": 9}
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(settings))
    import_model(tmp_path / "hf", tmp_path / "in")
    run_on_ranks(job_from(tmp_path / "in", tmp_path / "data", tmp_path / "run", **{"training.eval_interval": 0}))
    export_model(open_source(tmp_path / "run"), tmp_path / "out", "fp32")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == settings
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.items() >= {key: value for key, value in settings.items() if key != "top_k"}.items()


def _exported(tmp_path, tokenizer):
    """Export tmp_path/hf with `--tokenizer`. Return the files beside the weights, as text or JSON."""
    assert (
        main(["export", str(tmp_path / "hf"), "--to", "hf", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]) == 0
    )
    texts = {path.name: path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    shutil.rmtree(tmp_path / "out")
    return {name: json.loads(text) if "config" in name else text for name, text in texts.items()}


def test_a_tokenizer_s_file_is_exported_under_its_usual_name_with_the_model_s_own_ids_first(tmp_path):
    write_hugging_face(LLAMA, tmp_path / "hf")
    folder = tmp_path / "tk"
    folder.mkdir()
    mine, other = (Tokenizer.train(["a b c d " * size], 257 + size) for size in (2, 3))
    mine.save(folder / "my_tok.json")
    other.save(folder / "tokenizer.json")
    (folder / "added_tokens.json").write_text("{}")
    found = _exported(tmp_path, folder / "my_tok.json")
    assert found["tokenizer.json"] == (folder / "my_tok.json").read_text()
    assert found["tokenizer_config.json"]["eos_token"] == END_OF_TEXT
    assert "added_tokens.json" not in found, "it lies beside my_tok.json, but is the other one's"
    assert found["config.json"]["eos_token_id"] == found["generation_config.json"]["eos_token_id"] == mine.end_of_text

    (tmp_path / "hf/generation_config.json").write_text('{"eos_token_id": [7, 8], "bos_token_id": 5, "top_k": 9}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 3, "top_k": 2}')
    found = _exported(tmp_path, folder / "tokenizer.json")
    assert found["tokenizer.json"] == (folder / "tokenizer.json").read_text()
    assert found["added_tokens.json"] == "{}"
    assert [found["config.json"][key] for key in ("eos_token_id", "bos_token_id")] == [[7, 8], 5]
    assert found["generation_config.json"] == {
        "eos_token_id": [7, 8],
        "bos_token_id": 5,
        "pad_token_id": None,
        "top_k": 9,
    }


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_shard_has_a_size(size, tmp_path, capsys):
    assert main(["export", str(tmp_path), "--to", "hf", str(tmp_path / "out"), "--shard-gb", size]) == 2
    assert f"--shard-gb {float(size)} must be positive and finite; write --shard-gb 5" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(tmp_path, capsys):
    write_hugging_face(LLAMA, tmp_path / "hf")
    path = Path(import_model(tmp_path / "hf", tmp_path / "in")) / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["export", str(tmp_path / "in"), "--to", "hf", str(tmp_path / "out")]) == 1
    assert f"megamix export: damaged\n  {path}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_piece_of_a_fused_tensor_is_made_of_all_its_parts(tmp_path):
    model = own_model(GPT2)
    export_model(Source(tmp_path, GPT2, InMemory(model), "fp32", None), tmp_path / "out", "fp32")
    fused = load_file(tmp_path / "out/model.safetensors")["transformer.h.1.attn.c_attn.weight"]
    attention = model.blocks[1].attention
    want = torch.cat([attention.query.weight, attention.key.weight, attention.value.weight]).T
    assert torch.equal(fused, want)
    read = open_source(tmp_path / "out").weights.read("blocks.1.attention.key.weight", Box((2, 3), (5, 4)))
    assert torch.equal(read, attention.key.weight[2:7, 3:7])


SMALL = {
    "vocab_size": 64, "seq_len": 16, "hidden_size": 12, "num_layers": 2, "num_heads": 2, "tie_embeddings": False,
    "scaled_init": False,
}  # fmt: skip
OLMO = {"norm_place": "after", "qk_norm": True, "qk_norm_over": "all"}
YARN = {"rule": "yarn", "factor": 4.0, "original_seq_len": 8}


def test_a_format_does_not_lose_what_a_windows_layers_rotate_by():
    form = formats()["olmo3"]
    longest = form.write(ModelConfig(**SMALL, **OLMO, windows=[16, 0], window_rope_theta=30.0))
    again = form.read({"model_type": "olmo3", **longest})
    assert (again.windows, again.window_rope_theta) == ((16, 0), 30.0)  # though no window is shorter than a sequence
    with pytest.raises(ValueError, match="no family of Hugging Face"):
        format_of(ModelConfig(**SMALL, **OLMO, windows=[4, 0], rope_scaling=YARN))
    assert format_of(ModelConfig(**SMALL, **OLMO, windows=[4, 0], rope_scaling=YARN, window_rope_theta=1e4)) is form


def test_a_window_as_long_as_any_sequence_comes_back_from_a_format():
    form = format_of(config := ModelConfig(**SMALL, windows=[16]))
    assert (form.model_type, form.read(form.write(config)).windows) == ("mistral", (16,))


def test_keys_that_say_the_same_in_other_words_are_in_no_format_s_way():
    assert format_of(ModelConfig(**SMALL, windows=[4, 4], window_rope_theta=1e4)).model_type == "mistral"
    assert format_of(ModelConfig(**SMALL, attention_scale=6**-0.5)).model_type == "llama"
    assert format_of(ModelConfig(**SMALL, unrotated_layers=[1, 0])).model_type == "smollm3"


def test_the_nearest_format_of_a_mixture_is_a_mixture_and_differs_in_single_keys():
    experts = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "score": "sigmoid", "bias_rate": 0.0}
    with pytest.raises(ValueError, match=r"the nearest: model.experts.score is sigmoid, mixtral has softmax$"):
        format_of(ModelConfig(**SMALL, experts=experts))


def test_a_format_writes_the_numbers_that_transformers_asks_for():
    granite = formats()["granite"].write(ModelConfig(**SMALL, residual_scale=0.5))
    assert granite["attention_multiplier"] == 6**-0.5
    assert formats()["ministral"].write(ModelConfig(**SMALL))["sliding_window"] == 16
    assert format_of(ModelConfig(**SMALL, windows=[0])).model_type == "llama"
