"""Each form of NAG, with both weight decays and without momentum, follows its library's rule within FP32 rounding; the
forms differ as docs/numerics.md says.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megamix import NAG, Precision, ShardedEngine, StaticLossScale
from megamix.mixed_precision.fused_update import LibraryUpdate
from megamix.mixed_precision.update_slice import StepScalars, UpdateScalars, UpdateSlice

pytestmark = pytest.mark.uncounted

CPU = torch.device("cpu")
U = 2.0**-24  # half a unit in the last place of FP32, relative


class Rounded:
    """A number that the engine holds in FP32: its value without any rounding (FP64), and a bound of its error.

    Running error analysis (Higham 2002, section 3.3): a result's error is what its operands' errors make of it, plus
    its own rounding. FP64's rounding is left out: it is 2^-29 of FP32's.
    """

    def __init__(self, value, off=0.0):
        self.value, self.off = torch.as_tensor(value, dtype=torch.float64), off

    @staticmethod
    def cast(value):
        """Return a setting, rounded to FP32."""
        return Rounded(value, U * value)

    def _rounded(self, value, passed_on):
        return Rounded(value, passed_on + U * (value.abs() + passed_on))

    def __add__(self, other):
        return self._rounded(self.value + other.value, self.off + other.off)

    def __sub__(self, other):
        return self._rounded(self.value - other.value, self.off + other.off)

    def __mul__(self, other):
        passed_on = self.value.abs() * other.off + other.value.abs() * self.off + self.off * other.off
        return self._rounded(self.value * other.value, passed_on)


Rule = Callable[..., tuple[Rounded, Rounded]]


def mxnet_nag(w, m, g, lr, mu, wd):
    """Compute MXNet's mp_nag_mom_update (src/operator/optimizer_op-inl.h): weight and momentum in FP32."""
    g = g + wd * w
    m = mu * m - lr * g
    w = w + mu * m - lr * g
    return w, m


def torch_nag(w, b, g, lr, mu, wd):
    """Compute torch.optim.SGD(nesterov=True), from its documentation."""
    g = g + wd * w
    b = mu * b + g
    w = w - lr * (g + mu * b)
    return w, b


def torch_classical(w, b, g, lr, mu, wd):
    """Compute torch.optim.SGD(), from its documentation."""
    g = g + wd * w
    b = mu * b + g
    w = w - lr * b
    return w, b


def mxnet_classical(w, m, g, lr, mu, wd):
    """Compute MXNet's mp_sgd_mom_update (src/operator/optimizer_op-inl.h)."""
    g = g + wd * w
    m = mu * m - lr * g
    return w + m, m


def decoupled(rule):
    """Compute the rule without weight decay on weights that shrink as AdamW's do."""

    def with_decay(w, m, g, lr, mu, wd):
        return rule(w - lr * wd * w, m, g, lr, mu, Rounded(0.0))

    return with_decay


FP16 = Precision(torch.float16, loss_scale=StaticLossScale(2.0**6))
BF16, FP32 = Precision(torch.bfloat16), Precision(torch.float32)
STEPS = 200
# Step -> one element of its gradient. In BF16 and FP32 3e38 is finite, and too large to square.
SKIPPED = {0: math.inf, 7: math.nan, 8: -math.inf, 100: 3e38, 101: math.inf, 204: math.nan}
LR = [0.1 * (1 - update / STEPS) for update in range(STEPS)]
FORMS = {
    "velocity": (NAG(lr=LR, weight_decay=0.02, momentum_form="velocity"), FP16, mxnet_nag),
    "velocity, decoupled": (
        NAG(lr=LR, weight_decay=0.02, momentum_form="velocity", decoupled_weight_decay=True),
        BF16,
        decoupled(mxnet_nag),
    ),
    "gradient": (NAG(lr=LR, weight_decay=0.02), FP16, torch_nag),
    "gradient, decoupled": (NAG(lr=LR, weight_decay=0.02, decoupled_weight_decay=True), FP32, decoupled(torch_nag)),
    "classical, decoupled": (
        NAG(lr=LR, weight_decay=0.02, nesterov=False, decoupled_weight_decay=True),
        BF16,
        decoupled(torch_classical),
    ),
    "classical velocity": (
        NAG(lr=LR, weight_decay=0.02, momentum_form="velocity", nesterov=False),
        FP32,
        mxnet_classical,
    ),
    "no momentum": (NAG(lr=LR, weight_decay=0.02, momentum=0.0), FP16, torch_nag),
    "no momentum, decoupled": (
        NAG(lr=LR, weight_decay=0.02, momentum=0.0, momentum_form="velocity", decoupled_weight_decay=True),
        FP16,
        decoupled(mxnet_nag),
    ),
}


