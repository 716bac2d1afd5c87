"""An export is whole or missing, and its shards have bounded sizes; a weight beyond FP16, a model of no family, a
damaged checkpoint are refused.
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from megamix.cli.verbs import main
from megamix.config import ExpertsConfig, ModelConfig, RopeConfig, WindowConfig
from megamix.data.tokenizer import END_OF_TEXT, Tokenizer
from megamix.hf.convert import export_model, import_model
from megamix.hf.links import format_of, formats
from megamix.hf.source import open_source
from tests.builders import run_on_ranks, tiny_job, write_data
from tests.checkpoint.faults import listing
from tests.hf.folders import GPT2, LLAMA, job_from, own_model, write_hugging_face


def test_a_weight_that_is_not_finite_or_beyond_fp16_is_refused_by_name_and_nothing_is_left(tmp_path, capsys):
    model = own_model(LLAMA).requires_grad_(False)
    model.blocks[1].feed_forward.up.weight[3, 2] = -65505.0
    write_hugging_face(LLAMA, tmp_path / "hf", model)
    assert main(["export", str(tmp_path / "hf"), "--to", "hf", str(tmp_path / "out"), "--dtype", "fp16"]) == 2
    assert (
        "model.layers.1.mlp.up_proj.weight has a weight of 65505, torch.float16 ends at 65504; export with "
        "--dtype bf16 or fp32" in capsys.readouterr().err
    )
    assert listing(tmp_path) == ["hf"]
    model.blocks[1].feed_forward.up.weight[3, 2] = -65504.0
    write_hugging_face(LLAMA, tmp_path / "out", model, "fp16")
    weights = load_file(tmp_path / "out/model.safetensors")
    assert float(weights["model.layers.1.mlp.up_proj.weight"].min()) == -65504.0
    with pytest.raises(ValueError, match="out is there already; give a new name"):
        write_hugging_face(LLAMA, tmp_path / "out", model)
    for value, dtype in ((float("nan"), "fp32"), (float("-inf"), "fp16")):
        model.blocks[1].feed_forward.up.weight[3, 2] = value
        with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight has a weight of (nan|inf): .* is damaged"):
            write_hugging_face(LLAMA, tmp_path / "new", model, dtype)
    assert listing(tmp_path) == ["hf", "out"]


MIXTURE = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=16, score="sigmoid", bias_rate=0.0)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (GPT2.model_copy(update={"rope": RopeConfig()}), "model.rope is a table, gpt2 has None"),
        (LLAMA.model_copy(update={"activation": "gelu"}), "model.activation is gelu, llama has swiglu"),
        (LLAMA.model_copy(update={"qk_norm": "head", "qkv_bias": True}), "model.qk_norm is head, qwen2 has none"),
        (LLAMA.model_copy(update={"experts": MIXTURE}), "the nearest: model.experts.score is sigmoid, mixtral has"),
    ],
)
def test_a_model_that_no_family_has_is_refused_with_the_keys_in_the_way(config, told, tmp_path):
    with pytest.raises(ValueError, match="no family of Hugging Face that is known here") as error:
        write_hugging_face(config, tmp_path / "out")
    assert told in str(error.value)
    assert listing(tmp_path) == []


def test_shards_are_bounded_and_indexed(tmp_path):
    model = write_hugging_face(LLAMA, tmp_path / "out", dtype="bf16", shard_size=2000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            held = {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118 (it is no dict)
        assert {tensor for tensor, place in index["weight_map"].items() if place == name} == set(held)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 2000


def test_a_run_s_export_brings_its_tokenizer_and_the_token_that_ends_a_text(tmp_path):
    write_data(tmp_path / "data", tokenizer=True)
    tokenizer = str(tmp_path / "data/tokenizer.json")
    run_on_ranks(tiny_job(tmp_path, vocab_size=300, tokenizer=tokenizer, steps=2, eval_interval=0))
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
    del settings["top_k"]
    assert json.loads((tmp_path / "out/config.json").read_text()).items() >= settings.items()


def _exported(tmp_path, tokenizer):
    """Export tmp_path/hf with `--tokenizer`. Return the files beside the weights, as text or JSON."""
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "hf"), "--to", "hf", str(out), "--tokenizer", str(tokenizer)]) == 0
    texts = {path.name: path.read_text() for path in out.iterdir() if path.suffix != ".safetensors"}
    shutil.rmtree(out)
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
    ids = {"eos_token_id": [7, 8], "bos_token_id": 5, "pad_token_id": None}
    assert found["generation_config.json"] == ids | {"top_k": 9}


def test_a_damaged_checkpoint_and_shards_without_a_size_are_not_exported(tmp_path, capsys):
    write_hugging_face(LLAMA, tmp_path / "hf")
    path = Path(import_model(tmp_path / "hf", tmp_path / "in")) / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["export", str(tmp_path / "in"), "--to", "hf", str(tmp_path / "out")]) == 1
    assert f"megamix export: damaged\n  {path}" in capsys.readouterr().err
    for size in ("nan", "0"):
        assert main(["export", str(tmp_path), "--to", "hf", str(tmp_path / "out"), "--shard-gb", size]) == 2
        assert f"--shard-gb {float(size)} must be positive and finite; write --shard-gb 5" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


OLMO = {"norm_place": "after", "qk_norm": "all"}
YARN = {"rule": "yarn", "factor": 4.0, "original_seq_len": 8}


def small(**keys):
    return ModelConfig(**dict(LLAMA) | {"seq_len": 16, "num_kv_heads": None, "scaled_init": False} | keys)


def test_a_format_does_not_lose_what_a_windows_layers_rotate_by():
    form = formats()["olmo3"]
    longest = form.write(small(**OLMO, window={"sizes": [16, 0], "rope_theta": 30.0}))
    again = form.read({"model_type": "olmo3", **longest})
    assert again.window == WindowConfig(sizes=(16, 0), rope_theta=30.0)  # though no window is shorter than a sequence
    with pytest.raises(ValueError, match="no family of Hugging Face"):
        format_of(small(**OLMO, window={"sizes": [4, 0]}, rope={"scaling": YARN}))
    assert format_of(small(**OLMO, window={"sizes": [4, 0], "rope_theta": 1e4}, rope={"scaling": YARN})) is form


def test_keys_that_say_the_same_in_other_words_are_in_no_format_s_way():
    for form, keys in (
        ("mistral", {"window": {"sizes": [4, 4], "rope_theta": 1e4}}),
        ("mistral", {"window": {"sizes": [16]}}),  # as long as any sequence
        ("llama", {"window": {"sizes": [0]}, "attention_scale": 6**-0.5}),
        ("smollm3", {"rope": {"unrotated_layers": [1, 0]}}),
        ("granite", {"attention_scale": 2.0}),  # gemma's whole number cannot say it
    ):
        assert format_of(small(**keys)).model_type == form


def test_a_format_writes_the_numbers_that_transformers_asks_for():
    granite = formats()["granite"].write(small(residual_scale=0.5))
    assert granite["attention_multiplier"] == 6**-0.5
    assert formats()["ministral"].write(small())["sliding_window"] == 16
