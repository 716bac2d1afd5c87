"""Whoever configures FP8: settings of products in FP8 that do not go together are refused, with a fix that works."""

from unittest import mock

import pytest
import torch

from megamix.comm.topology import Topology
from megamix.config import ConfigError, ParallelismConfig, config_from_dict
from megamix.parallel.build import build_model
from megamix.run.run_folder import job_problems

MODEL = {"vocab_size": 64, "seq_len": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "ffn_hidden_size": 96}
GOOD = {
    "model": MODEL,
    "data": {"train": "none"},
    "optimizer": {"lr": 1e-3},
    "training": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 4},
    "checkpoint": {"folder": "none"},
}


def config_of(fp8, **sections):
    changed = {name: GOOD.get(name, {}) | keys for name, keys in sections.items()}
    return config_from_dict(GOOD | changed | {"precision": changed.get("precision", {}) | {"fp8": fp8}})


WRONG = [
    (
        {"recipe": "rowwise"},
        {"precision": {"dtype": "fp16"}},
        'got "rowwise", whose products a GPU gives in BF16 alone',
    ),
    ({"recipe": "tensorwise"}, {"precision": {"dtype": "fp32"}}, "products of FP32 stay FP32"),
    ({"recipe": "rowwise", "weight_grad": "fp8"}, {"model": {"seq_len": 9}}, "sums over the 18 tokens of a rank's"),
    (
        {"recipe": "rowwise", "weight_grad": "fp8"},
        {"parallelism": {"cp_size": 4}},
        "sums over the 8 tokens of a rank's",
    ),
    ({"recipe": "blockwise"}, {}, "must be 'none', 'rowwise' or 'tensorwise'"),
]


@pytest.mark.parametrize(("fp8", "sections", "message"), WRONG)
def test_what_does_not_go_together_is_refused(fp8, sections, message):
    with pytest.raises(ConfigError) as told:
        config_of(fp8, **sections)
    assert len(told.value.problems) == 1
    assert message in told.value.problems[0]


def test_modules_of_others_have_no_products_in_fp8(tmp_path):
    with pytest.raises(ConfigError) as told:
        config_of({"recipe": "rowwise"}, model={"family": "transformers", "folder": str(tmp_path)})
    assert any('family = "transformers" computes by modules of its own' in line for line in told.value.problems)


def test_a_check_names_a_layer_that_no_gpu_takes():
    fine = config_of({"recipe": "rowwise"})
    assert not any("fp8" in line for line in job_problems(fine, 1))
    narrow = config_of({"recipe": "rowwise"}, model={"ffn_hidden_size": 40})
    divided = config_of({"recipe": "rowwise"}, parallelism={"tp_size": 2}, model={"num_kv_heads": 2, "hidden_size": 48})
    for config, ranks, name in ((narrow, 1, "feed_forward.gate is [40, 32]"), (divided, 2, "query is [24, 48]")):
        (problem,) = [line for line in job_problems(config, ranks) if "fp8" in line]
        assert f"blocks.0.{name} on a rank".replace("blocks.0.query", "blocks.0.attention.query") in problem


def test_a_gpu_without_products_in_fp8_is_refused():
    config = config_of({"recipe": "tensorwise"})
    with (
        mock.patch("torch.cuda.get_device_capability", lambda device: (8, 0)),
        mock.patch("torch.cuda.get_device_name", lambda device: "NVIDIA A100"),
        pytest.raises(ConfigError, match=r"NVIDIA A100 is SM 8.0, but products in FP8 need SM 8.9"),
    ):
        build_model(config.model, ParallelismConfig(), Topology(), torch.device("cuda"), fp8=config.precision.fp8)
