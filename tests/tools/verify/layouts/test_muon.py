"""`verify` of Muon: the FP64 bound of a direction holds and is narrow; a family's own division and FP32
directions pass.
"""

import random
from dataclasses import replace

import pytest
import torch

from megamix.mixed_precision.observer import DIRECTION, SOURCE
from megamix.mixed_precision.optim.muon import DIRECTION_SQ, Muon, orthogonalised
from megamix.tools.verify.core.observed_step import Whole
from megamix.tools.verify.core.verdict import Verdict
from megamix.tools.verify.layouts.judge_matrices import exact_direction, judge_matrices
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.observe import observe
from tests.conftest import FULL
from tests.tools.verify.catalogue.engine import MUON
from tests.tools.verify.catalogue.run import judged_layouts
from tests.tools.verify.jobs import make_config

CPU = torch.device("cpu")
SIZES = 1, 2, 3, 8, 13, 32, 64
SPECTRA = (  # flat, steep, of half rank
    torch.ones, lambda size: torch.logspace(0, -6, size), lambda size: (torch.arange(size) <= size // 2).float(),
)  # fmt: skip


def _matrices(seed):
    """Return a matrix of any size, spectrum and magnitude; some elements may be zero."""
    drawn, draws = torch.Generator().manual_seed(seed), random.Random(seed)
    matrix = torch.randn(draws.choice(SIZES), draws.choice(SIZES), generator=drawn)
    if draws.random() < 0.5:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        matrix = left * draws.choice(SPECTRA)(len(values)) @ right
    elif draws.random() < 0.5:
        matrix = matrix * (torch.rand(matrix.shape, generator=drawn) < 0.2)
    return matrix * 10.0 ** draws.randint(-10, 15)


def _share(matrix, optimizer, right):
    want, bound = exact_direction(matrix, right)
    return float((orthogonalised(matrix, optimizer) - want).norm()) / bound if matrix.any() else 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("turns", [1, 5])
def test_roundings_stay_within_the_bound(dtype, turns):
    own = Muon(lr=1.0, ns_dtype=dtype, ns_steps=turns)
    shares = [_share(_matrices(seed).to(dtype), own, own) for seed in range(1000 if FULL else 100)]
    assert 0.05 < max(shares) < 0.7, max(shares)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_roundings_of_the_relatives_stay_within_the_bound(dtype):
    """Take the path of a job's judge."""
    own = Muon(lr=1.0, ns_dtype=dtype, equal_rows=True, exact_norm=True, row_beta2=0.9)
    for seed in range(300 if FULL else 40):
        matrix, length = _matrices(seed).to(dtype).float(), max(_matrices(seed).shape)
        before = torch.rand(length, generator=torch.Generator().manual_seed(seed))
        found, states = own.direction(matrix.to(dtype), {DIRECTION_SQ: before})
        scaled = found.float() * own.lr_scale(*matrix.shape)
        assert _said(own, matrix, scaled, before, states[DIRECTION_SQ]) == "", seed
    matrix, before = torch.randn(16, 24, generator=torch.Generator().manual_seed(0)).to(dtype), torch.ones(24)
    found, states = own.direction(matrix, {DIRECTION_SQ: before})
    scaled, wrong = found.float() * own.lr_scale(16, 24), states[DIRECTION_SQ] * 1.5
    assert "direction_sq of up is off by" in _said(own, matrix.float(), scaled, before, wrong)


def test_a_coefficient_that_is_wrong_by_a_thousandth_does_not():
    own = Muon(lr=1.0, ns_dtype=torch.float32)
    a, b, c = own.ns_coefficients
    for other in ((a * 1.001, b, c), (a, b * 1.001, c), (a, b, c * 1.001)):
        wrong, matrix = replace(own, ns_coefficients=other), torch.randn(32, 48, generator=torch.Generator())
        assert _share(matrix, wrong, own) > 10
    assert _share(matrix, replace(own, ns_steps=4), own) > 1000


def _said(optimizer, source, found, *moments):
    """Return the answer to a parameter's matrix and its direction.

    `source`: before, `found`: after it was made orthogonal. `moments`: before and after.
    """
    tensors = {(SOURCE, "up"): source, (DIRECTION, "up"): found}
    before, after = ({(DIRECTION_SQ, "up"): one} for one in moments or (torch.zeros(0), torch.zeros(0)))
    whole = Whole(tensors | after)
    verdict = Verdict(attempt=0)
    judge_matrices(verdict, optimizer, "up", source.double(), Whole(before), whole, CPU)
    return str((verdict.differences or [""])[0])


def test_a_wrong_scale_another_dtype_and_no_direction_are_told():
    own = Muon(lr=1.0)
    matrix = torch.randn(16, 24, generator=torch.Generator()).bfloat16()
    right = orthogonalised(matrix, own).float()
    assert _said(own, matrix.float(), right * own.lr_scale(16, 24)) == ""
    assert _said(own, matrix.float(), right).startswith("attempt 0: direction of up is off by ")
    wide = orthogonalised(matrix.float(), own) * own.lr_scale(16, 24)
    assert _said(own, matrix.float(), wide).startswith("attempt 0: direction of up is off by ")
    verdict = Verdict(attempt=0)
    judge_matrices(verdict, own, "up", matrix, Whole(), Whole(), CPU)
    assert str(verdict.differences[0]) == "attempt 0: direction of up: there is none: no rank has made it orthogonal"


def test_other_states_than_the_job_s_are_told():
    ranks = [observe(make_config("dp1"), 1, None)]
    verdict = judge(make_config("dp1", **MUON), ranks, CPU, 1, None)
    told = [str(one) for one in verdict.differences if one.check == "states"]
    assert len(told) == 14 == len(verdict.differences)
    assert told[0] == (
        "attempt 0: states of blocks.1.feed_forward.down.weight: ranks keep exp_avg, exp_avg_sq, master; "
        "the job has master, momentum_buffer"
    )


RELATIVES = {
    "equal_rows": True, "exact_norm": True, "row_beta2": 0.9, "cautious_weight_decay": True, "ns_eps": 1e-6,
    "ns_table": [[8.1, -22.0, 15.5], [4.0, -2.8, 0.5], [2.3, -1.7, 0.4]], "adjust_lr": "spectral_norm",
}  # fmt: skip


def test_what_a_job_may_have_passes(run_ranks):
    others = {"ns_dtype": "fp32", "nesterov": False, "adjust_lr": "original", "adamw": ["*.out.*"]}
    configs = [
        make_config("dp2", dtype="bf16", muon=others, **MUON), make_config("tp2", family="per_head", **MUON),
        make_config("tp2", muon=RELATIVES, **MUON),
    ]  # fmt: skip
    for verdict in judged_layouts(run_ranks, 2, configs):
        assert verdict.differences == []
        assert (verdict.skipped, DIRECTION in verdict.worst) == (1, True)
