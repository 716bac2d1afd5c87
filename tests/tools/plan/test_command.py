"""`megamix plan` agrees with a count by hand for an 8 B model; for a job that does not fit it names changes that make
it fit; it plans 16,384 ranks on one machine.
"""

import itertools
import json
import re
from pathlib import Path

import pytest

from megamix.arguments import Failed
from megamix.builders.objects import build_optimizer
from megamix.config import ConfigError, FirstLayers, load_config
from megamix.run.least_memory import amount
from megamix.tools.plan.advice import Advice, advise
from megamix.tools.plan.command import plan_lines
from megamix.tools.plan.limits import bytes_of
from megamix.tools.plan.memory_plan import _plan_part, plan_memory

CONFIGS = Path(__file__).parents[3] / "configs"
PARAMETERS_8B = 8_030_261_248


def test_an_8b_model_on_64_gpus_by_hand():
    config = load_config(CONFIGS / "llama3.1-8b.toml")
    (text,) = plan_lines(config, 64, bytes_of("80GB"), "gpu", True)
    plan = json.loads(text)
    held = plan["held"]
    assert plan["parameters"] == PARAMETERS_8B
    # Every parameter's size is a multiple of 64, so there is padding only at the ends of 66 buckets: < 64 x 64 each.
    assert held["half parameters"] == held["half gradients"] == pytest.approx(2 * PARAMETERS_8B, abs=2 * 66 * 64 * 64)
    assert held["FP32 masters"] == held["half parameters"] * 2 // 64
    assert held["optimizer states"] == 2 * held["FP32 masters"]
    assert plan["in_step"]["half gradients, and their sums"] == 0  # NCCL reduces in place
    # recompute = "full": the input of each of 32 blocks, 8,192 tokens of 4,096 halves.
    assert plan["in_step"]["activations of the blocks"] == 32 * 8192 * 4096 * 2
    # The loss keeps FP32 gradients of the head's weight and of its input, and the last norm its input and a root a row.
    loss = 4 * (128_256 * 4096 + 8192 * 4096)
    assert plan["in_step"]["of embedding, norm, head and loss"] == pytest.approx(loss + 2 * 8192 * 4096, rel=1e-3)
    assert plan["fits"]


def test_an_8b_model_by_share_of_parameters_works_in_three_gib():
    config = load_config(
        CONFIGS / "llama3.1-8b.toml", ["training.global_batch_size=64", "parallelism.shard=parameters"]
    )
    plan = json.loads(next(plan_lines(config, 64, bytes_of("40GiB"), "gpu", True)))
    held, in_step = plan["held"], plan["in_step"]
    # 12/64 bytes a parameter; padding at the ends of 99 buckets.
    states = sum(held[name] for name in ("half parameters", "half gradients", "FP32 masters", "optimizer states"))
    assert states == pytest.approx(PARAMETERS_8B * 12 / 64, abs=99 * 64 * 12)
    # The head and the last block are there while the head's gradient is filled. The root is the last norm.
    head, block = 128_256 * 4096, 4096 * (4096 * 2 + 1024 * 2 + 3 * 14_336) + 2 * 4096
    assert in_step["half parameters while units compute"] == pytest.approx(2 * (head + block + 4096), rel=1e-4)
    assert in_step["half gradients, and their sums"] == pytest.approx((2 + 2 / 64) * head, rel=1e-4)
    assert 2 * (2 * head + block) == pytest.approx(2.37 * 2**30, rel=0.01)  # part of the 3 GiB
    assert plan["fits"]
    assert [*plan["shards"]] == ["states", "gradients", "parameters"]
    assert plan["shards"]["states"] > plan["shards"]["gradients"] > plan["shards"]["parameters"] == plan["peak"]


def test_nccl_exchanges_into_two_buffers_and_gloo_into_one():
    config = load_config(CONFIGS / "gpt2-124m.toml", ["model.num_layers=1", "precision.reduce_dtype=half_fp32_sum"])
    gpu, cpu = (
        _plan_part(config, 2, 0, device, ([], build_optimizer(config))).engine.sums() for device in ("gpu", "cpu")
    )
    assert gpu == 2 * cpu > 0


