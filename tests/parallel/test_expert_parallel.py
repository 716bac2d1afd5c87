"""Ranks that divide experts train the bits of one process in which the same ranks compute in lock-step."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from megamix.mixed_precision.observer import GRADIENT
from megamix.mixed_precision.update_slice import MASTER
from megamix.model.experts import Router, towards_mean
from megamix.model.family import family_of
from megamix.tools.verify.core.observed_step import assemble
from megamix.tools.verify.layouts.observe import batches, observe
from tests.conftest import FULL
from tests.distributed.pipelines import SCHEDULES
from tests.parallel.virtual_ranks import take_step
from tests.tools.verify.jobs import make_config

EXPERTS = {
    "num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "dense_layers": 1, "shared_ffn_hidden_size": 16,
    "balance_loss": 0.1, "z_loss": 0.01, "bias_rate": 0.01,
}  # fmt: skip
UPDATES, OVERFLOW_AT = 2, 1
# The layout, ep_size, and the ranks that compute all of it once.
LAYOUTS = (("dp2", 2, 2), ("cp2", 2, 2), ("dp4", 2, 4), ("dp4", 4, 4), ("dp2pp2", 2, 2))
CASES = [
    (layout, ep_size, num_ranks, dtype, shard)
    for layout, ep_size, num_ranks in LAYOUTS
    for dtype in ("fp32", "bf16", "fp16")
    for shard in ("states", "gradients", "parameters")
    if (
        FULL
        or (num_ranks == 2 and "pp" not in layout and (dtype, shard) in [("fp16", "states"), ("bf16", "parameters")])
    )
    and not ("pp" in layout and shard == "parameters")
]


def experts_job(layout, ep_size, dtype, shard, **changes):
    model = {"experts": EXPERTS, "num_layers": 3, "recompute": "full" if shard == "gradients" else "none", **changes}
    job = make_config(layout, dtype=dtype, tied=False, shard=shard, model=model)
    return job.with_keys(parallelism={"ep_size": ep_size})


@contextmanager
def all_to_the_first(wanted):
    """Let all tokens choose the first experts, so that the other ranks' experts get none."""
    if not wanted:
        yield
        return
    with mock.patch.object(Router, "_within_groups", lambda self, ranking: -torch.arange(8.0).expand_as(ranking)):
        yield


def observe_experts(config, crowded):
    with all_to_the_first(crowded):
        return observe(config, UPDATES, OVERFLOW_AT)


def expect_lock_step(config, num_ranks, ranks, crowded):
    """Compare each attempt of real ranks with the lock-step of virtual ones, bit for bit."""
    start, *attempts = zip(*ranks, strict=True)
    before = assemble([rank.owned for rank in start]).of(MASTER)
    plain = config.model.model_copy(update={"compile": False})
    torch.manual_seed(config.training.seed)
    assert all(torch.equal(before[name], value) for name, value in family_of(plain)(plain).named_parameters())
    bias = buffers_of(start)
    assert bias
    for number, seen in enumerate(attempts):
        whole = assemble([rank.owned for rank in seen])
        assert whole.problems == []
        after, own_bias = whole.of(MASTER), buffers_of(seen)
        if seen[0].scalars["found_inf"]:
            assert number == OVERFLOW_AT
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert all(torch.equal(bias[name], own_bias[name]) for name in bias)
            continue
        with all_to_the_first(crowded):
            batches_of = lambda rank, number=number: [*batches(config, number, rank)]  # noqa: E731
            found = take_step(config, num_ranks, before, bias, seen[0].scalars["loss_scale"], batches_of)
        wrong = [name for name, grad in whole.of(GRADIENT).items() if not torch.equal(grad, found.grads[name])]
        assert wrong == []
        assert whole.of(GRADIENT).keys() == found.grads.keys()
        assert abs(seen[0].scalars["loss"] - sum(found.losses) / len(found.losses)) < 1e-5
        for name, value in bias.items():
            assert torch.equal(own_bias[name], towards_mean(0.01, value, found.counts[name]))
            assert not torch.equal(own_bias[name], value)
        before, bias = after, own_bias


def buffers_of(seen):
    """The biases of all ranks, which must be alike wherever two ranks have one."""
    found = {}
    for rank in seen:
        for name, value in rank.buffers.items():
            if name.endswith("balance.value"):
                assert torch.equal(found.setdefault(name, value), value)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4] if FULL else [2])
def test_ranks_that_divide_experts_train_the_bits_of_one_process(run_ranks, num_ranks):
    for layout, ep_size, parts, dtype, shard in CASES:
        if parts * (2 if "pp" in layout else 1) == num_ranks:
            config = experts_job(layout, ep_size, dtype, shard)
            ranks = run_ranks(observe_experts, num_ranks, config, False)
            expect_lock_step(config, parts, ranks, crowded=False)


@contextmanager
def unset_is_nan():
    """Let values that nobody has set be NaN."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def spoilt(made):
        return made.fill_(torch.nan) if made.is_floating_point() and not made.is_meta else made

    with (
        mock.patch.object(Tensor, "new_empty", lambda *args, **given: spoilt(new_empty(*args, **given))),
        mock.patch.object(torch, "empty_like", lambda *args, **given: spoilt(empty_like(*args, **given))),
    ):
        yield


def observe_unset(config, crowded):
    with unset_is_nan():
        return observe_experts(config, crowded)


def test_ranks_that_gather_all_tokens_train_the_bits_of_one_process_and_read_nothing_unset(run_ranks):
    for layout, crowded in (("dp2", False), ("cp2", False), ("dp2", True)):
        config = experts_job(layout, 2, "bf16", "states").with_keys(parallelism={"ep_method": "gather"})
        expect_lock_step(config, 2, run_ranks(observe_unset, 2, config, crowded), crowded=crowded)


@pytest.mark.skipif(not FULL, reason="needs four ranks: --full")
@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_each_schedule_repeats_forwards_with_the_rows_that_they_had(run_ranks, schedule):
    model = {"experts": EXPERTS, "num_layers": 4, "recompute": "full"}
    job = make_config("dp2pp2", tied=False, schedule=schedule, model=model).with_keys(parallelism={"ep_size": 2})
    expect_lock_step(job, 2, run_ranks(observe_experts, 4, job, False), crowded=False)


def test_a_rank_whose_experts_get_no_token_computes_nothing_and_waits_for_nobody(run_ranks):
    config = experts_job("dp2", 2, "fp16", "states")
    expect_lock_step(config, 2, run_ranks(observe_experts, 2, config, True), crowded=True)
