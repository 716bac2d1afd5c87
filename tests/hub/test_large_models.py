"""The folder of a model with tens of thousands of tensors opens, such as DeepSeek-V3's: its headers and its index take
several MiB.
"""

import json

from megamix.checkpoint.boxes import Box
from megamix.checkpoint.tensor_file import safetensors_header
from megamix.config import ExpertsConfig, ModelConfig
from megamix.hub.hugging_face import HuggingFaceWeights
from megamix.hub.links import format_of, links_of, their_shapes
from tests.hub.folders import write_hugging_face

LAYERS, EXPERTS, SHARDS = 61, 256, 4


def _model(num_layers, num_experts):
    experts = ExpertsConfig(num_experts=num_experts, top_k=2, ffn_hidden_size=2, bias_rate=0.0)
    return ModelConfig(
        vocab_size=8, seq_len=8, hidden_size=2, num_layers=num_layers, num_heads=1, head_dim=2, qk_norm=True,
        tie_embeddings=False, ffn_hidden_size=2, experts=experts,
    )  # fmt: skip


def _write(folder):
    """Write all tensors in shards, as zeros that take no disk, with their index."""
    write_hugging_face(_model(1, 2), folder)  # for config.json
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS, "num_experts": EXPERTS}))
    model = _model(LAYERS, EXPERTS)
    tensors = [*their_shapes(links_of(format_of(model), model)).items()]
    weight_map = {}
    for number in range(SHARDS):
        name, part = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors", dict(tensors[number::SHARDS])
        header = safetensors_header({tensor: ("F32", shape) for tensor, shape in part.items()})
        (folder / name).write_bytes(header)
        with (folder / name).open("r+b") as file:
            file.truncate(len(header) + 4 * sum(shape[0] * (shape[1:] or (1,))[0] for shape in part.values()))
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}, indent=2))


def test_a_model_of_many_experts_opens(tmp_path):
    """A user who imports such a model, whose sizes are those of the field's largest."""
    _write(tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors.index.json").stat().st_size > 4 << 20
    weights = HuggingFaceWeights(tmp_path / "hf")
    assert weights.config.num_layers == LAYERS
    assert weights.read("blocks.60.feed_forward.up.weight", Box((255, 0, 0), (1, 2, 2))).shape == (1, 2, 2)
