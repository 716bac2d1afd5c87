"""Whoever configures FP8: a model or a GPU that has no products in FP8 is refused, with the layer or the GPU."""

from unittest import mock

import pytest
import torch

from megamix.comm.topology import Topology
from megamix.config import ConfigError, ParallelismConfig, config_from_dict
from megamix.parallel.build import build_model
from megamix.train.check import job_problems

GOOD = {
    "model": {
        "vocab_size": 64, "seq_len": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "ffn_hidden_size": 96,
    },
    "data": {"train": "none"},
    "optimizer": {"lr": 1e-3},
    "training": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 4},
    "checkpoint": {"folder": "none"},
}  # fmt: skip


def config_of(recipe, **sections):
    changed = {name: GOOD.get(name, {}) | keys for name, keys in sections.items()}
    return config_from_dict(GOOD | changed | {"precision": {"fp8": {"recipe": recipe}}})


def test_modules_of_others_have_no_products_in_fp8(tmp_path):
    with pytest.raises(ConfigError, match='family = "transformers" computes by modules of its own'):
        config_of("rowwise", model={"family": "transformers", "folder": str(tmp_path)})


def test_a_check_names_a_layer_that_no_gpu_takes():
    fine = config_of("rowwise")
    assert not any("fp8" in line for line in job_problems(fine, 1))
    narrow = config_of("rowwise", model={"ffn_hidden_size": 40})
    divided = config_of("rowwise", parallelism={"tensor": {"size": 2}}, model={"num_kv_heads": 2, "hidden_size": 48})
    for config, ranks, name in ((narrow, 1, "feed_forward.gate is [40, 32]"), (divided, 2, "query is [24, 48]")):
        (problem,) = [line for line in job_problems(config, ranks) if "fp8" in line]
        assert f"blocks.0.{name} on a rank".replace("blocks.0.query", "blocks.0.attention.query") in problem


def test_a_gpu_without_products_in_fp8_is_refused():
    config = config_of("tensorwise")
    with (
        mock.patch("torch.cuda.get_device_capability", lambda device: (8, 0)),
        mock.patch("torch.cuda.get_device_name", lambda device: "NVIDIA A100"),
        pytest.raises(ConfigError, match=r"NVIDIA A100 is SM 8.0, but products in FP8 need SM 8.9"),
    ):
        build_model(config.model, ParallelismConfig(), Topology(), torch.device("cuda"), fp8=config.precision.fp8)
