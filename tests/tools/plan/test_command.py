"""`megamix plan` agrees with a count by hand for an 8 B model; for a job that does not fit it names changes that make
it fit; it plans 16,384 ranks on one machine.
"""

import json
import re
from pathlib import Path

import pytest

from megamix.base.console import Failed
from megamix.cli.plan import plan_lines
from megamix.config import ConfigError, FirstLayers, load_config
from megamix.tools.plan.advice import Advice, advise
from megamix.tools.plan.limits import bytes_of
from megamix.tools.plan.memory_plan import _plan_part, plan_memory
from megamix.train.objects import build_optimizer

PARAMETERS_8B = 8_030_261_248
SHARDED, OWNERS = "parallelism.shard=parameters", "parallelism.accumulate=owner"
LARGE = ["llama3.1-70b", "model.num_layers=8", "parallelism.tensor.size=1", "parallelism.pipeline.size=1"]
GPT = ["gpt2-124m", "model.num_layers=4"]
ONE_HEAD = ["model.num_heads=1", "model.num_kv_heads=1", "model.seq_len=8191"]  # nothing to divide by tp and cp


def config_of(name, *overrides):
    return load_config(Path(__file__).parents[3] / "configs" / f"{name}.toml", overrides)


def plan_of(world, *job, memory=None):
    (text,) = plan_lines(config_of(*job), world, memory and bytes_of(memory), "gpu", True)
    return json.loads(text)


def lines_of(world, *job, memory=None):
    return [*plan_lines(config_of(*job), world, memory and bytes_of(memory), "gpu", False)]


def by_shard(lines):
    """Return the title and the three rows of the peaks by `parallelism.shard`, and what follows."""
    start = next(index for index, line in enumerate(lines) if line.startswith("the peak by parallelism.shard"))
    return lines[start], lines[start + 1 : start + 4], lines[start + 4 :]


def test_an_8b_model_on_64_gpus_by_hand():
    plan = plan_of(64, "llama3.1-8b", memory="80GB")
    held, in_step = plan["held"], plan["in_step"]
    assert plan["parameters"] == PARAMETERS_8B
    # Every parameter's size is a multiple of 64, so there is padding only at the ends of 66 buckets: < 64 x 64 each.
    assert held["half parameters"] == held["half gradients"] == pytest.approx(2 * PARAMETERS_8B, abs=2 * 66 * 64 * 64)
    assert held["FP32 masters"] == held["half parameters"] * 2 // 64
    assert held["optimizer states"] == 2 * held["FP32 masters"]
    assert in_step["half gradients, and their sums"] == 0  # NCCL reduces in place
    # recompute = "full": the input of each of 32 blocks, 8,192 tokens of 4,096 halves.
    assert in_step["activations of the blocks"] == 32 * 8192 * 4096 * 2
    # The loss keeps FP32 gradients of the head's weight and of its input, and the last norm its input and a root a row.
    loss = 4 * (128_256 * 4096 + 8192 * 4096)
    assert in_step["of embedding, norm, head and loss"] == pytest.approx(loss + 2 * 8192 * 4096, rel=1e-3)
    assert plan["fits"]


def test_an_8b_model_by_share_of_parameters_works_in_three_gib():
    plan = plan_of(64, "llama3.1-8b", "training.global_batch_size=64", SHARDED, memory="40GiB")
    held, in_step, peaks = plan["held"], plan["in_step"], plan["shards"]
    # 12/64 bytes a parameter; padding at the ends of 99 buckets.
    states = sum(held[name] for name in ("half parameters", "half gradients", "FP32 masters", "optimizer states"))
    assert states == pytest.approx(PARAMETERS_8B * 12 / 64, abs=99 * 64 * 12)
    # The head and the last block are there while the head's gradient is filled. The root is the last norm.
    head, block = 128_256 * 4096, 4096 * (4096 * 2 + 1024 * 2 + 3 * 14_336) + 2 * 4096
    assert in_step["half parameters while units compute"] == pytest.approx(2 * (head + block + 4096), rel=1e-4)
    assert in_step["half gradients, and their sums"] == pytest.approx((2 + 2 / 64) * head, rel=1e-4)
    assert 2 * (2 * head + block) == pytest.approx(2.37 * 2**30, rel=0.01)  # part of the 3 GiB
    assert [*peaks] == ["states", "gradients", "parameters"]
    assert peaks["states"] > peaks["gradients"] > peaks["parameters"] == plan["peak"]


def test_nccl_exchanges_into_two_buffers_and_gloo_into_one():
    config = config_of("gpt2-124m", "model.num_layers=1", "precision.reduce_dtype=half_fp32_sum")
    gpu, cpu = (_plan_part(config, 2, 0, device, build_optimizer(config)).engine.sums() for device in ("gpu", "cpu"))
    assert gpu == 2 * cpu > 0


def test_what_does_not_fit_is_said_with_changes_each_on_top_of_those_before_until_it_fits():
    _, _, (verdict, *lines) = by_shard(lines_of(8, *GPT, memory="1.5GiB"))
    assert verdict.startswith("does NOT fit")
    assert isinstance(verdict, Failed)  # sets the exit status to 1
    changes = [line.strip().removeprefix("and ").split(": ") for line in lines]
    assert [words for words, _ in changes] == [
        'model.recompute = "selective"', 'model.recompute = "full"', "training.micro_batch_size = 2",
    ]  # fmt: skip
    assert [", fits, " in verdict for _, verdict in changes] == [False, False, True]
    overrides = [words.replace(" ", "").replace('"', "") for words, _ in changes]
    assert lines_of(8, *GPT, *overrides, memory="1.5GiB")[-1].startswith("fits: ")


