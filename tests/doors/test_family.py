"""A plugin's family with two kinds of blocks is trained on dp2, tp2 and pp2, resumed, exported, planned, verified. Of a
plugin's mixture of experts ranks divide the experts, a run goes on, and `verify` judges its routing.
"""

import importlib
import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megamix.cli.verbs import main
from megamix.comm.topology import Topology
from megamix.config import ConfigError, ParallelismConfig
from megamix.model.family import family_of, parameter_count
from megamix.model.layers import Linear, ParamRule
from megamix.parallel.build import build_model
from megamix.parallel.stages import plan_stages
from megamix.plugins import FAMILIES
from megamix.tools.plan.activations import TracedWork, trace_stage
from megamix.train.check import job_problems
from tests.builders import EXPERTS, SEQ_LEN, run_on_ranks, tiny_job, write_data
from tests.tools.plan.test_activations import BATCH, _counted

PLUGIN, MIXTURE = "tests.doors.family_plugin", "tests.doors.experts_plugin"
MODEL = {"family": "toy", "vocab_size": 280, "seq_len": SEQ_LEN, "hidden_size": 16, "num_layers": 5, "init_std": 0.1}


def _job(folder, run, steps=6, **parallelism):
    return tiny_job(
        folder,
        plugins=[PLUGIN],
        model=MODEL,
        tokenizer=str(folder / "data/tokenizer.json"),
        dtype="fp32",
        training={"steps": steps, "eval_interval": 3},
        parallelism=parallelism,
        decay_style="constant",  # of whatever number of steps
        checkpoint={"folder": str(folder / run), "save_interval": 3},
        log_interval=1,
    )


def _weights(folder, run):
    return load_file(folder / run / "weights.safetensors")


@pytest.fixture(scope="module", autouse=True)
def toy():
    """The plugins, imported for these tests alone."""
    toy, _ = importlib.import_module(PLUGIN), importlib.import_module(MIXTURE)
    yield toy
    for family, plugin in (("toy", PLUGIN), ("root", MIXTURE)):
        del FAMILIES.registered[family], FAMILIES.sections[family], sys.modules[plugin]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy):
    """With data, and the run of one process."""
    path = tmp_path_factory.mktemp("toy")
    write_data(path / "data", tokenizer=True)
    run_on_ranks(_job(path, "alone"))
    return path


@pytest.mark.parametrize("layout", [{"dp_size": 2}, {"tensor": {"size": 2}}, {"pipeline": {"size": 2}}])
def test_ranks_end_where_one_process_does(run_ranks, folder, layout):
    name = next(iter(layout))
    losses = run_ranks(run_on_ranks, 2, _job(folder, name, **layout))
    assert losses[0] == losses[1]
    one, other = _weights(folder, "alone"), _weights(folder, name)
    assert one.keys() == other.keys()
    assert all(float((one[key] - other[key]).abs().mean()) < 1e-4 for key in one)


def test_a_run_that_was_stopped_ends_bitwise_equal(folder):
    run_on_ranks(_job(folder, "stopped", steps=3))
    run_on_ranks(_job(folder, "stopped"))
    one, other = _weights(folder, "alone"), _weights(folder, "stopped")
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_it_goes_out_and_comes_back(folder, capsys):
    assert main(["export", str(folder / "alone"), "--to", "hf", str(folder / "hf"), "--plugins", PLUGIN]) == 0
    config, tensors = json.loads((folder / "hf/config.json").read_text()), load_file(folder / "hf/model.safetensors")
    assert (config["model_type"], config["intermediate_size"], config["mixing_heads"]) == ("toy", 24, 2)
    weights = _weights(folder, "alone")
    assert torch.equal(tensors["model.layers.1.mix.o_proj.weight"], weights["blocks.1.mixing.out.weight"].T)
    assert torch.equal(tensors["model.layers.2.mlp.gain"], weights["blocks.2.gated.gain"])
    assert main(["import", str(folder / "hf"), "--output", str(folder / "in"), "--plugins", PLUGIN]) == 0
    capsys.readouterr()
    for model in ("alone", "in", "hf"):
        sample = ["--prompt", "def ", "--max-new-tokens", "9", "--temperature", "0", "--plugins", PLUGIN]
        assert main(["generate", str(folder / model), *sample]) == 0
    texts = capsys.readouterr().out.splitlines()
    assert len({*texts}) * 3 == len(texts)


def test_sizes_that_ranks_cannot_divide_are_found_before_a_job(folder):
    problems = job_problems(_job(folder, "divided", tensor={"size": 5}), 5)
    assert any(line.startswith("parallelism.tensor.size: got 5, must divide 24, of ") for line in problems), problems
    assert not any("tensor" in line for line in job_problems(_job(folder, "divided", tensor={"size": 2}), 2))
    with pytest.raises(ConfigError, match="context.size: got 3, needs a model.seq_len that is a multiple of 6, not 32"):
        _job(folder, "uneven", context={"size": 3})
    (problem,) = job_problems(_job(folder, "divided", context={"size": 2}), 2)
    assert problem.startswith("parallelism.context.size: got 2, but the family 'toy' does not attend by ops.attention ")


