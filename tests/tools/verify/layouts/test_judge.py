"""`verify` catches and names planted bugs: a missing reduction, a norm counted once per rank, a wrong divisor, a stale
gather, a scale applied twice, a tied table that a pipeline's ends do not sum, an overflow that only one rank sees.
"""

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch

from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.core.verdict import EXPLAINED, Difference
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.layout_lines import verify_layout
from megamix.tools.verify.layouts.observe import MOST_SKIPPED, _Documents, observe
from tests.conftest import FULL
from tests.tools.verify.jobs import OVERFLOW_AT, UPDATES, make_config, observe_bug, observe_bugs, observe_case


def _judge(config, ranks, overflow_at):
    return judge(config, ranks, torch.device("cpu"), UPDATES, overflow_at)


@pytest.mark.parametrize(
    ("dtype", "family", "optimizer"),
    [("fp16", "llama", {}), ("bf16", "gpt", {"name": "nag"}), ("fp32", "llama", {"clip_grad": 0.0})],
)
def test_data_parallel_ranks_pass_with_every_optimizer(run_ranks, dtype, family, optimizer):
    config = make_config("dp2", family=family, dtype=dtype, **optimizer)
    verdict = _judge(config, run_ranks(observe_case, 2, config), OVERFLOW_AT)
    assert verdict.differences == []
    assert (verdict.attempts, verdict.skipped) == (3, 1)
    assert 0 < verdict.worst["gradient"] < 1  # it was compared, and rounds


def test_an_average_of_the_weights_is_judged(run_ranks):
    config = make_config("dp2", average=0.9)
    bugs = {"": [], "average_of_halves": ["average"], "average_moves_on_skipped": ["average after an overflow"]}
    by_bug = zip(*run_ranks(observe_bugs, 2, [(config, bug) for bug in bugs], OVERFLOW_AT), strict=True)
    for (bug, checks), ranks in zip(bugs.items(), by_bug, strict=True):
        verdict = _judge(config, [*ranks], OVERFLOW_AT)
        assert [one.check for one in verdict.differences[:1]] == checks, bug
    assert 0 < verdict.worst["average"] < 1


