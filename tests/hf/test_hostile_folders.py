"""Whoever downloads a model of other people, or edits its config.json: a Hugging Face folder whose config.json and
tensors do not go together is refused with one line; a weight that is not finite is reported by tensor and place. A
checkpoint of another version, or of a program's own, is refused by what is wrong in its manifest.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamix.cli.verbs import main
from megamix.hf.convert import import_model
from megamix.hf.folder import HuggingFaceWeights
from megamix.model.config_json import GPT2_SIZES, ROTARY_SIZES
from megamix.model.family import family_of
from tests.builders import write_data
from tests.checkpoint.faults import listing
from tests.checkpoint.seal import edit
from tests.hf.folders import GPT2, LLAMA, write_hugging_face

QWEN3 = LLAMA.model_copy(update={"qk_norm": "head"})
MODELS = {"gpt2": (GPT2, GPT2_SIZES), "llama": (LLAMA, ROTARY_SIZES), "qwen3": (QWEN3, ROTARY_SIZES)}
NOT_SIZES = True, "12", 1.5, 0


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


def _rewritten(folder):
    """Return the folder's weights, whose file is to be written anew."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return weights


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


def test_unknown_tensors_beyond_counting_are_told_in_one_line(folders, tmp_path):
    tensors = _rewritten(_with(folders["llama"], tmp_path / "hf"))
    save_file(tensors | {f"x{number}": torch.zeros(1) for number in range(1000)}, tmp_path / "hf/model.safetensors")
    told = _refused(tmp_path / "hf")
    assert told.startswith("the tensors are not those of its config.json: unknown x")
    assert told.endswith(" [1]; and 992 more")


@pytest.mark.parametrize("config", [GPT2, QWEN3.model_copy(update={"num_layers": 11})])
def test_the_shapes_of_many_layers_are_those_of_the_model(config):
    built = {name: tuple(param.shape) for name, param in family_of(config).on_meta(config).named_parameters()}
    assert list(family_of(config).shapes(config).items()) == list(built.items())


def test_weights_that_are_not_finite_are_told_by_tensor_and_refused_unless_asked_for(
    folders, tmp_path, capsys, caplog, monkeypatch
):
    write_data(tmp_path / "data", tokenizer=True)
    folder = _with(folders["llama"], tmp_path / "hf", eos_token_id=3)
    weights = _rewritten(folder)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    weights["model.layers.1.mlp.up_proj.weight"][9, 2:4] = float("inf")
    weights["model.norm.weight"][7] = float("-inf")
    save_file(weights, folder / "model.safetensors")
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
    tensors = _rewritten(folder)
    tensors["transformer.h.0.attn.c_attn.weight"][4, 24 + 7] = float("inf")  # in the last third, attention's values
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r": 1, the first inf at transformer.h.0.attn.c_attn.weight \[4, 31\]"):
        import_model(folder, tmp_path / "in")


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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda fields: fields["params"][0].update(name="x"), "x"),
        (lambda fields: fields["run"].update(config=""), "vocab_size"),
        (
            lambda fields: fields.update(applied_updates=1) or fields["run"].update(config=""),
            "a checkpoint of the library, without [model]",
        ),
    ],
    ids=["another model", "no model", "a library's"],
)
def test_a_wrong_manifest_is_told_by_name(folders, tmp_path, capsys, change, told):
    checkpoint = Path(import_model(folders["llama"], tmp_path / "in"))
    edit(checkpoint, change)
    folder = str(tmp_path / "in")
    for verb in (
        ["generate", folder],
        ["evaluate", folder, "--data", "nowhere"],
        ["export", folder, "--to", "hf", str(tmp_path / "out")],
    ):
        assert main(verb) in (1, 2)
        printed = capsys.readouterr().err
        assert told in printed
        assert str(checkpoint) in printed
        assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()