def test_what_does_not_fit_is_said_with_changes_each_on_top_of_those_before_until_it_fits():
    config = load_config(CONFIGS / "gpt2-124m.toml", ["model.num_layers=4"])
    lines = [*plan_lines(config, 8, bytes_of("1.5GiB"), "gpu", False)]
    start = next(index for index, line in enumerate(lines) if line.startswith("does NOT fit"))
    assert isinstance(lines[start], Failed)  # sets the exit status to 1
    changes = [line.strip().removeprefix("and ").split(": ") for line in lines[start + 1 :]]
    assert [words for words, _ in changes] == [
        'model.recompute = "selective"', 'model.recompute = "full"', "training.micro_batch_size = 2",
    ]  # fmt: skip
    assert [", fits, " in verdict for _, verdict in changes] == [False, False, True]
    overrides = [words.replace(" ", "").replace('"', "") for words, _ in changes]
    changed = load_config(CONFIGS / "gpt2-124m.toml", ["model.num_layers=4", *overrides])
    assert [*plan_lines(changed, 8, bytes_of("1.5GiB"), "gpu", False)][-1].startswith("fits: ")


def test_the_fewest_layers_that_fit_are_proposed_for_recompute():
    config = load_config(CONFIGS / "gpt2-124m.toml", ["model.num_layers=4", "model.recompute=none"])
    plan = plan_memory(config, 8, "gpu")
    peaks = [
        plan_memory(config.with_keys(model={"recompute": FirstLayers(full=full)}), 8, "gpu").peak for full in (1, 2, 3)
    ]
    assert plan.peak > peaks[0] > peaks[1] > peaks[2]
    assert Advice("model.recompute = { full = 2 }", peaks[1]) in advise(config, plan, peaks[1])


@pytest.mark.uncounted
def test_a_model_whose_shares_do_not_fit_is_cut_by_advice_that_fits_on_the_same_ranks():
    path, world = CONFIGS / "llama3.1-70b.toml", 1024
    whole = ["parallelism.tp_size=1", "parallelism.pp_size=1", "training.global_batch_size=1024"]
    *_, last = plan_lines(load_config(path, whole), world, bytes_of("22GiB"), "gpu", False)
    cut = re.match(r"  and parallelism.tp_size = (\d): .*, fits, ", last)
    assert cut is not None
    overrides = [*whole, "parallelism.shard=parameters", f"parallelism.tp_size={cut[1]}"]
    cut_lines = [*plan_lines(load_config(path, overrides), world, bytes_of("22GiB"), "gpu", False)]
    assert cut_lines[0].startswith(f"1024 rank(s) (dp {1024 // int(cut[1])} x tp {cut[1]}), each on a GPU: ")
    assert cut_lines[-1].startswith("fits: ")


@pytest.mark.uncounted
def test_the_first_setting_of_shard_that_fits_is_named_and_comes_first_among_the_changes():
    overrides = ["parallelism.tp_size=1", "parallelism.pp_size=1", "training.global_batch_size=64"]
    lines = [*plan_lines(load_config(CONFIGS / "llama3.1-70b.toml", overrides), 64, bytes_of("160GiB"), "gpu", False)]
    start = lines.index("the peak by parallelism.shard")
    states, gradients, parameters = lines[start + 1 : start + 4]
    assert states.endswith(" <- this job")
    assert "<-" not in gradients
    assert parameters.split()[0] == "parameters"
    assert parameters.endswith(" <- the first that fits")
    assert re.match(r'  parallelism.shard = "parameters": .* GiB, fits, ', lines[start + 5])


def test_a_pipeline_is_told_why_parameters_are_left_out():
    overrides = ["training.global_batch_size=8", "parallelism.tp_size=8", "parallelism.pp_size=4"]
    lines = [*plan_lines(load_config(CONFIGS / "llama3.1-70b.toml", overrides), 64, None, "gpu", False)]
    (line,) = (line for line in lines if line.startswith("  parameters  "))
    assert 'left out: parallelism.shard: got "parameters", but a pipeline would gather' in line


@pytest.mark.uncounted
def test_micro_batches_that_owners_add_up_are_a_change_of_their_own():
    config = load_config(CONFIGS / "llama3.1-8b.toml")  # 8 micro-batches a step, whose gradients stay
    lines = [*plan_lines(config, 64, bytes_of("12GiB"), "gpu", False)]
    start = next(index for index, line in enumerate(lines) if isinstance(line, Failed))
    assert lines[start + 1].startswith('  parallelism.shard = "parameters": ')
    assert lines[start + 1].endswith(" too much")
    assert lines[start + 2].startswith('  and parallelism.accumulate = "owner": ')
    assert ", fits, " in lines[start + 2]