class Fed(nn.Module):
    """A module of one weight matrix whose output gets the given gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, grad):
        return (self.weight * grad).sum()


def _grad(step, dtype):
    """Return a gradient with a constant direction and noise: (48, 64)."""
    noise = torch.randn(48, 64, generator=torch.Generator().manual_seed(step))
    return (noise + torch.linspace(-1, 1, 64)).to(dtype)


def _own(engine):
    """Return the engine's master and states (one rank, one parameter without padding)."""
    return [tensor.view(48, 64) for tensor in (engine.buckets[0].master, *engine.buckets[0].states[0].values())]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_its_librarys_rule_within_fp32_rounding_and_a_skipped_step_changes_nothing(form):
    optimizer, precision, rule = FORMS[form]
    model = Fed()
    reference = Rounded(model.weight.detach()), Rounded(torch.zeros(48, 64))
    engine = ShardedEngine(model, optimizer, precision, compile_update=False)
    applied = 0
    for step in range(STEPS + len(SKIPPED)):
        before, grad = [tensor.clone() for tensor in _own(engine)], _grad(step, precision.dtype)
        if step in SKIPPED:
            grad[5, 7] = torch.tensor(SKIPPED[step])
        engine.backward(engine(grad))
        result = engine.step()
        assert bool(result.found_inf) == (step in SKIPPED)
        assert float(result.lr) == float(torch.tensor(LR[applied]))  # not advanced by a skipped step
        if step in SKIPPED:
            assert all(map(torch.equal, _own(engine), before))
        else:
            settings = (Rounded.cast(value) for value in (LR[applied], optimizer.momentum, optimizer.weight_decay))
            reference = rule(*reference, Rounded(grad), *settings)
            applied += 1
            for mine, want in zip(_own(engine), reference, strict=False):  # without momentum there is no state
                assert ((mine.double() - want.value).abs() <= want.off).all()
        assert int(engine.applied_updates) == applied
    assert applied == STEPS
    moved = (reference[0].value - Fed().weight.detach()).abs().max()
    assert reference[0].off.max() < 4e-5 * moved  # otherwise the bound would bound nothing


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_gradient_rule_is_torch_sgds(momentum):
    weight = nn.Parameter(Fed().weight.detach().double())
    sgd = torch.optim.SGD([weight], lr=0.0, momentum=momentum, nesterov=momentum > 0, weight_decay=0.02)
    rule = Rounded(weight.detach().clone()), Rounded(torch.zeros(48, 64))
    for step, lr in enumerate(LR):
        sgd.param_groups[0]["lr"] = lr
        weight.grad = _grad(step, torch.float64)
        sgd.step()
        rule = torch_nag(*rule, Rounded(weight.grad), Rounded(lr), Rounded(momentum), Rounded(0.02))
    assert torch.allclose(weight, rule[0].value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_without_a_compiler_any_cut_gives_the_same_bits_and_the_gate_leaves_every_bit(form):
    optimizer = FORMS[form][0]
    update_ = LibraryUpdate(optimizer, [optimizer.group_of("weight", (48, 64))._replace(weight_decay=(0.1,))], CPU)
    numel = (1 << 20) + 3 * 64  # more than one piece
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(numel, generator=generator).half()
    names = optimizer.states("weight", (48, 64))
    start = torch.randn(1 + len(names), numel, generator=generator)

    def run(borders, found_inf):
        """Return master and states after one update in parts."""
        step = StepScalars(torch.tensor(1 / 3), torch.tensor(found_inf), torch.tensor(0.01), torch.tensor(1.0))
        after, half = start.clone(), start[0].half()
        for first, last in zip(borders, borders[1:], strict=False):
            master, *states = after[:, first:last]
            states_by_name = dict(zip(names, states, strict=True))
            update_(UpdateSlice(0, grad[first:last], master, states_by_name, half[first:last]), step)
        assert torch.equal(half, after[0].half())
        return after

    whole = run([0, numel], found_inf=False)
    assert (whole != start).any(1).all()
    assert torch.equal(run([0, 64, 64 * 1001, numel - 64, numel], found_inf=False), whole)
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


@pytest.mark.parametrize("updates", [20, 200])
def test_both_forms_are_one_path_while_the_learning_rate_is_constant(updates):
    gradient, velocity = (_descend(form, "constant", updates) for form in ("gradient", "velocity"))
    assert (gradient - velocity).norm() < 1e-14 * (gradient - 1).norm()


def test_under_a_schedule_the_forms_differ_by_what_the_page_says():
    assert {(schedule, updates) for schedule, updates, *_ in ROWS} == {
        (schedule, updates) for schedule in SCHEDULES if schedule != "constant" for updates in ("20", "200")
    }
    for schedule, updates, *figures in ROWS:
        gradient, velocity = (_descend(form, schedule, int(updates)) for form in ("gradient", "velocity"))
        apart = 100 * (gradient - velocity).norm() / (gradient - 1).norm()
        losses = ((CURVATURES * weights.square()).sum() / CURVATURES.sum() for weights in (gradient, velocity))
        assert [float(apart), *map(float, losses)] == pytest.approx([*map(float, figures)], rel=0.02)


def test_the_state_of_one_form_is_refused_by_the_other():
    gradient, velocity = (
        ShardedEngine(Fed(), NAG(lr=0.1, momentum_form=form), FP32, compile_update=False)
        for form in ("gradient", "velocity")
    )
    with pytest.raises(ValueError, match="optimizer and its groups"):
        velocity.load_state_dict(gradient.state_dict())
