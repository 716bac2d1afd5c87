"""A layout that trains as one rank passes, overflow included; one with a bug is caught, and the bug is named."""

from __future__ import annotations

import pytest
import torch

from megamix.config import Config
from megamix.train.build import build_optimizer
from megamix.verify.judge import Verdict, judge
from megamix.verify.observe import Observation
from tests.verify.jobs import OVERFLOW_AT, make_config, observe_bug, observe_case


def _judge(config: Config, ranks: list[Observation], overflow_at: int | None) -> Verdict:
    optimizer = build_optimizer(config.optimizer, [config.optimizer.lr])
    return judge(config, optimizer, ranks, torch.device("cpu"), overflow_at)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("family", "tied", "optimizer"),
    [("llama", True, {}), ("gpt", False, {"name": "nag"}), ("llama", False, {"clip_grad": 0.0})],
)
def test_data_parallel_ranks_pass(run_ranks, family: str, tied: bool, optimizer: dict, dtype: str) -> None:
    config = make_config("dp2", family=family, tied=tied, dtype=dtype, **optimizer)
    verdict = _judge(config, run_ranks(observe_case, 2, config), OVERFLOW_AT)
    assert verdict.differences == []
    assert (verdict.attempts, verdict.skipped) == (3, 1)
    assert 0 < verdict.worst["gradient"] < 1  # it was compared, and rounds


@pytest.mark.parametrize(
    ("layout", "bug", "check"),
    [
        ("dp2", "gradients_not_reduced", "gradient"),
        ("tp2sp", "gradients_not_reduced", "gradient"),  # of norms, which the ranks replicate
        ("dp2", "norm_counted_per_rank", "norm"),
        ("tp2", "norm_counted_per_rank", "norm"),
        ("dp2", "wrong_divisor", "gradient"),
        ("tp2", "wrong_divisor", "gradient"),
        ("dp2", "stale_gather", "half copy"),
        ("dp2", "scale_applied_twice", "gradient"),
        ("tp2", "scale_applied_twice", "gradient"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_planted_bug_is_caught_and_named(run_ranks, layout: str, bug: str, check: str, dtype: str) -> None:
    config = make_config(layout.removesuffix("sp"), dtype=dtype, loss_scale=4.0, sequence_parallel="sp" in layout)
    verdict = _judge(config, run_ranks(observe_bug, 2, config, bug), None)
    assert verdict.first is not None
    assert (verdict.first.attempt, verdict.first.check) == (0, check)


def test_overflows_that_one_rank_would_not_have_are_a_difference(run_ranks) -> None:
    config = make_config("dp2", loss_scale=2.0**10)
    verdict = _judge(config, run_ranks(observe_bug, 2, config, "scale_applied_twice"), None)
    assert verdict.first is not None
    assert (verdict.first.check, verdict.first.where) == ("overflow flag", "one rank, which has none")
