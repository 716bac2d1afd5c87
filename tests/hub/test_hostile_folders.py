"""Whoever downloads a model of other people, or edits its config.json: a Hugging Face folder whose config.json, tensors
and index do not go together is refused with one line, and no name in it leads out of it; a weight that is not finite is
reported by tensor and place.
"""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamix.cli import main
from megamix.hub.convert import import_model
from megamix.hub.hugging_face import HuggingFaceWeights
from megamix.model.config_json import GPT2_SIZES, ROTARY_SIZES
from megamix.model.family import family_of
from tests.builders import write_data
from tests.checkpoint.faults import listing
from tests.hub.folders import GPT2, LLAMA, write_hugging_face

QWEN3 = LLAMA.model_copy(update={"qk_norm": True})
MODELS = {"gpt2": (GPT2, GPT2_SIZES), "llama": (LLAMA, ROTARY_SIZES), "qwen3": (QWEN3, ROTARY_SIZES)}
INDEX = "model.safetensors.index.json"
NOT_SIZES = (True, "12", 1.5, -1, 0, [12], {"a": 1})


def _refused(folder):
    """Return the one line about a folder that can neither be imported nor opened."""
    with pytest.raises(ValueError, match=str(folder)) as error:
        HuggingFaceWeights(folder)
    told = str(error.value)
    assert len(told) < len(str(folder)) + 1500
    return told.removeprefix(f"{folder}: ").replace(str(folder), "")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp("models") / name for name in MODELS}
    for name, folder in made.items():
        write_hugging_face(MODELS[name][0], folder)
    return made


def _with(folder, target, **keys):
    """Put the folder's weights beside a config.json with other values."""
    target.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | keys
    (target / "config.json").write_text(json.dumps(config))
    if not (target / "model.safetensors").exists():
        (target / "model.safetensors").hardlink_to(folder / "model.safetensors")
    return target


@pytest.mark.parametrize("name", MODELS)
def test_a_size_that_the_tensors_do_not_have_is_refused(name, folders, tmp_path):
    """A user whose config.json belongs to another model's weights, or was edited by hand."""
    keys = MODELS[name][1]
    sizes = json.loads((folders[name] / "config.json").read_text())
    for ours, theirs in keys.items():
        if theirs != "max_position_embeddings":  # no tensor has as many
            _refused(_with(folders[name], tmp_path / "hf", **{theirs: 5 * sizes[theirs]}))
        for value in NOT_SIZES:
            told = _refused(_with(folders[name], tmp_path / "hf", **{theirs: value}))
            assert theirs in told or ours in told, told


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"num_hidden_layers": 3}, "missing model.layers.2.self_attn.q_proj.weight [12, 12]"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "model.layers.0.self_attn.q_proj.weight has shape [12, 12], config.json makes it [18, 12]",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "rope_scaling: factor: got inf"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "rope_scaling: factor: got '8'"),
        ({"attention_bias": [0] * 1000}, "attention_bias is [0, 0"),
        ({"mlp_bias": 1}, "mlp_bias is 1, megamix has False or True"),
        ({"attention_bias": 1}, "attention_bias is 1, megamix has False or True"),
        ({"rope_theta": 0}, "rope_theta: got 0"),
        ({"model_type": ["llama"]}, "model_type is ['llama']; known are"),
        ({"model_type": "qwen2", "layer_types": 7}, "layer_types is 7, and must be a list"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 5}, "mlp_only_layers is 5, megamix has layers without experts"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": True}, "mlp_only_layers is True, megamix has layers"),
        ({"model_type": "mixtral", "num_local_experts": None}, "experts.num_experts: got None"),
        ({"model_type": "mixtral", "layer_types": ["full_attention"] * 2}, "does not read; leave it out"),
        ({"hidden_act": "x" * 10**6}, "... (1000002 characters), megamix has 'silu' or 'swish'"),
    ],
)
def test_what_config_json_says_is_told_beside_what_the_tensors_say(keys, told, folders, tmp_path):
    assert told in _refused(_with(folders["llama"], tmp_path / "hf", **keys))


def test_import_generate_and_evaluate_refuse_alike(folders, tmp_path, capsys):
    write_data(tmp_path / "data", tokenizer=True)
    folder = _with(folders["llama"], tmp_path / "hf", num_hidden_layers=3)
    (folder / "tokenizer.json").write_bytes((tmp_path / "data/tokenizer.json").read_bytes())
    for verb in (
        ["import", str(folder), "--output", str(tmp_path / "in")],
        ["generate", str(folder)],
        ["evaluate", str(folder), "--data", str(tmp_path / "data/train")],
    ):
        assert main(verb) == 2
        assert "missing model.layers.2." in capsys.readouterr().err
    assert not (tmp_path / "in").exists()


