"""Each form of NAG, with both weight decays and without momentum, follows its library's rule within FP32 rounding; the
forms differ as docs/numerics.md says.
"""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from megamix import NAG, Precision, StaticLossScale
from megamix.base import constants
from megamix.mixed_precision.fused_update import LibraryUpdate
from megamix.mixed_precision.update_slice import StepScalars, UpdateScalars, UpdateSlice
from tests.builders import BF16, FP32, make_engine

U = 2.0**-24  # half a unit in the last place of FP32, relative


def mxnet_nag(w, m, g, lr, mu, wd):
    """Compute MXNet's mp_nag_mom_update (src/operator/optimizer_op-inl.h): weight and momentum in FP32."""
    g = g + wd * w
    m = mu * m - lr * g
    return w + mu * m - lr * g, m


def mxnet_classical(w, m, g, lr, mu, wd):
    """Compute MXNet's mp_sgd_mom_update (src/operator/optimizer_op-inl.h)."""
    m = mu * m - lr * (g + wd * w)
    return w + m, m


def torch_nag(w, b, g, lr, mu, wd):
    """Compute torch.optim.SGD(nesterov=True), from its documentation."""
    g = g + wd * w
    b = mu * b + g
    return w - lr * (g + mu * b), b


def torch_classical(w, b, g, lr, mu, wd):
    """Compute torch.optim.SGD(), from its documentation."""
    b = mu * b + g + wd * w
    return w - lr * b, b


def decoupled(rule):
    """Compute the rule without weight decay on weights that shrink as AdamW's do."""
    return lambda w, m, g, lr, mu, wd: rule(w - lr * wd * w, m, g, lr, mu, 0.0)


FP16 = Precision(torch.float16, loss_scale=StaticLossScale(2.0**6))
STEPS = 40
# Step -> one element of its gradient. In BF16 and FP32 3e38 is finite, and too large to square.
SKIPPED = {0: math.inf, 7: math.nan, 8: -math.inf, 20: 3e38, 21: math.inf, 44: math.nan}
LR = [0.1 * (1 - update / STEPS) for update in range(STEPS)]
DECOUPLED, VELOCITY = {"decoupled_weight_decay": True}, {"momentum_form": "velocity"}
FORMS = {
    "velocity": (VELOCITY, FP16, mxnet_nag),
    "velocity, decoupled": (VELOCITY | DECOUPLED, BF16, decoupled(mxnet_nag)),
    "gradient": ({}, FP16, torch_nag),
    "gradient, decoupled": (DECOUPLED, FP32, decoupled(torch_nag)),
    "classical, decoupled": ({"nesterov": False} | DECOUPLED, BF16, decoupled(torch_classical)),
    "classical velocity": (VELOCITY | {"nesterov": False}, FP32, mxnet_classical),
    "no momentum": ({"momentum": 0.0}, FP16, torch_nag),
    "no momentum, decoupled": ({"momentum": 0.0} | VELOCITY | DECOUPLED, FP16, decoupled(mxnet_nag)),
}


def _draws(seed):
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_its_librarys_rule_within_fp32_rounding_and_a_skipped_step_changes_nothing(form):
    settings, precision, rule = FORMS[form]
    optimizer = NAG(lr=LR, weight_decay=0.02, **settings)
    model = nn.ParameterList([_draws(999)])
    engine = make_engine(model, optimizer, precision)
    bucket, reference = engine.buckets[0], (_draws(999).double(), torch.zeros(48, 64).double())
    own = [tensor.view(48, 64) for tensor in (bucket.master, *bucket.states[0].values())]
    applied, largest = 0, 0.0
    for step in range(STEPS + len(SKIPPED)):
        before = [tensor.clone() for tensor in own]
        grad = (_draws(step) + torch.linspace(-1, 1, 64)).to(precision.dtype)  # a constant direction and noise
        if step in SKIPPED:
            grad[5, 7] = torch.tensor(SKIPPED[step])
        engine.backward((model[0] * grad).float().sum())
        result = engine.step()
        assert bool(result.found_inf) == (step in SKIPPED)
        assert float(result.lr) == float(torch.tensor(LR[applied]))  # not advanced by a skipped step
        if step in SKIPPED:
            assert all(map(torch.equal, own, before))
            continue
        reference = rule(*reference, grad.double(), LR[applied], optimizer.momentum, 0.02)
        applied += 1
        # An update has at most ten operations, whose results are at most some of the largest number. The momentum
        # passes a rounding on ten times.
        largest = max(largest, *(float(one.abs().max()) for one in (*reference, grad)))
        for mine, want in zip(own, reference, strict=False):  # without momentum there is no state
            assert (mine - want).abs().max() <= (bound := 100 * U * applied * largest)
    assert applied == int(engine.applied_updates) == STEPS
    assert bound < 1e-3 * (own[0] - _draws(999)).abs().max()  # otherwise it would bound nothing


