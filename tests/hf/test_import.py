"""A setting that our transformer does not support, and every tensor that is missing, unknown or of another shape, is
refused by name. An import is streamed, verified, and whole or missing; a run on any ranks can begin from it.
"""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamix.checkpoint import boxes
from megamix.checkpoint.folder import Files
from megamix.checkpoint.verify import read_checkpoint
from megamix.cli.verbs import main
from megamix.config import ConfigError, TransformersConfig, load_config
from megamix.hf import convert
from megamix.hf.convert import import_model
from megamix.hf.folder import HuggingFaceWeights
from megamix.hf.source import CheckpointWeights, open_source
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.transformers_model import TransformersModel
from tests.builders import SEQ_LEN, run_on_ranks, write_data
from tests.checkpoint.faults import listing
from tests.hf.folders import GPT2, LLAMA, job_from, random_model, shapes, write_hugging_face

QWEN2 = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 6}
STRETCHED = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}, "full_attention": {"rope_type": "default"}}


def test_an_imported_folder_is_a_verified_checkpoint_a_base_and_a_tokenizer(tmp_path, capsys):
    write_data(tmp_path / "data", tokenizer=True)
    model = write_hugging_face(LLAMA, tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_bytes((tmp_path / "data/tokenizer.json").read_bytes())
    (tmp_path / "hf/generation_config.json").write_text('{"eos_token_id": [7, 9], "top_k": 3}')
    assert main(["import", str(tmp_path / "hf"), "--output", str(tmp_path / "new/in")]) == 0
    assert listing(tmp_path / "new") == ["in"]
    assert listing(tmp_path / "new/in") == [
        "checkpoints", "generation_config.json", "model.toml", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    settings = json.loads((tmp_path / "new/in/generation_config.json").read_text())
    assert (settings["eos_token_id"], settings["top_k"]) == ([7, 9], 3)
    assert main(["checkpoint", "verify", str(tmp_path / "new/in")]) == 0
    assert "step_00000000: good; 1 files" in capsys.readouterr().out

    config = job_from(tmp_path / "new/in", tmp_path / "data", tmp_path / "run")
    told = {"scaled_init": False, "ffn_hidden_size": 64, "head_dim": 6, "mlp_bias": False}
    assert config.model == LLAMA.model_copy(update=told)
    assert config.data.tokenizer == str(tmp_path / "new/in/tokenizer.json")
    weights = CheckpointWeights(read_checkpoint(Path(config.checkpoint.resume)))
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read(name, boxes.Box.whole(tuple(parameter.shape))), parameter), name


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_shards_and_pieces_of_any_size_hold_the_same_weights(config, tmp_path, monkeypatch):
    model = write_hugging_face(config, tmp_path / "hf", shard_size=3000)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 4
    read, sizes = HuggingFaceWeights.read, []
    monkeypatch.setattr(HuggingFaceWeights, "read", lambda *given: sizes.append(given[2].numel) or read(*given))
    monkeypatch.setattr(boxes, "_LARGEST_SUB_BOX", 100)
    monkeypatch.setattr(convert, "FILE_SIZE", 1000)
    checkpoint = Path(import_model(tmp_path / "hf", tmp_path / "in"))
    assert 90 < max(sizes) <= 100  # elements held at a time, of parameters of up to 64 x 12
    files = list(checkpoint.glob("rank_*"))
    assert len(files) > 10
    assert max(path.stat().st_size for path in files) < 1000 + 4000  # and the header
    loaded = open_source(tmp_path / "in").load(torch.float32, torch.device("cpu"))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), loaded.parameters(), strict=True))