@pytest.mark.parametrize("not_divided", [("gate", "up", "down"), ("down",)])
def test_a_branch_that_ranks_would_compute_wrong_is_refused_by_name(folder, toy, monkeypatch, not_divided):
    right = toy.Gated.__init__

    def wrong(self, *given):
        right(self, *given)
        for name in not_divided:
            layer = getattr(self, name)
            layer.divides, layer.rules = None, {key: ParamRule("ones") for key in layer.rules}
        self.rules = {"gain": ParamRule("ones")}

    monkeypatch.setattr(toy.Gated, "__init__", wrong)
    problems = job_problems(_job(folder, "divided", tensor={"size": 2}), 2)
    told = "parallelism.tensor.size: got 2, but blocks.0.gated (Gated) is a Branch without a row-divided layer"
    assert any(line.startswith(told) for line in problems), problems
    assert not any("Branch" in line for line in job_problems(_job(folder, "divided"), 2))


def test_a_divided_layer_outside_of_a_branch_is_refused_by_name(folder, toy, monkeypatch):
    class Gated(nn.Module):
        def __init__(self, config, ops):
            super().__init__()
            self.gate = Linear(config.hidden_size, config.gate_size, True, ops, std=0.1, divides="columns")

    monkeypatch.setattr(toy, "Gated", Gated)
    problems = job_problems(_job(folder, "divided", tensor={"size": 2}), 2)
    told = 'parallelism.tensor.size: got 2, but blocks.0.gated.gate has divides="columns" and is in no Branch'
    assert any(line.startswith(told) for line in problems), problems


class _Counting(nn.BatchNorm1d):
    def _apply(self, fn, recurse=True):
        return super()._apply(fn, recurse)


def test_a_buffer_that_would_be_saved_is_refused_by_name(toy, monkeypatch):
    monkeypatch.setattr(toy.Toy, "last_norm", lambda self: _Counting(3, affine=False))
    with pytest.raises(ValueError, match="has persistent buffers .*running_mean, .* with persistent=False"):
        build_model(toy.ToyConfig(**MODEL), ParallelismConfig(), Topology(), torch.device("cpu"))


def test_its_blocks_cost_what_they_are_and_stages_are_cut_by_it(toy):
    model = toy.ToyConfig(**MODEL)
    gated, mixing = 16 + 3 * 16 * 24 + 24 + 2 * 24 + 16, 16 + 4 * 16 * 16
    costs = toy.Toy.costs(model)
    assert [block.params for block in costs.blocks] == [gated, mixing, gated, mixing, gated]
    assert [block.flops for block in costs.blocks[:2]] == [6 * 3 * 16 * 24, 6 * 4 * 16 * 16 + 12 * 16 * SEQ_LEN]
    assert family_of(model) is toy.Toy
    assert parameter_count(model) == sum(param.numel() for param in toy.Toy(model).parameters())
    plans = plan_stages(model.model_copy(update={"vocab_size": 1}), 2, 1)
    assert [len(plan.layers) for plan in plans] == [3, 2]


def test_its_activations_are_counted_to_the_byte(toy):
    config = toy.ToyConfig(**{**MODEL, "seq_len": BATCH[1], "num_layers": 6, "gate_size": 80, "recompute": "full"})
    traced = trace_stage(TracedWork(model=config, batch=BATCH, dtype=torch.float16, machine="cpu"), range(6))
    assert (traced.kept, traced.forward, traced.backward) == _counted(toy.Toy(config).half())


def test_plan_and_verify_know_it(folder, capsys):
    path = folder / "toy.toml"
    path.write_text(_job(folder, "none").text)
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == parameter_count(_job(folder, "none").model)

    assert main(["verify", str(path), "optimizer.compile=false", "--layouts", "dp2,tp2sp"]) == 0, capsys.readouterr()


def _mixture(folder, run, steps=6):
    return tiny_job(
        folder,
        plugins=[MIXTURE],
        family="root",
        experts=EXPERTS,
        training={"steps": steps, "eval_interval": 3},
        decay_style="constant",
        expert={"size": 2},
        checkpoint={"folder": str(folder / run), "save_interval": 3},
    )


def test_a_run_of_a_mixture_that_stops_goes_on_bit_for_bit(run_ranks, folder):
    for job in (_mixture(folder, "whole"), _mixture(folder, "halves", steps=3), _mixture(folder, "halves")):
        run_ranks(run_on_ranks, 2, job)
    whole, halves = _weights(folder, "whole"), _weights(folder, "halves")
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    bias = whole["blocks.1.feed_forward.router.balance.value"]
    assert len({*bias.abs().tolist()}) > 4  # steps by the sign alone have the same length


def test_verify_knows_a_mixture(tmp_path, capsys):
    path = tmp_path / "root.toml"
    path.write_text(_mixture(tmp_path, "none").text)
    assert main(["verify", str(path), "optimizer.compile=false", "--layouts", "dp2ep2"]) == 0, capsys.readouterr()
    assert "scores" in capsys.readouterr().out
