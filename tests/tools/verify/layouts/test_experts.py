"""`verify` judges models with experts: routing is no noise, right layouts pass, and bugs in routers, counts, biases and
experts are named.
"""

import statistics
from dataclasses import replace

import pytest
import torch

from megamix.config import ExpertsConfig
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.core.table import result_lines
from megamix.tools.verify.layouts.judge_routing import shortfall
from megamix.tools.verify.layouts.judge_steps import judge
from tests.conftest import FULL, also_wide
from tests.distributed.pipelines import SCHEDULES
from tests.tools.verify.jobs import EXPERTS, OVERFLOW_AT, UPDATES, make_config, observe_bugs, observe_case

GROUPED = EXPERTS | {"score": "sigmoid", "scale": 2.5, "num_groups": 4, "top_groups": 2, "bias_rate": 0.01}
MANY = EXPERTS | {"num_experts": 64, "top_k": 8, "dense_layers": 0}
SEEDS = range(100 if FULL else 2)


def _judge(config, ranks):
    return judge(config, ranks, torch.device("cpu"), UPDATES, OVERFLOW_AT)


def _config(layout, experts, **other):
    model = {"experts": experts, "num_layers": 2 * parse_layout(layout).size("pp"), **other.pop("model", {})}
    return make_config(layout, model=model, **other)


def _observe_all(configs):
    return [observe_case(config) for config in configs]