OTHERS = "; to train it as it is, write family ="


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"model_type": "falcon"}, f"gemma2, gemma3_text{OTHERS}"),
        ({"hidden_act": "gelu"}, f"hidden_act is 'gelu', megamix has 'silu' or 'swish'{OTHERS}"),
        ({"hidden_act": "x" * 10**6}, "... (1000002 characters), megamix has 'silu' or 'swish'"),
        ({"mlp_bias": 1}, "mlp_bias is 1, megamix has False or True"),
        ({"rope_theta": 0}, "rope_theta: got 0"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers is [1], megamix has layers"),
        ({"model_type": "mixtral", "num_local_experts": None}, "experts.num_experts: got None"),
        ({"model_type": "mixtral", "layer_types": ["full_attention"] * 2}, "is not read by such a model; leave it out"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling: factor: got 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, megamix rotates whole heads"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters differ by layer"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: the weights are quantised"),
        (QWEN2 | {"layer_types": ["sliding_attention"]}, "num_hidden_layers 2 entries"),
        (QWEN2 | {"max_window_layers": "x"}, "max_window_layers is 'x'"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "window_pattern is 0"),
        (GEMMA3 | {"attn_logit_softcapping": 5.0}, "softcapping is 5.0"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "attention in megamix is causal"),
        ({"model_type": "olmo3", "rope_parameters": STRETCHED}, "rope_parameters of sliding_attention are"),
        ({"model_type": "olmo3", "rope_parameters": {"rope_theta": 9.0}}, "must have a table for each of"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, 'write model_type = "ministral"'),
        ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window is 'x', and must be a whole"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"n_embd": 13}, "model.hidden_size: got 13, must divide by num_heads 2"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
    ],
)
def test_what_our_transformer_does_not_do_is_refused(keys, told, tmp_path, capsys):
    write_hugging_face(GPT2 if {"activation_function", "n_embd"} & keys.keys() else LLAMA, tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "hidden_size" or value}))
    assert main(["import", str(tmp_path / "hf"), "--output", str(tmp_path / "in")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megamix import: {tmp_path / 'hf'}")
    assert told in error
    assert listing(tmp_path) == ["hf"]


def test_missing_unknown_and_misshapen_tensors_are_all_named(tmp_path):
    write_hugging_face(LLAMA, tmp_path / "hf")

    path = tmp_path / "hf/model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.experts.weight"] = torch.zeros(3, 4)
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(12, 11)
    tensors["lm_head.weight"] = torch.zeros(64, 12, dtype=torch.int8)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="are not those of its config.json") as error:
        import_model(tmp_path / "hf", tmp_path / "in")
    for told in (
        r"missing model.norm.weight [12]",
        "unknown model.layers.0.mlp.experts.weight [3, 4]",
        "model.layers.1.self_attn.q_proj.weight has shape [12, 11], config.json makes it [12, 12]",
        "lm_head.weight is I8, only F32, F16, BF16 are read",
    ):
        assert told in str(error.value)