@pytest.mark.parametrize("form", FORMS)
def test_without_a_compiler_any_cut_gives_the_same_bits_and_the_gate_leaves_every_bit(form, monkeypatch):
    monkeypatch.setattr(constants, "UPDATE_CHUNK", 64 * 8)
    optimizer, numel = NAG(lr=0.1, **FORMS[form][0]), 48 * 64
    group = optimizer.group_of("weight", (48, 64))._replace(weight_decay=(0.1,))
    update_ = LibraryUpdate(optimizer, [group], torch.device("cpu"))
    names = optimizer.states("weight", (48, 64))
    grad, start = (
        _draws(0).view(-1).half(),
        torch.stack([_draws(1 + number).view(-1) for number in range(1 + len(names))]),
    )

    def run(borders, found_inf=False):
        """Return master and states after one update in parts."""
        step = StepScalars(torch.tensor(1 / 3), torch.tensor(found_inf), torch.tensor(0.01), torch.tensor(1.0))
        after, half = start.clone(), start[0].half()
        for first, last in zip(borders, borders[1:], strict=False):
            master, *states = after[:, first:last]
            update_(
                UpdateSlice(0, grad[first:last], master, dict(zip(names, states, strict=True)), half[first:last]), step
            )
        assert torch.equal(half, after[0].half())
        return after

    whole = run([0, numel])
    assert (whole != start).any(1).all()
    assert torch.equal(run([0, 64, 64 * 17, numel - 64, numel]), whole)
    grad[::7], grad[3::11] = float("inf"), float("nan")
    assert torch.equal(run([0, numel], found_inf=True), start)


# The share of the peak learning rate after a share of the run, by the names of the page.
SCHEDULES = {
    "constant": lambda over: 1.0,
    "linear to 0": lambda over: 1 - over,
    "a tenth, from half the run on": lambda over: 1.0 if over < 0.5 else 0.1,
    "warm-up over the first tenth": lambda over: min(1.0, 10 * over),
}
PAGE = (Path(__file__).parents[2] / "docs/numerics.md").read_text(encoding="utf-8")
# Columns: schedule, updates, the forms' final distance in per cent of the way, the loss of each form.
ROWS = re.findall(r"^\| (.+) \| (20|200) \| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
CURVATURES = torch.logspace(-2, 0, 16, dtype=torch.float64)


def _descend(form, schedule, updates):
    """Return the weights that the engine's own equation reaches in FP64, from 1, on a quadratic with these
    curvatures.
    """
    optimizer = NAG(lr=0.01, momentum_form=form)
    weights = torch.ones_like(CURVATURES)
    states = {name: torch.zeros_like(weights) for name in optimizer.states("weight", (16,))}
    for update in range(updates):
        over = (update + schedule.startswith("warm-up")) / updates  # a warm-up starts with its first step, not with 0
        lr = torch.tensor(0.01 * SCHEDULES[schedule](over), dtype=torch.float64)
        at = UpdateScalars(lr, 0.0, (torch.tensor(0.9, dtype=torch.float64),))
        weights, states = optimizer.equation(CURVATURES * weights, weights, states, at)
    return weights


def test_the_forms_are_one_path_but_under_a_schedule_where_they_differ_by_what_the_page_says():
    assert {(schedule, updates) for schedule, updates, *_ in ROWS} == {
        (schedule, updates) for schedule in SCHEDULES if schedule != "constant" for updates in ("20", "200")
    }
    for schedule, updates, *figures in [("constant", "200"), *ROWS]:
        gradient, velocity = (_descend(form, schedule, int(updates)) for form in ("gradient", "velocity"))
        apart = 100 * float((gradient - velocity).norm() / (gradient - 1).norm())
        if schedule == "constant":
            assert apart < 1e-12
            continue
        losses = (float((CURVATURES * weights.square()).sum() / CURVATURES.sum()) for weights in (gradient, velocity))
        assert [apart, *losses] == pytest.approx([*map(float, figures)], rel=0.02)
