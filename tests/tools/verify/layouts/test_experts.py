"""`verify` judges models with experts: routing is no noise, and right layouts pass."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from megamix.config import ExpertGroups, ExpertsConfig
from megamix.tools.verify.core.table import result_lines
from megamix.tools.verify.layouts.judge_routing import shortfall
from tests.conftest import FULL, also_wide
from tests.distributed.pipelines import SCHEDULES
from tests.tools.verify.catalogue.run import judged_layouts
from tests.tools.verify.jobs import EXPERTS, make_config

GROUPED = EXPERTS | {"score": "sigmoid", "scale": 2.5, "groups": {"count": 4, "top": 2}, "bias_rate": 0.01}
MANY = EXPERTS | {"num_experts": 64, "top_k": 8, "dense_layers": 0}
SEEDS = range(100 if FULL else 2)


def _config(layout, experts, model=None, **other):
    return make_config(layout, model={"experts": experts, **(model or {})}, **other)


RIGHT = {
    2: [
        ("dp2", {"dtype": "bf16"}),
        ("dp2", {"dtype": "fp32", "shard": "parameters", "model": {"recompute": "full"}}),
        ("cp2", {"dtype": "fp16"}),
        ("cp2", {"dtype": "bf16", "cp_method": "heads", "packing": "documents"}),
        ("pp2", {"dtype": "bf16", "schedule": SCHEDULES[len(SCHEDULES) // 2]}),
        ("dp2ep2", {"dtype": "bf16", "name": "muon", "model": {"recompute": "selective"}}),
    ],
    4: [("dp4ep2", {"dtype": "bf16"}), ("dp2cp2ep4", {"dtype": "fp16"}), ("dp2pp2ep2", {"dtype": "fp32"})],
}  # fmt: skip


@pytest.mark.parametrize("ranks", also_wide([2], 2) if not FULL else [2, 4])
def test_right_layouts_pass(run_ranks, ranks):
    configs = [_config(layout, EXPERTS if at % 2 else GROUPED, **job) for at, (layout, job) in enumerate(RIGHT[ranks])]
    for verdict in judged_layouts(run_ranks, ranks, configs):
        assert [str(one) for one in verdict.differences] == []
        assert verdict.skipped == 1
        assert 0 < verdict.worst["scores"] < 1
        assert verdict.worst["counts"] == verdict.worst["tally"] == 0


def test_a_run_of_many_experts_in_half_stays_far_within_its_bounds(run_ranks):
    """Without the ranks' choices the gradient would be off by 0.3 of its largest number."""
    shares, elsewhere = [], 0
    configs = [_config("dp2", MANY, dtype="bf16").with_keys(training={"seed": seed}) for seed in SEEDS]
    for verdict in judged_layouts(run_ranks, 2, configs):
        assert [str(one) for one in verdict.differences] == []
        shares.append(max(share for check, share in verdict.worst.items() if check != "lr"))
        elsewhere += verdict.elsewhere
    assert statistics.median(shares) < 0.3
    assert max(shares) < 0.7
    assert elsewhere > 0  # FP64 would have routed some tokens otherwise


def test_a_report_has_a_line_of_what_was_judged_of_routing(run_ranks):
    (verdict,) = judged_layouts(run_ranks, 1, [_config("dp1", EXPERTS, dtype="fp32")])
    _, line = result_lines("dp1", "cpu", verdict)
    assert line.startswith("  routing: 64 choices of experts at most ")
    assert "counts and biases bit for bit" in line
    assert [*result_lines("dp1", "cpu", replace(verdict, tokens=0))][1:] == []


def test_the_shortfall_of_a_choice():
    plain = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=1)
    ranking = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)

    one_group = plain.model_copy(update={"groups": ExpertGroups(count=2)})
    alone = plain.model_copy(update={"top_k": 1, "groups": ExpertGroups(count=4, top=2)})
    for experts, chosen, short in (
        (plain, [1, 0], 0.0), (plain, [0, 2], 0.1), (plain, [0, 0], math.inf),
        (one_group, [0, 1], 0.0), (one_group, [2, 3], 0.2),  # half of what the group lacks
        (one_group, [0, 2], math.inf),  # two groups
        (alone, [0], 0.0),  # the second group has no expert of it
        (alone, [1], 0.0),  # 0 may be in no group of it
    ):  # fmt: skip
        assert float(shortfall(ranking, torch.tensor(chosen), experts)) == pytest.approx(short)