def test_shapes_that_a_default_gives_name_its_key(tmp_path):
    write_hugging_face(LLAMA, tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    less = {key: value for key, value in config.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    (tmp_path / "hf/config.json").write_text(json.dumps(less))
    told = "that file lacks num_key_value_heads, tie_word_embeddings: are the defaults right"
    with pytest.raises(ValueError, match=told):
        import_model(tmp_path / "hf", tmp_path / "in")


def test_buffers_a_tied_head_and_names_without_their_base_are_known(tmp_path):
    model = write_hugging_face(GPT2, tmp_path / "hf")

    path = tmp_path / "hf/model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, path)
    loaded = open_source(tmp_path / "hf").load(torch.float32, torch.device("cpu"))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_stored_head_that_is_not_the_tied_embedding_is_refused(tmp_path, capsys):
    write_data(tmp_path / "data")
    write_hugging_face(LLAMA, tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    for verb in (
        ["import", str(tmp_path / "hf"), "--output", str(tmp_path / "in")],
        ["export", str(tmp_path / "hf"), "--to", "hf", str(tmp_path / "out")],
        ["evaluate", str(tmp_path / "hf"), "--data", str(tmp_path / "data/valid")],
    ):
        assert main(verb) == 2
        told = "lm_head.weight is not model.embed_tokens.weight: write tie_word_embeddings = false into config.json"
        assert told in capsys.readouterr().err


def test_what_nobody_reads_and_names_with_a_wrapper_s_prefix_are_told(tmp_path, caplog):
    model = write_hugging_face(LLAMA, tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    tensors = {f"module.{name}".replace("layers.1.", "layers.1._orig_mod."): x for name, x in load_file(path).items()}
    tensors["module.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    save_file(tensors, path)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"no_such": False}))
    save_file(tensors, tmp_path / "hf/adapter_model.safetensors")
    loaded = open_source(tmp_path / "hf").load(torch.float32, torch.device("cpu"))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), loaded.parameters(), strict=True))
    wrapped, files, buffers, keys = caplog.messages
    assert files.endswith("files are not read (1): adapter_model.safetensors")
    assert f"names of tensors are read without the prefixes of wrappers ({len(tensors)}): module." in wrapped
    assert "buffers are not read, as they follow from config.json (1): model.layers.0.self_attn.rotary_emb" in buffers
    assert keys.endswith("keys of config.json are not read (1): no_such")
    save_file(tensors | {"model.norm.weight": torch.ones(12)}, path)
    with pytest.raises(ValueError, match="has a second tensor in place of (module.)?model.norm.weight"):
        open_source(tmp_path / "hf")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named(file, tmp_path):
    write_hugging_face(LLAMA, tmp_path / "hf")
    (tmp_path / "hf" / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    told = f"{file} is a Git LFS pointer, not the file: run git lfs pull"
    with pytest.raises(ValueError, match=told):
        import_model(tmp_path / "hf", tmp_path / "in")
    with pytest.raises(ValueError, match=told):
        TransformersModel(TransformersConfig(folder=str(tmp_path / "hf"), seq_len=SEQ_LEN))


def test_a_header_and_a_json_of_any_size_are_read(tmp_path):
    write_hugging_face(LLAMA, tmp_path / "hf")
    path, long = tmp_path / "hf/model.safetensors", "x" * (5 << 20)
    save_file(load_file(path), path, {"format": "pt", "told": long})
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"_told": long}))
    import_model(tmp_path / "hf", tmp_path / "in")


