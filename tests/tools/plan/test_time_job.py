"""A configured job as the time model's work."""

from pathlib import Path

import pytest

from megamix.config import LatentSizes, load_config
from megamix.tools.plan.time_constants import fitted_constants
from megamix.tools.plan.time_hardware import load_hardware
from megamix.tools.plan.time_job import timed_job
from megamix.tools.plan.time_model import step_time

CONFIGS = Path(__file__).parents[3] / "configs"


def config(name, **parallelism):
    return load_config(CONFIGS / f"{name}.toml").with_keys(parallelism=parallelism)


def part(job_config, dp_size, name):
    job, constants = timed_job(job_config, dp_size), fitted_constants().values
    return step_time(job, load_hardware("h100-sxm"), constants).parts[name]


def test_each_axis_costs_what_it_sends():
    alone = config("llama3.1-8b")
    assert part(alone, 8, "tp") == part(alone, 8, "cp") == part(alone, 8, "bubble") == 0
    assert part(config("llama3.1-8b", tp_size=2), 4, "tp") > 0
    assert part(config("llama3.1-8b", cp_size=2), 4, "cp") > 0
    assert part(alone, 1, "dp") == 0
    assert part(config("llama3.1-8b", shard="parameters"), 8, "dp") > part(config("llama3.1-8b"), 8, "dp")
    assert part(config("qwen3-30b-a3b", ep_size=8), 8, "ep") > 0


def test_fp8_makes_the_products_of_its_layers_faster():
    half = config("llama3.1-8b")
    fp8 = half.precision.fp8.model_copy(update={"recipe": "rowwise", "but": ("blocks.0.*", "blocks.3?.*")})
    some = half.with_keys(precision={"fp8": fp8})
    every = half.with_keys(precision={"fp8": fp8.model_copy(update={"but": (), "weight_grad": "fp8"})})
    seconds = [part(job_config, 8, "products") for job_config in (every, some, half)]
    assert seconds == sorted(seconds)
    assert part(every, 8, "between") > part(some, 8, "between") > part(half, 8, "between")


def test_schedules_wait_less_in_their_order():
    waits = [
        part(config("llama3.1-8b", pp_size=4, pp_schedule=schedule), 2, "bubble")
        for schedule in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[2]


def test_what_the_model_does_not_know_is_refused():
    other = config("llama3.1-8b").with_keys(model={"family": "mine"})
    with pytest.raises(ValueError, match='model.family: got "mine"; time is planned for "transformer" alone'):
        timed_job(other, 1)
    latent = LatentSizes(kv_rank=512, unrotated_dim=128, rotary_dim=64, value_dim=128)
    with pytest.raises(ValueError, match="model.latent_attention: time is planned without it alone"):
        timed_job(config("llama3.1-8b").with_keys(model={"latent_attention": latent}), 1)
