"""A plugin's mixture of experts, in one file: ranks divide its experts, a run goes on, and `verify` judges its
routing.
"""

import importlib
import sys

import pytest
import torch
from safetensors.torch import load_file

from megamix.cli import main
from megamix.config import config_to_toml
from megamix.plugins import FAMILIES
from tests.builders import EXPERTS, run_on_ranks, tiny_job, write_data

PLUGIN = "tests.doors.experts_plugin"


def _job(folder, run, steps=6):
    return tiny_job(
        folder,
        plugins=[PLUGIN],
        family="root",
        experts=EXPERTS,
        steps=steps,
        eval_interval=3,
        decay_style="constant",
        ep_size=2,
        checkpoint={"folder": str(folder / run), "save_interval": 3},
    )


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """The plugin, imported for these tests alone."""
    importlib.import_module(PLUGIN)
    yield
    del FAMILIES.registered["root"], FAMILIES.sections["root"], sys.modules[PLUGIN]


def test_a_run_that_stops_goes_on_bit_for_bit(run_ranks, tmp_path):
    write_data(tmp_path / "data")
    for job in (_job(tmp_path, "whole"), _job(tmp_path, "halves", steps=3), _job(tmp_path, "halves")):
        run_ranks(run_on_ranks, 2, job)
    whole, halves = (load_file(tmp_path / run / "weights.safetensors") for run in ("whole", "halves"))
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    bias = whole["blocks.1.feed_forward.router.balance.value"]
    assert len({*bias.abs().tolist()}) > 4  # steps by the sign alone have the same length


def test_verify_knows_it(tmp_path, capsys):
    (tmp_path / "root.toml").write_text(config_to_toml(_job(tmp_path, "none")))

    args = ["verify", str(tmp_path / "root.toml"), "optimizer.compile=false", "--layouts", "dp2ep2"]
    assert main(args) == 0, capsys.readouterr()
    assert "scores" in capsys.readouterr().out