def test_only_safetensors_that_are_all_there_are_read(tmp_path):
    folder = tmp_path / "hf"
    write_hugging_face(LLAMA, folder, shard_size=3000)

    def refused(told, given=folder):
        with pytest.raises(ValueError, match=told):
            import_model(given, tmp_path / "in")

    index = folder / "model.safetensors.index.json"
    moved = [index.read_text().replace("model-00002-of-", name) for name in ("../model-00002-of-", "model-00099-of-")]
    for bad in (*moved, "{}", "[]", "no JSON"):
        index.write_text(bad)
        refused(r"index\.json")
    index.unlink()
    refused(r"has neither model.safetensors nor")
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    refused(r"pytorch_model.bin, a pickle, which runs code .* save them as safetensors")
    refused(r"config.json is missing; give a Hugging Face folder", tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0no header")
    refused(r"hf/model.safetensors: ")


def test_an_import_that_fails_leaves_nothing_and_one_that_is_there_stays(tmp_path):
    write_hugging_face(LLAMA, tmp_path / "hf")
    full = OSError(28, "No space left on device")
    with mock.patch.object(Files, "create", side_effect=full), pytest.raises(OSError, match="No space left"):
        import_model(tmp_path / "hf", tmp_path / "in")
    assert listing(tmp_path) == ["hf"]
    import_model(tmp_path / "hf", tmp_path / "in")
    for folder in ("hf", "nowhere"):  # the name that is taken is told first
        with pytest.raises(ValueError, match=r"--output .*in is there already"):
            import_model(tmp_path / folder, tmp_path / "in")


def _state_at_the_start(config):
    """Return FP32 weights, largest optimizer state and updates at the moment when a job begins to train."""
    seen, publish = [], ShardedEngine.publish_masters

    def look(engine):
        publish(engine)
        states = [state for owned in engine.owned_ranges() for state in [*owned.tensors.values()][1:]]
        weights = {name: value.clone() for name, value in engine.full_weights().items()}
        seen.append((weights, max(float(state.abs().max()) for state in states), int(engine.applied_updates)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedEngine, "publish_masters", look)
        run_on_ranks(config)
    return seen[0]


def test_every_rank_begins_from_the_imported_masters_with_nothing_else(tmp_path, run_ranks, monkeypatch):
    write_data(tmp_path / "data")
    model = write_hugging_face(GPT2, tmp_path / "hf")
    monkeypatch.setattr(convert, "FILE_SIZE", 3000)
    import_model(tmp_path / "hf", tmp_path / "in")
    config = job_from(tmp_path / "in", tmp_path / "data", tmp_path / "run", **{"precision.dtype": "fp16"})
    for weights, largest_state, updates in run_ranks(_state_at_the_start, 2, config):
        assert (largest_state, updates) == (0.0, 0)
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    first, *_ = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(first)["step"] == 1


def test_an_imported_mixture_is_trained_with_balance_and_goes_on_with_another(tmp_path, capsys):
    write_data(tmp_path / "data")
    random_model("qwen3_moe", next(shapes("qwen3_moe", 1))).save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "in")

    def run(steps, **experts):
        changes = {f"model.experts.{key}": value for key, value in experts.items()}
        changes |= {"model.seq_len": SEQ_LEN, "training.steps": steps}
        run_on_ranks(job_from(tmp_path / "in", tmp_path / "data", tmp_path / "run", **changes))

    run(2, balance_loss=0.01, z_loss=1e-3, bias_rate=1e-3)
    kept = r"bias_rate = 1e-30 keeps the biases as they are\)"
    for changed, told in (({"top_k": 2, "bias_rate": 1e-3}, "top_k = "), ({"bias_rate": 0.0}, f"bias_rate = .*{kept}")):
        with pytest.raises(ConfigError, match=rf"model.experts: the checkpoint has \{{ .*{told}"):
            run(3, **changed)
    capsys.readouterr()
    run(3, bias_rate=1e-4)
    assert "changed since: model.experts: { balance_loss = 0.01, bias_rate = 0.001, z_loss = 0.001 } -> {" in " ".join(
        capsys.readouterr().out.split()
    )
    before = load_file(tmp_path / "run/weights.safetensors")
    run(4, bias_rate=1e-30)
    after = load_file(tmp_path / "run/weights.safetensors")
    still = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert still == {name for name in before if name.endswith("balance.value")} != set()


def test_another_model_than_the_imported_one_is_refused(tmp_path, capsys):
    write_data(tmp_path / "data")
    write_hugging_face(GPT2, tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "in")
    for key, value, told in (
        ("model.num_layers", 1, "model.num_layers: the checkpoint has 2, the configuration 1"),
        ("model.seq_len", 16, r"position_embedding.weight has shape \(32, 12\), the model's has \(16, 12\)"),
    ):
        with pytest.raises(ConfigError, match=told):
            run_on_ranks(job_from(tmp_path / "in", tmp_path / "data", tmp_path / "run", **{key: value}))
    capsys.readouterr()
    run_on_ranks(job_from(tmp_path / "in", tmp_path / "data", tmp_path / "dropped", **{"model.dropout": 0.1}))
    said = capsys.readouterr().out
    assert f"begins with the weights of {tmp_path / 'in'}" in said
    assert [line for line in said.splitlines() if line.startswith("changed since")] == [
        "changed since: model.dropout: 0.0 -> 0.1"
    ]
    assert load_config(tmp_path / "dropped/config.toml").training.steps == 3
