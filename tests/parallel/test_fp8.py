"""Ranks that compute products in FP8 train as one rank does, in every layout, recipe and `shard`; planted bugs are
found, and an inf within a product skips the step on every rank.
"""

import torch

from megamix.config import FP8Config, ModelConfig
from megamix.model.fp8 import use_fp8
from megamix.model.transformer import Transformer
from megamix.parallel.stages import Stage
from megamix.tools.verify.layouts.judge_steps import judge
from tests.conftest import FULL
from tests.tools.verify.catalogue.run import judged_layouts
from tests.tools.verify.jobs import OVERFLOW_AT, UPDATES, make_config, observe_bug

RECIPES = {
    "rowwise": {"recipe": "rowwise"},
    "rowwise in full": {"recipe": "rowwise", "weight_grad": "fp8", "grad": "e4m3"},
    "tensorwise": {"recipe": "tensorwise", "but": ("blocks.0.*",)},
    "tensorwise in full": {"recipe": "tensorwise", "weight_grad": "fp8"},
}
MODEL = {"hidden_size": 64, "ffn_hidden_size": 96, "seq_len": 32}  # as many tokens in a micro-batch as channels
SHARDS = "states", "gradients", "parameters"
CASES = [
    (layout, recipe, shard)
    for layout in ("dp2", "tp2sp", "cp2", "pp2")
    for recipe in RECIPES
    for shard in SHARDS
    if not (layout == "pp2" and shard == "parameters")
]
FEW = [
    ("dp2", "rowwise", "parameters"), ("tp2sp", "tensorwise in full", "gradients"),
    ("cp2", "rowwise in full", "states"), ("pp2", "tensorwise", "states"),
]  # fmt: skip


def fp8_job(layout, recipe, shard="states", **model):
    recompute = {"states": "none", "gradients": "selective", "parameters": "full"}[shard]
    job = make_config(
        layout.removesuffix("sp"), dtype="bf16", shard=shard, sequence_parallel=layout.endswith("sp"),
        model=MODEL | {"recompute": recompute} | model,
    )  # fmt: skip
    return job.with_keys(precision={"fp8": FP8Config(**RECIPES[recipe])})


def test_every_layout_passes(run_ranks):
    cases = CASES if FULL else FEW
    for case, verdict in zip(cases, judged_layouts(run_ranks, 2, [fp8_job(*case) for case in cases]), strict=True):
        assert (case, verdict.differences, verdict.skipped) == (case, [], 1)


def test_a_stage_takes_no_codes_of_what_its_buffer_held_before():
    """A receive writes into the same tensor in each step, and counts no version."""
    config = ModelConfig(vocab_size=64, seq_len=16, hidden_size=64, num_layers=2, num_heads=4, norm_place="after")
    model = Transformer(config).to(torch.bfloat16)
    use_fp8(model, FP8Config(recipe="rowwise", but=("*.out", "*.feed_forward.*")))  # nothing follows query, key, value
    stage, targets, received = Stage(model, range(1, 2)), torch.zeros(1, 16, dtype=torch.int64), torch.ones(1, 16, 64)
    buffer = received.to(torch.bfloat16)
    with torch.no_grad():
        stage(buffer, targets)
        buffer.data.copy_(received.cumsum(2))
        assert torch.equal(stage(buffer, targets), stage(buffer.clone(), targets))


BUGS = {
    "fp8_gradients_larger": ("tensorwise in full", "it looks like 2 times the right one"),
    "fp8_scales_transposed": ("rowwise in full", "gradient of "),
    "fp8_scales_stale": ("tensorwise in full", "gradient of "),
}


def test_planted_bugs_are_found_and_an_inf_in_a_product_skips_on_every_rank(run_ranks):
    jobs = [fp8_job("dp2", recipe) for recipe, _ in BUGS.values()]
    for (_, told), verdict in zip(BUGS.values(), judged_layouts(run_ranks, 2, jobs, [*BUGS], None, 1), strict=True):
        assert told in str(verdict.differences[0])
    job = fp8_job("dp2", "tensorwise in full")
    hidden, right = (
        judge(job, run_ranks(observe_bug, 2, job, bug), torch.device("cpu"), UPDATES, OVERFLOW_AT)
        for bug in ("inf_hidden_by_the_cast", "inf_in_a_product")
    )
    assert "overflow flag of the planted overflow" in str(hidden.differences[0])
    assert (right.differences, right.skipped) == ([], 1)