RIGHT = {
    2: [
        ("dp2", {"dtype": "bf16"}),
        ("dp2", {"dtype": "fp32", "shard": "parameters", "model": {"recompute": "full"}}),
        ("cp2", {"dtype": "fp16"}),
        ("cp2", {"dtype": "bf16", "cp_method": "heads", "packing": "documents"}),
        ("pp2", {"dtype": "bf16", "schedule": SCHEDULES[len(SCHEDULES) // 2]}),
        ("dp2ep2", {"dtype": "bf16", "name": "muon"}),
        ("dp2ep2", {"dtype": "fp16", "model": {"recompute": "selective"}}),
        ("cp2ep2", {"dtype": "bf16"}),
    ],
    4: [("dp4ep2", {"dtype": "bf16"}), ("dp2cp2ep4", {"dtype": "fp16"}), ("dp2pp2ep2", {"dtype": "fp32"})],
}  # fmt: skip


@pytest.mark.parametrize("ranks", also_wide([2], 2) if not FULL else [2, 4])
def test_right_layouts_pass(run_ranks, ranks):
    configs = [_config(layout, EXPERTS if at % 2 else GROUPED, **job) for at, (layout, job) in enumerate(RIGHT[ranks])]
    by_rank = run_ranks(_observe_all, ranks, configs, deadline_s=900.0)
    for config, *seen in zip(configs, *by_rank, strict=True):
        verdict = _judge(config, seen)
        assert [str(one) for one in verdict.differences] == []
        assert verdict.skipped == 1
        assert 0 < verdict.worst["scores"] < 1
        assert verdict.worst["counts"] == verdict.worst["tally"] == 0


NAMED = {
    "expert_gradients_larger": (0, "gradient", "blocks.1.feed_forward.down.weight[", "1.1 times the right one"),
    "expert_gradients_over_ep": (0, "gradient", "blocks.1.feed_forward.down.weight[", "0.5 times the right one"),
    "rows_of_the_other_rank": (0, "gradient", "norm.weight", ""),
    "rows_not_regrouped": (0, "gradient", "norm.weight", ""),
    "experts_permuted": (0, "gradient", "norm.weight", "that of stacks turned by 1"),
    "router_in_half": (0, "scores", "blocks.1.feed_forward.router on rank 0", ""),
    "worst_experts_chosen": (0, "choice of experts", "router on rank 0", "not by its own scores"),
    "choice_by_rounded_scores": (0, "choice of experts", "router on rank", "not by its own scores"),
    "biased_weights": (0, "gradient", "blocks.1.feed_forward.down.weight[", ""),
    "counted_in_recompute": (0, "counts", "blocks.1.feed_forward.router.balance on rank 0", ""),
    "bias_moves_on_skipped": (1, "tally", "router.balance.value on rank 0", "moved by a step that is none"),
    "bias_of_own_counts": (0, "tally", "router.balance.value on rank", ""),
}  # fmt: skip
WITH_EP = ("expert_gradients_over_ep", "rows_of_the_other_rank", "rows_not_regrouped")


def test_bugs_are_named_at_their_first_step(run_ranks):
    job = {"dtype": "fp16", "loss_scale": 4.0}
    cases = [
        (
            _config(
                "dp2ep2" if bug in WITH_EP else "dp2",
                EXPERTS,
                model={"recompute": "full" if "recompute" in bug else "none"},
                **job,
            ),
            bug,
        )
        for bug in NAMED
    ]
    by_rank = run_ranks(observe_bugs, 2, cases, OVERFLOW_AT, deadline_s=600.0)
    for (config, _), (attempt, check, where, kind), *seen in zip(cases, NAMED.values(), *by_rank, strict=True):
        first = _judge(config, seen).differences[0]
        assert (first.attempt, first.check) == (attempt, check)
        assert where in first.where
        assert kind in first.looks_like


def test_experts_that_their_owners_do_not_sum_are_named(run_ranks):
    config = _config("dp4ep2", EXPERTS, dtype="fp16", loss_scale=4.0)
    seen = run_ranks(observe_bugs, 4, [(config, "experts_not_reduced")], OVERFLOW_AT)
    first = _judge(config, [steps for (steps,) in seen]).differences[0]
    assert (first.attempt, first.check) == (0, "gradient")
    assert "blocks.1.feed_forward.down.weight[" in first.where


def test_a_run_of_many_experts_in_half_stays_far_within_its_bounds(run_ranks):
    """Without the ranks' choices the gradient would be off by 0.3 of its largest number."""
    shares, elsewhere = [], 0
    for seed in SEEDS:
        config = _config("dp2", MANY, dtype="bf16").with_keys(training={"seed": seed})
        verdict = _judge(config, run_ranks(observe_case, 2, config))
        assert [str(one) for one in verdict.differences] == []
        shares.append(max(share for check, share in verdict.worst.items() if check != "lr"))
        elsewhere += verdict.elsewhere
    print(f"{len(shares)} runs: median {statistics.median(shares):.3f}, worst {max(shares):.3f} of the bound")
    assert statistics.median(shares) < 0.3
    assert max(shares) < 0.7
    assert elsewhere > 0  # FP64 would have routed some tokens otherwise


def test_a_report_has_a_line_of_what_was_judged_of_routing(run_ranks):
    config = _config("dp1", EXPERTS, dtype="fp32")
    verdict = _judge(config, run_ranks(observe_case, 1, config))
    _, line = result_lines("dp1", "cpu", verdict)
    assert line.startswith("  routing: 64 choices of experts at most ")
    assert "counts and biases bit for bit" in line
    assert [*result_lines("dp1", "cpu", replace(verdict, tokens=0))][1:] == []


def test_the_shortfall_of_a_choice():
    plain = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=1)
    ranking = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)

    def short(experts, *chosen):
        return float(shortfall(ranking, torch.tensor(chosen), experts))

    assert short(plain, 1, 0) == 0.0
    assert short(plain, 0, 2) == pytest.approx(0.1)
    assert short(plain, 0, 0) == float("inf")
    one_group = plain.model_copy(update={"num_groups": 2, "top_groups": 1})
    assert short(one_group, 0, 1) == 0.0
    assert short(one_group, 2, 3) == pytest.approx(0.2)  # half of what the group lacks
    assert short(one_group, 0, 2) == float("inf")  # two groups
    alone = plain.model_copy(update={"top_k": 1, "num_groups": 4, "top_groups": 2})
    assert short(alone, 0) == 0.0  # the second group has no expert of it
    assert short(alone, 1) == 0.0  # 0 may be in no group of it