def test_the_fewest_layers_that_fit_are_proposed_for_recompute():
    config = config_of(*GPT, "model.num_layers=3", "model.recompute=none")
    plan = plan_memory(config, 8, "gpu")
    changed = [config.with_keys(model={"recompute": FirstLayers(full=full)}) for full in (1, 2)]
    peaks = [plan_memory(one, 8, "gpu").peak for one in changed]
    assert plan.peak > peaks[0] > peaks[1]
    assert Advice("model.recompute = { full = 2 }", peaks[1]) in advise(config, plan, peaks[1])


def test_a_model_whose_shares_do_not_fit_is_cut_by_advice_that_fits_on_the_same_ranks():
    job = [*LARGE, "training.global_batch_size=64"]
    *_, last = lines_of(64, *job, memory="13GiB")
    cut = re.match(r"  and (parallelism.tensor.size) = (\d): .*, fits, ", last)
    assert cut is not None
    lines = lines_of(64, *job, SHARDED, "=".join(cut.groups()), memory="13GiB")
    assert lines[0].startswith(f"64 rank(s) (dp {64 // int(cut[2])} x tp {cut[2]}), each on a GPU: ")
    assert lines[-1].startswith("fits: ")


def test_the_first_setting_of_shard_that_fits_is_named_and_comes_first_among_the_changes():
    lines = lines_of(64, *LARGE, "training.global_batch_size=64", memory="20GiB")
    title, (states, gradients, parameters), (_, change) = by_shard(lines)
    assert title == "the peak by parallelism.shard"  # one micro-batch, whose gradients do not stay
    assert states.endswith(" <- this job")
    assert "<-" not in gradients
    assert parameters.split()[0] == "parameters"
    assert parameters.endswith(" <- the first that fits")
    assert re.match(r'  parallelism.shard = "parameters": .* GiB, fits, ', change)


def test_a_pipeline_is_told_why_parameters_are_left_out():
    sizes = "training.global_batch_size=8", "parallelism.tensor.size=8", "parallelism.pipeline.size=4"
    lines = lines_of(64, *LARGE[:2], *sizes)
    _, (_, _, parameters), _ = by_shard(lines)
    assert 'left out: parallelism.shard: got "parameters", but a pipeline would gather' in parameters


def test_gradients_that_stay_for_micro_batches_are_said_and_to_add_them_up_is_a_change_of_its_own():
    title, _, (_, shard, accumulate) = by_shard(lines_of(64, "llama3.1-8b", memory="12GiB"))
    assert title == 'the peak by parallelism.shard; gradients stay for 8 micro-batches (accumulate = "local")'
    assert re.match(r'  parallelism.shard = "parameters": .* too much$', shard)
    assert re.match('  and parallelism.accumulate = "owner": .*, fits, ', accumulate)


def test_where_no_change_is_enough_that_is_said():
    job = [*GPT, "model.recompute=full", "training.micro_batch_size=1"]
    assert "the model must be cut into more parts (parallelism.shard, " in lines_of(1, *job, memory="100MiB")[-1]


def test_shares_of_all_that_is_held_are_counted_on_more_ranks():
    # 16 bytes of each parameter are 21 GiB on 2 ranks
    title, _, changes = by_shard(lines_of(2, "llama3.1-8b", LARGE[1], SHARDED, OWNERS, *ONE_HEAD, memory="12GB"))
    assert title == "the peak by parallelism.shard"
    assert re.match(r"  (and )?parallelism.dp_size = (4|8|16): .*, fits, ", changes[-1])


def test_sixteen_thousand_ranks_need_no_ranks():
    plan = plan_of(16_384, "llama3.2-1b", "model.num_layers=4", "training.global_batch_size=32768")
    assert plan["axes"]["dp"] == 16_384
    assert plan["held"]["FP32 masters"] * 16_384 == 2 * plan["held"]["half parameters"]


def test_ranks_that_divide_experts_hold_fewer_weights_and_as_many_masters():
    experts = "{num_experts = 64, top_k = 8, ffn_hidden_size = 512, dense_layers = 1}"
    job = ["llama3.2-1b", "model.num_layers=4", f"model.experts={experts}", "model.mlp_bias=false"]
    jobs = (config_of(*job, f"parallelism.expert.size={size}") for size in (1, 8))
    whole, divided = (plan_memory(config, 64, "gpu").held for config in jobs)
    of_experts = 3 * 64 * 3 * 512 * 2048  # elements
    left = divided["half parameters"] - (whole["half parameters"] - 2 * of_experts * 7 // 8)
    assert abs(left) < 1e-3 * of_experts  # padding
    masters = divided["FP32 masters"] - whole["FP32 masters"]
    assert abs(masters) < 1e-3 * whole["FP32 masters"]


@pytest.mark.parametrize("world", [32_768, 0])
def test_a_number_of_ranks_has_bounds(world):
    with pytest.raises(ConfigError, match=rf"plan: 1 problem\n  --world: got {world}, must be from 1 to 16384"):
        lines_of(world, "quickstart", "parallelism.dp_size=1")


def test_gpus_are_assumed_and_that_is_said():
    config = config_of("quickstart")
    said, table, *_ = plan_lines(config, 2, None, None, False)
    assert said == "GPUs are assumed: --device cpu plans for CPUs"
    assert table.startswith("2 rank(s), each on a GPU: ")
    (text,) = plan_lines(config, 2, None, None, True)
    assert json.loads(text)["machine"] == "gpu"