def test_why_a_share_of_the_gradients_saves_nothing_is_said_where_they_stay():
    def title(*overrides):
        lines = plan_lines(load_config(CONFIGS / "llama3.2-1b.toml", [*overrides]), 8, None, "gpu", False)
        (line,) = (line for line in lines if line.startswith("the peak by parallelism.shard"))
        return line.removeprefix("the peak by parallelism.shard")

    assert re.fullmatch(r'; gradients stay for \d+ micro-batches \(accumulate = "local"\)', title())
    assert title("parallelism.accumulate=owner") == ""
    assert title("training.micro_batch_size=1", "training.global_batch_size=8") == ""


@pytest.mark.uncounted
def test_where_no_change_is_enough_that_is_said():
    whole = ["parallelism.tp_size=1", "parallelism.pp_size=1", "model.num_layers=30"]
    config = load_config(CONFIGS / "llama3.1-70b.toml", whole)
    *_, last = plan_lines(config, 1, bytes_of("4GiB"), "gpu", False)
    assert "the model must be cut into more parts (parallelism.shard, " in last


@pytest.mark.uncounted
def test_shares_of_all_that_is_held_are_counted_on_more_ranks():
    overrides = ["parallelism.shard=parameters", "parallelism.accumulate=owner"]
    config = load_config(CONFIGS / "llama3.1-8b.toml", overrides)  # 16 bytes of each parameter are 60 GiB on 2 ranks
    *_, last = plan_lines(config, 2, bytes_of("30GB"), "gpu", False)
    assert re.match(r"  (and )?parallelism.dp_size = (4|8|16): .*, fits, ", last)


@pytest.mark.uncounted
def test_sixteen_thousand_ranks_need_no_ranks():
    config = load_config(CONFIGS / "llama3.2-1b.toml", ["training.global_batch_size=32768"])
    (text,) = plan_lines(config, 16_384, None, "gpu", True)
    plan = json.loads(text)
    assert plan["axes"]["dp"] == 16_384
    assert plan["held"]["FP32 masters"] * 16_384 == 2 * plan["held"]["half parameters"]


@pytest.mark.uncounted
def test_ranks_that_divide_experts_hold_fewer_weights_and_as_many_masters():
    experts = "{num_experts = 64, top_k = 8, ffn_hidden_size = 512, dense_layers = 1}"
    config = load_config(CONFIGS / "llama3.2-1b.toml", [f"model.experts={experts}", "model.mlp_bias=false"])
    whole, divided = (
        json.loads(next(plan_lines(config.with_keys(parallelism={"ep_size": ep_size}), 64, None, "gpu", True)))
        for ep_size in (1, 8)
    )
    assert divided["ep_size"] == 8
    of_experts = 15 * 64 * 3 * 512 * 2048  # elements
    left = divided["held"]["half parameters"] - (whole["held"]["half parameters"] - 2 * of_experts * 7 // 8)
    assert abs(left) < 1e-3 * of_experts  # padding
    masters = divided["held"]["FP32 masters"] - whole["held"]["FP32 masters"]
    assert abs(masters) < 1e-3 * whole["held"]["FP32 masters"]


def test_a_number_of_ranks_has_bounds():
    path = str(CONFIGS / "quickstart.toml")
    for world in (32_768, 0, -1):
        with pytest.raises(ConfigError, match=rf"plan: 1 problem\n  --world: got {world}, must be from 1 to 16384"):
            next(plan_lines(load_config(path, ["parallelism.dp_size=1"]), world, None, "cpu", False))


@pytest.mark.parametrize(("size", "want"), [(2**30, "1.00 GiB"), (3 * 2**20 // 2, "1.50 MiB"), (0, "0.00 MiB")])
def test_amounts(size, want):
    assert amount(size) == want


def test_gpus_are_assumed_and_that_is_said():
    config = load_config(CONFIGS / "quickstart.toml")
    said, table = itertools.islice(plan_lines(config, 2, None, None, False), 2)
    assert said == "GPUs are assumed: --device cpu plans for CPUs"
    assert table.startswith("2 rank(s), each on a GPU: ")
    (text,) = plan_lines(config, 2, None, None, True)
    assert json.loads(text)["machine"] == "gpu"