@pytest.mark.parametrize(
    ("layout", "bug", "check"),
    [
        ("dp2", "gradients_not_reduced", "gradient"),
        ("tp2sp", "gradients_not_reduced", "gradient"),  # gradients of norms, which the ranks replicate
        ("dp2", "norm_counted_per_rank", "norm"),
        ("tp2", "norm_counted_per_rank", "norm"),
        ("pp2", "norm_counted_per_rank", "norm"),
        ("dp2", "wrong_divisor", "gradient"),
        ("tp2", "wrong_divisor", "gradient"),
        ("pp2", "wrong_divisor", "gradient"),
        ("dp2", "stale_gather", "half copy"),
        ("tp2", "stale_gather", "half copy"),
        ("dp2", "scale_applied_twice", "gradient"),
        ("tp2", "scale_applied_twice", "gradient"),
        ("pp2", "scale_applied_twice", "gradient"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"] if FULL else ["fp16"])
def test_a_planted_bug_is_caught_and_named(run_ranks, layout, bug, check, dtype):
    config = make_config(layout.removesuffix("sp"), dtype=dtype, loss_scale=4.0, sequence_parallel="sp" in layout)
    verdict = _judge(config, run_ranks(observe_bug, 2, config, bug), None)
    first = verdict.differences[0]
    assert (first.attempt, first.check) == (0, check)


def test_wrong_norms_are_named_by_their_kind(run_ranks):
    kinds = {
        ("tp2", "norm_counted_per_rank"): "times the root of 2, the ranks or micro-batches",
        ("dp2", "norm_leaves_out"): "it leaves out embedding.weight",
        ("dp2", "norm_of_one_rank"): "that of the shards of rank 0 alone",
        ("pp2", "norm_of_one_rank"): "that of the shards of rank 0 alone",
        ("tp2", "norm_counts_replicated"): "it counts twice what tensor-parallel ranks replicate",
    }
    cases = [(make_config(layout, loss_scale=4.0, accumulation=3), bug) for layout, bug in kinds]
    for (config, _), kind, *ranks in zip(cases, kinds.values(), *run_ranks(observe_bugs, 2, cases), strict=True):
        first = _judge(config, ranks, None).differences[0]
        assert (first.attempt, first.check) == (0, "norm")
        assert first.looks_like.startswith("that of all gradients is ")
        assert first.looks_like.endswith(kind)


def test_the_parts_of_tensor_parallel_ranks_and_of_owners_are_named(run_ranks):
    own = "each rank's own: the others' parts are missing, or not reduced over the ranks"
    missing = "tensor-parallel rank 1's part is missing"
    kinds = {
        ("dp2", "gradients_not_reduced"): {own},  # a bucket's border cuts a parameter, too
        ("tp2sp", "gradients_not_reduced"): {own},
        ("tp2sp", "positions_of_one_rank"): {own, missing},  # the same numbers for rank 0's elements
    }
    cases = [
        (make_config(layout.removesuffix("sp"), loss_scale=4.0, sequence_parallel="sp" in layout), bug)
        for layout, bug in kinds
    ]
    for (config, _), said, *ranks in zip(cases, kinds.values(), *run_ranks(observe_bugs, 2, cases), strict=True):
        found = [one for one in _judge(config, ranks, None).differences[:EXPLAINED] if one.check == "gradient"]
        assert {text for text in said for one in found if one.looks_like.startswith(text)} == said
        assert [str(one) for one in found if not one.looks_like.startswith(tuple(said))] == []


def test_memory_that_goes_too_early_and_stale_shards_are_named(run_ranks):
    kinds = {
        ("parameters", "unit_freed_early"): ("gradient", "lost: nothing but zeros"),
        ("parameters", "stale_shards"): ("half copy", ""),
        ("gradients", "gradients_freed_early"): ("gradient", "each rank's own: the others' parts are missing"),
        ("parameters", "gradients_freed_early"): ("gradient", "each rank's own: the others' parts are missing"),
    }
    cases = [(make_config("dp2", loss_scale=4.0, shard=shard), bug) for shard, bug in kinds]
    for (config, _), (check, kind), *ranks in zip(
        cases, kinds.values(), *run_ranks(observe_bugs, 2, cases), strict=True
    ):
        found = _judge(config, ranks, None).differences
        assert (found[0].attempt, found[0].check) == (0, check)
        assert any(kind in one.looks_like for one in found[:EXPLAINED] if one.check == check)


def test_buffers_that_are_rounded_or_move_are_named(run_ranks):
    cases = [(make_config("tp2", loss_scale=4.0), bug) for bug in ("tables_in_half", "table_moves_on_skipped")]
    by_rank = [*zip(*run_ranks(observe_bugs, 2, cases, OVERFLOW_AT), strict=True)]
    rounded, moved = (_judge(cases[0][0], ranks, OVERFLOW_AT).differences for ranks in by_rank)
    assert (rounded[0].attempt, rounded[0].check, rounded[0].where) == (-1, "buffer", "rotary.cos on rank 0")
    assert rounded[0].looks_like == "rounded to FP16, as parameters are"
    assert (moved[0].attempt, moved[0].check, moved[0].where) == (1, "buffer", "rotary.cos on rank 1")


NAG_FORMS = [
    {"momentum": 0.9, "momentum_form": form, "decoupled_weight_decay": decoupled}
    for form in ("gradient", "velocity")
    for decoupled in (False, True)
][:: 1 if FULL else 3]  # in CI each form once, and each rule of decay
COUPLED, DECOUPLED = "weight decay added to the gradient, not to the", "weight decay taken from the weights, not added"
# Settings of a job, the mistake that is planted in it, and the first difference: check, place, kind.
PARTS = [
    *[
        (make_config("dp2", loss_scale=4.0, name="nag", nag=form), "decay_by_the_other_rule", "weight", "", kind)
        for form, kind in zip(NAG_FORMS, (DECOUPLED, COUPLED) * (len(NAG_FORMS) // 2), strict=True)
    ],
    (
        make_config("dp2", loss_scale=4.0, name="nag", nag={"momentum": 0.0}), "decay_on_all", "weight", "norm.weight",
        "",
    ),
    (
        make_config("tp2", loss_scale=4.0, groups=[{"pattern": "*.up.weight", "weight_decay": 0.3}]), "decay_on_all",
        "weight", "up.weight", "",
    ),
    (
        make_config("dp2", loss_scale=4.0, groups=[{"pattern": "embedding.*", "lr_factor": 0.0}]), "frozen_moves",
        "weight", "embedding.weight", "",
    ),
    (
        make_config("dp2", loss_scale=4.0, groups=[{"pattern": "embedding.*", "betas": [0.5, 0.6], "eps": 1e-6}]),
        "betas_of_the_first_group", "exp_avg", "embedding.weight", "",
    ),
    (
        make_config(
            "dp2", loss_scale=4.0, name="nag",
            schedules={"momentum": {"start": 0.5, "warmup_steps": 2}, "weight_decay": {"end": 0.0}},
        ),
        "momentum_one_update_early", "weight", "", "",
    ),
    (
        make_config("tp2", loss_scale=4.0, model={"recompute": "full"}), "recomputed_elsewhere", "gradient", "blocks.",
        "",
    ),
    (
        make_config("dp2", loss_scale=4.0, model={"recompute": "selective"}, packing="documents"),
        "documents_seen_across", "gradient", "", "",
    ),
    *[
        (make_config("dp2", loss_scale=4.0, model={"compile": True}), "wrong_divisor", "gradient", "", "0.5 times the")
        for _ in range(FULL)  # the compiler takes a minute
    ],
]  # fmt: skip


def test_what_a_job_may_have_passes_and_its_mistakes_are_named(run_ranks):
    cases = [(config, "") for config, *_ in PARTS] + [(config, bug) for config, bug, *_ in PARTS]
    verdicts = [
        _judge(config, ranks, OVERFLOW_AT)
        for (config, _), *ranks in zip(cases, *run_ranks(observe_bugs, 2, cases, OVERFLOW_AT), strict=True)
    ]
    right, wrong = verdicts[: len(PARTS)], verdicts[len(PARTS) :]
    assert [verdict.differences for verdict in right] == [[]] * len(PARTS)
    for (_, bug, check, where, kind), verdict in zip(PARTS, wrong, strict=True):
        first = next((one for one in verdict.differences if where in one.where), verdict)
        assert isinstance(first, Difference), (bug, verdict)
        assert (bug, first.attempt, first.check) == (bug, 0, check)
        assert kind in first.looks_like, bug


def test_no_unit_drops_out_where_one_process_would_drop_others(run_ranks):
    pool = SimpleNamespace(on_gpus=False, call=lambda work, *args: run_ranks(work, 1, *args))
    configs = [make_config("dp1", model={"dropout": share}) for share in (0.0, 0.3)]
    without, dropped = (verify_layout(config, parse_layout("dp1"), cast(Any, pool)) for config in configs)
    assert without.differences == []
    assert without == dropped  # every share of a bound is the same


def test_packed_documents_pass_and_attention_that_crosses_them_is_caught(run_ranks):
    config = make_config("dp2", packing="documents", loss_scale=4.0)
    assert _judge(config, run_ranks(observe_case, 2, config), OVERFLOW_AT).differences == []
    first = _judge(config, run_ranks(observe_bug, 2, config, "documents_seen_across"), None).differences[0]
    assert (first.attempt, first.check) == (0, "gradient")


def test_steps_without_any_target_pass():
    config = make_config("dp1", packing="documents")
    right = _Documents.read

    def read(documents, samples):
        rows = right(documents, samples)
        return rows._replace(positions=np.zeros_like(rows.tokens))  # every document has one token

    with mock.patch.object(_Documents, "read", read):
        verdict = _judge(config, [observe(config, UPDATES, None)], None)
    assert verdict.differences == []
    assert verdict.attempts == UPDATES


def test_a_schedule_that_is_late_is_named_with_the_update_whose_lr_it_is(run_ranks):
    config = make_config("dp1", loss_scale=4.0)
    config = config.with_keys(lr_schedule={"warmup_steps": 4})
    assert _judge(config, run_ranks(observe_case, 1, config), OVERFLOW_AT).differences == []
    verdict = _judge(config, run_ranks(observe_bug, 1, config, "schedule_one_update_late"), None)
    first = verdict.differences[0]
    assert first.check == "lr"
    assert "where the schedule has 0.005 for update 2" in first.looks_like


def test_a_tied_table_that_is_not_summed_over_the_ends_is_named(run_ranks):
    config = make_config("pp2", loss_scale=4.0)
    verdict = _judge(config, run_ranks(observe_bug, 2, config, "tied_table_not_summed"), None)
    first = verdict.differences[0]
    assert (first.attempt, first.where) == (0, "embedding.weight")
    assert first.check.startswith("copies (gradient of rank 1 differs by ")


def test_overflows_that_one_rank_would_not_have_are_a_difference(run_ranks):
    config = make_config("dp2", loss_scale=2.0**10)
    verdict = _judge(config, run_ranks(observe_bug, 2, config, "scale_applied_twice"), None)
    first = verdict.differences[0]
    assert (first.check, first.where) == ("overflow flag", "one rank, which has none")


def test_a_run_that_only_overflows_has_proved_nothing(run_ranks):
    config = make_config("dp1", loss_scale=2.0**100)
    verdict = _judge(config, run_ranks(observe_case, 1, config), OVERFLOW_AT)
    assert (verdict.attempts, verdict.skipped) == (UPDATES + MOST_SKIPPED, UPDATES + MOST_SKIPPED)
    assert str(verdict.differences[0]) == "attempt 41: applied updates of the run: 0 of 2"