def _text(text):
    return lambda folder: (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def _header(entries, length=None, body=bytes(64)):
    text = json.dumps(entries).encode()

    def make(folder):
        (folder / "model.safetensors").unlink()
        content = struct.pack("<Q", len(text) if length is None else length) + text + body
        (folder / "model.safetensors").write_bytes(content)

    return make


def _index(names):
    def make(folder):
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    return make


F32 = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
HOSTILE = {
    "a list": (_text("[1]"), "config.json holds no table"),
    "no UTF-8": (_text(b'{"model_type": "\xff"}'), "config.json is no JSON"),
    "a header of 2^63 bytes": (_header({}, 2**63), "Error while deserializing header"),
    "a header longer than the file": (_header({"a": F32}, 10**5), "Error while deserializing header"),
    "tensors that are not there": (_header({"a": F32 | {"shape": [4, 5], "data_offsets": [0, 80]}}), "Error while"),
    "tensors that overlap": (_header({"a": F32, "b": F32}), "Error while deserializing header"),
    "a shape beyond 2^64": (_header({"a": F32 | {"shape": [2**33, 2**33]}}), "Error while deserializing header"),
    "a shape that its bytes are not": (_header({"a": F32 | {"shape": [2, 2]}}), "Error while deserializing header"),
    "an index that leads out": (_index({"a": "../../etc/passwd"}), "names ../../etc/passwd, which is no file"),
    "an absolute name": (_index({"a": "/etc/passwd"}), "names /etc/passwd, which is no file of the folder"),
    "the folder itself": (_index({"a": "."}), "names ., which is no file"),
    "numbers as names": (_index({"a": 1}), "has no weight_map of names"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_made_to_do_harm_is_refused_in_one_line(what, folders, tmp_path):
    make, told = HOSTILE[what]
    make(_with(folders["llama"], tmp_path / "hf"))
    assert told in _refused(tmp_path / "hf")


def test_unknown_tensors_beyond_counting_are_told_in_one_line(folders, tmp_path):
    _with(folders["llama"], tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/model.safetensors").unlink()
    tensors |= {f"x{number}": torch.zeros(1) for number in range(1000)}
    save_file(tensors, tmp_path / "hf/model.safetensors")
    told = _refused(tmp_path / "hf")
    assert told.startswith("the tensors are not those of its config.json: unknown x")
    assert told.endswith(" [1]; and 992 more")


@pytest.mark.parametrize("config", [GPT2, LLAMA, QWEN3, LLAMA.model_copy(update={"num_layers": 11})])
def test_the_shapes_of_many_layers_are_those_of_the_model(config):
    built = {name: tuple(param.shape) for name, param in family_of(config).on_meta(config).named_parameters()}
    assert list(family_of(config).shapes(config).items()) == list(built.items())


def _spoil(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    tensors["model.layers.1.mlp.up_proj.weight"][9, 2:4] = float("inf")
    tensors["model.norm.weight"][7] = float("-inf")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")


def test_weights_that_are_not_finite_are_told_by_tensor_and_refused_unless_asked_for(
    folders, tmp_path, capsys, caplog, monkeypatch
):
    write_data(tmp_path / "data", tokenizer=True)
    folder = _with(folders["llama"], tmp_path / "hf", eos_token_id=3)
    _spoil(folder)
    (folder / "tokenizer.json").write_bytes((tmp_path / "data/tokenizer.json").read_bytes())
    monkeypatch.setattr("megamix.checkpoint.boxes._LARGEST_SUB_BOX", 50)  # a tensor comes in several pieces
    told = (
        "weights that are not finite: 3, the first nan at model.layers.1.mlp.up_proj.weight [3, 5]; "
        "1, the first -inf at model.norm.weight [7]"
    )
    out = tmp_path / "in"
    verbs = (
        ["import", str(folder), "--output", str(out)],
        ["evaluate", str(folder), "--data", str(tmp_path / "data/train")],
        ["generate", str(folder), "--prompt", "!", "--temperature", "0"],
    )
    for verb in verbs:
        assert main(verb) == 2
        assert f"{told}; the model is damaged: get it again, or accept it with --allow" in capsys.readouterr().err
    assert "in" not in listing(tmp_path)
    for verb, status in zip(verbs, (0, 0, 2), strict=True):  # no token can be drawn from NaN
        caplog.clear()
        assert main([*verb, "--allow-non-finite"]) == status
        assert caplog.messages == [told]
    said = capsys.readouterr()
    assert "nan nats a token" in said.out
    assert "the model's logits are not finite" in said.err
    assert main(["evaluate", str(out), "--data", str(tmp_path / "data/train")]) == 2  # an imported folder is told, too
    assert "3, the first nan at blocks.1.feed_forward.up.weight [3, 5]" in capsys.readouterr().err


def test_the_place_of_a_weight_is_that_in_their_tensor(folders, tmp_path):
    folder = _with(folders["gpt2"], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.attn.c_attn.weight"][4, 24 + 7] = float("inf")  # in the last third, attention's values
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r": 1, the first inf at transformer.h.0.attn.c_attn.weight \[4, 31\]"):
        import_model(folder, tmp_path / "in")


def test_files_of_the_tokenizer_are_files_of_the_folder(folders, tmp_path):
    (tmp_path / "secret.json").write_text('{"password": 1}')
    _with(folders["llama"], tmp_path / "hf")
    tokenizer = tmp_path / "hf/tokenizer_config.json"
    for make, told in (
        (
            lambda: tokenizer.symlink_to(tmp_path / "secret.json"),
            "is a link to .*secret.json, which is outside the folder",
        ),
        (lambda: os.mkfifo(tokenizer), "tokenizer_config.json is no file"),
        (lambda: tokenizer.symlink_to("/dev/zero"), "tokenizer_config.json is no file"),
        (lambda: tokenizer.mkdir(), "tokenizer_config.json is no file"),
    ):
        make()
        with pytest.raises(ValueError, match=told):
            import_model(tmp_path / "hf", tmp_path / "in")
        tokenizer.rmdir() if tokenizer.is_dir() else tokenizer.unlink()
    assert listing(tmp_path) == ["hf", "secret.json"]


def test_a_cache_of_hugging_face_with_its_links_is_read(folders, tmp_path):
    snapshot, blobs = tmp_path / "cache/snapshots/abc", tmp_path / "cache/blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folders["llama"].iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (blobs / "t").write_text("{}")
    (snapshot / "special_tokens_map.json").symlink_to("../../blobs/t")
    import_model(snapshot, tmp_path / "in")
    assert "special_tokens_map.json" in listing(tmp_path / "in")
