"""Ranks that divide experts, by sending tokens or by gathering them, pass `verify` with every `shard`, also if all
tokens choose the experts of one rank, and read nothing that nobody has set.
"""

import itertools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import Tensor

from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.observe import observe, routers
from tests.builders import divided
from tests.conftest import FULL
from tests.distributed.pipelines import SCHEDULES
from tests.tools.verify.jobs import make_config

EXPERTS = {
    "num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "dense_layers": 1, "shared_ffn_hidden_size": 16,
    "balance_loss": 0.1, "z_loss": 0.01, "bias_rate": 0.01,
}  # fmt: skip
UPDATES, OVERFLOW_AT = 2, 1
LAYOUTS = {2: [("dp2", 2), ("cp2", 2)], 4: [("dp4", 2), ("dp4", 4), ("dp2pp2", 2)]}  # with ep_size
KINDS = [("fp16", "states"), ("bf16", "parameters")]
if FULL:
    KINDS = [*itertools.product(("fp32", "bf16", "fp16"), ("states", "gradients", "parameters"))]


def experts_job(layout, ep_size, dtype, shard, **changes):
    model = {"experts": EXPERTS, "num_layers": 2, "recompute": "full" if shard == "gradients" else "none", **changes}
    job = make_config(layout, dtype=dtype, tied=False, shard=shard, model=model)
    return divided(job, expert={"size": ep_size})


@torch.no_grad()
def all_to_the_first(config, model):
    """Let all tokens choose the first experts, so that the other ranks' experts get none."""
    for router in routers(model).values():
        router.biases.copy_(-torch.arange(8.0))


def crowd(stack, crowded):
    for module in ("observe", "judge_steps") if crowded else ():
        stack.enter_context(mock.patch(f"megamix.tools.verify.layouts.{module}.set_biases", all_to_the_first))


def observe_experts(config, crowded, unset):
    """Train on this rank. `unset`: values that nobody has set are NaN."""

    def spoilt(make):
        def made(*args, **given):
            empty = make(*args, **given)
            return empty.fill_(torch.nan) if empty.is_floating_point() and not empty.is_meta else empty

        return made

    with ExitStack() as stack:
        crowd(stack, crowded)
        if unset:
            stack.enter_context(mock.patch.object(Tensor, "new_empty", spoilt(Tensor.new_empty)))
            stack.enter_context(mock.patch.object(torch, "empty_like", spoilt(torch.empty_like)))
        return observe(config, UPDATES, OVERFLOW_AT)


def passes(run_ranks, num_ranks, config, crowded=False, unset=False):
    ranks = run_ranks(observe_experts, num_ranks, config, crowded, unset)
    with ExitStack() as stack:
        crowd(stack, crowded)
        verdict = judge(config, ranks, torch.device("cpu"), UPDATES, OVERFLOW_AT)
    return verdict.differences == [] and verdict.skipped == 1


@pytest.mark.parametrize("num_ranks", [2, 4] if FULL else [2])
def test_ranks_that_divide_experts_pass_verify(run_ranks, num_ranks):
    for layout, kind in [*itertools.product(LAYOUTS[num_ranks], KINDS)][:: 1 if FULL else 3]:
        if not ("pp" in layout[0] and "parameters" in kind):
            assert passes(run_ranks, num_ranks, experts_job(*layout, *kind)), (layout, kind)


def test_ranks_that_gather_all_tokens_pass_verify_and_read_nothing_unset(run_ranks):
    for layout, crowded in (("dp2", False), ("cp2", False), ("dp2", True)):
        job = experts_job(layout, 2, "bf16", "states")
        config = divided(job, expert={"size": 2, "method": "gather"})
        assert passes(run_ranks, 2, config, crowded, unset=True), (layout, crowded)


@pytest.mark.skipif(not FULL, reason="needs four ranks: --full")
@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_each_schedule_repeats_forwards_with_the_rows_that_they_had(run_ranks, schedule):
    model = {"experts": EXPERTS, "num_layers": 4, "recompute": "full"}
    job = make_config("dp2pp2", tied=False, schedule=schedule, model=model)
    assert passes(run_ranks, 4, divided(job, expert={"size": 2}))


def test_a_rank_whose_experts_get_no_token_waits_for_nobody(run_ranks):
    assert passes(run_ranks, 2, experts_job("dp2", 2, "fp16", "states"), crowded=True)
