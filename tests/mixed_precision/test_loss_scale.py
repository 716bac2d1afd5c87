"""The loss scale follows its table and stays a power of two, and the rules of torch, Megatron-LM and DeepSpeed are
followed event for event, each with its source. A step divides by the scale that backward used.

x is a step that overflowed, . a clean one.
"""

import inspect
import random
from functools import partial

import pytest
import torch
from torch import nn

from megamix import (
    AdamW,
    DeepSpeedLossScale,
    DynamicLossScale,
    MegatronLossScale,
    Precision,
    StaticLossScale,
    TorchLossScale,
)
from tests.builders import make_engine


def _after(scale, events):
    """Return the scale after each event."""
    scales = []
    for event in events:
        scale.update_(torch.tensor(event == "x"), torch.tensor(1.0), scale.loss_scale)
        scales.append(float(scale.loss_scale))
    return scales


# Growth interval 3, first scale 8, floor 2, ceiling 64.
STORIES = [
    (1, "..x...", [8, 8, 4, 4, 4, 8]),  # an overflow restarts the count of clean steps
    (1, "...x", [8, 8, 16, 8]),  # a growth probe that overflows backs off at once
    (1, "xxxx", [4, 2, 2, 2]),  # the floor
    (1, "............", [8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64]),  # the ceiling
    (2, "xx", [4, 2]),  # a scale that never worked is not guarded: the first search loses one step per halving
    (2, ".x.x.xx", [8, 8, 8, 8, 8, 8, 4]),  # a proven scale survives one overflow, and a clean step forgives
    (2, "...x", [8, 8, 16, 8]),  # hysteresis never guards a growth probe
    (2, "....xx", [8, 8, 16, 16, 16, 8]),  # ... but does guard it once it has worked
    (2, "...............x", [8, 8, 16, 16, 16, 32, 32, 32, 64, *[64] * 7]),  # the ceiling is proven once, and stays so
    (3, ".xx.xxx", [8, 8, 8, 8, 8, 8, 4]),
    (2, ".xxx", [8, 8, 4, 2]),  # after a back-off the lower scale is unproven again
    (2, ".x...", [8, 8, 8, 8, 16]),  # a guarded overflow still restarts the count of clean steps
]


@pytest.mark.parametrize(("hysteresis", "events", "want"), STORIES)
def test_the_scale_follows_the_table(hysteresis, events, want):
    scale = DynamicLossScale(8.0, growth_interval=3, hysteresis=hysteresis, min_scale=2.0, max_scale=64.0)
    assert _after(scale, events) == want


def test_a_static_scale_never_moves():
    scale = StaticLossScale(128.0)
    scale.update_(torch.tensor(True), torch.tensor(1.0), scale.loss_scale)
    restored = StaticLossScale(2.0)
    restored.load_state_dict(scale.state_dict())
    assert (float(scale.loss_scale), float(restored.loss_scale)) == (128.0, 2.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"growth_interval": 2**31}, r"growth_interval .* must be at most 1e\+09, got 2147483648"),  # torch: 0 >= 2**31
        ({"init_scale": 2.0, "min_scale": 4.0}, "init_scale 2 must lie between min_scale 4"),
        ({"max_scale": 7.0}, "max_scale must be a power of two"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**settings)


class _Linear(nn.Linear):
    """A weight of 4 with a gradient of 3, whatever it is."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        nn.init.constant_(self.weight, 4.0)

    def forward(self):
        return 3.0 * super().forward(torch.ones(1, 1, dtype=torch.float16)).float()


def _linear_engine(scale):
    optimizer = AdamW(lr=1.0, weight_decay=0.0, eps=1e-30)
    return make_engine(_Linear(), optimizer, Precision(torch.float16, loss_scale=scale))


def test_a_growing_step_is_unscaled_with_the_scale_that_backward_used():
    engine = _linear_engine(DynamicLossScale(8.0, growth_interval=2))
    results = []
    for _ in range(5):
        engine.backward(engine())
        results.append(engine.step())
    assert [float(result.loss_scale) for result in results] == [8, 8, 16, 16, 32]
    assert [float(result.grad_norm) for result in results] == [3.0] * 5
    exp_avg = float(engine.buckets[0].states[0]["exp_avg"][0])
    assert exp_avg == pytest.approx(3 * (1 - 0.9**5), rel=1e-6)  # it, too, has seen 3 at every step


def test_a_scale_changed_between_backward_and_step_does_not_reach_this_step():
    engine = _linear_engine(DynamicLossScale(8.0))
    engine.backward(engine())
    engine.loss_scale.loss_scale.mul_(2)
    assert float(engine.step().grad_norm) == 3.0


def test_a_rule_without_a_floor_does_not_turn_weights_into_nan():
    engine = _linear_engine(TorchLossScale())
    engine.loss_scale.loss_scale.zero_()  # torch's rule ends there after enough overflows
    engine.backward(engine())
    result = engine.step()
    assert (float(result.loss_scale), float(result.grad_norm)) == (2.0**-126, 0.0)
    assert float(engine.buckets[0].master[0]) == 4.0


def _random_run(rng, events):
    """Return a GradScaler's settings and random events: mostly clean steps, a mixture, or an overflow in each step."""
    settings = {
        "init_scale": 2.0 ** rng.randint(-126, 126),
        "growth_factor": rng.choice([2.0, 4.0]),
        "backoff_factor": rng.choice([0.5, 0.25]),
        "growth_interval": rng.choice([1, 2, 3, 7, 50]),
    }
    share = rng.choice([0.0, 0.01, 0.2, 0.5, 1.0])
    return settings, "".join("x" if rng.random() < share else "." for _ in range(events))


def _torch_after(settings, events):
    scale, growth_tracker = torch.tensor([settings["init_scale"]]), torch.zeros(1, dtype=torch.int32)
    factors = (settings["growth_factor"], settings["backoff_factor"], settings["growth_interval"])
    scales = []
    for event in events:
        torch._amp_update_scale_(scale, growth_tracker, torch.tensor([float(event == "x")]), *factors)
        scales.append(scale.item())
    return scales


def test_torch_s_rule_is_torch_s_own_over_10_000_random_events():
    rng = random.Random(0)
    seen = set()
    for _ in range(50):
        settings, events = _random_run(rng, 200)
        want = _torch_after(settings, events)
        assert _after(TorchLossScale(**settings), events) == want, (settings, events)
        seen.update(want)
    assert {0.0, 2.0**-149, 2.0**127} <= seen  # the ends of FP32: decay to nothing, and growth refused at inf


def test_torch_s_defaults_are_the_grad_scaler_s():
    theirs = inspect.signature(torch.amp.GradScaler.__init__).parameters
    ours = inspect.signature(TorchLossScale.__init__).parameters
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval"):
        assert ours[name].default == theirs[name].default


# First scale 8, window 3, hysteresis 2, floor 2. A row: other settings, events, scale after each, the rule that it
# shows. Megatron-LM, megatron/core/optimizer/grad_scaler.py at 00caa53, DynamicGradScaler.update:
# - found_inf: _growth_tracker = 0, _hysteresis_tracker -= 1; at <= 0: scale = max(scale * backoff_factor, min_scale);
# - otherwise: _growth_tracker += 1; at == growth_interval: _growth_tracker = 0, _hysteresis_tracker = hysteresis,
#   scale *= growth_factor.
MEGATRON = [
    ({}, "......", [8, 8, 16, 16, 16, 32], "growth_interval clean steps, then the count begins anew"),
    ({}, "...xx", [8, 8, 16, 16, 8], "growth refills the tracker: a growth that overflows is kept"),
    ({}, "..x...", [8, 8, 8, 8, 8, 16], "an overflow restarts the count though the scale has stayed"),
    ({}, "xx...x", [8, 4, 4, 4, 8, 8], "growth refills a tracker that was spent"),
    ({}, "xxxxx", [8, 4, 2, 2, 2], "the second backs off (tracker 0), all after it, too (-1); the floor holds"),
    ({}, "xx.x.x...", [8, 4, 4, 2, 2, 2, 2, 2, 4], "spent, it backs off at each overflow until the scale grows"),
    ({"hysteresis": 1}, "x.x", [4, 4, 2], "with hysteresis 1 each overflow backs off"),
    ({"hysteresis": 3}, "xxx.x", [8, 8, 4, 4, 2], "with hysteresis 3 the third does, and all after it"),
]

# DeepSpeed, deepspeed/runtime/fp16/loss_scaler.py at 18fd4c9, DynamicLossScaler.update_scale:
# - overflow: if delayed_shift == 1 or cur_hysteresis == 1: scale = max(scale / 2, min_scale), or an exception where it
#   is min_scale already; else cur_hysteresis -= 1; last_overflow_iter = cur_iter;
# - otherwise: with consecutive_hysteresis, cur_hysteresis = delayed_shift; stable_interval = cur_iter -
#   last_overflow_iter - 1; if positive and a multiple of scale_window: cur_hysteresis = delayed_shift, scale *= 2;
# - cur_iter starts at 0 and last_overflow_iter at -1.
DEEPSPEED = [
    ({}, "x.x", [8, 8, 4], "a clean step does not refill it"),
    ({}, ".......", [8, 8, 8, 16, 16, 16, 32], "stable_interval begins at 0: growth at the fourth and the seventh"),
    ({}, "....xx", [8, 8, 8, 16, 16, 8], "growth refills cur_hysteresis: a growth that overflows is kept"),
    ({}, "...x....", [8, 8, 8, 8, 8, 8, 8, 16], "an overflow moves last_overflow_iter though the scale has stayed"),
    ({}, "xx....x", [8, 4, 4, 4, 4, 8, 8], "growth refills a cur_hysteresis that was spent"),
    ({}, "xxxxx", [8, 4, 2, 2, 2], "the floor; DeepSpeed's own run ends here, at the fourth overflow"),
    ({"hysteresis": 1}, "x.x", [4, 4, 2], "with delayed_shift 1 each overflow backs off"),
    ({"consecutive_hysteresis": True}, ".x.xx....x", [8, 8, 8, 8, 4, 4, 4, 4, 8, 8], "a clean step refills it"),
]


RULES = [(MegatronLossScale, *row) for row in MEGATRON] + [(DeepSpeedLossScale, *row) for row in DEEPSPEED]


@pytest.mark.parametrize(("rule", "settings", "events", "want", "why"), RULES)
def test_megatron_s_and_deepspeed_s_rules(rule, settings, events, want, why):
    scale = rule(**({"init_scale": 8.0, "growth_interval": 3, "min_scale": 2.0} | settings))
    assert _after(scale, events) == want, why


# Megatron-LM: --initial-loss-scale, --loss-scale-window, --hysteresis, --min-loss-scale in
# megatron/core/optimizer/optimizer_config.py at e914fb7. DeepSpeed: initial_scale_power, loss_scale_window, hysteresis,
# min_loss_scale and consecutive_hysteresis in deepspeed/runtime/precision_config.py at 0ac4684.
def test_deepspeed_s_growth_falls_on_multiples_of_the_window_since_the_last_overflow():
    rng = random.Random(1)
    events = "".join("x" if rng.random() < 0.2 else "." for _ in range(500))
    scales = [2.0**60, *_after(DeepSpeedLossScale(2.0**60, growth_interval=3), events)]
    last_overflow = -1
    for step, event in enumerate(events):
        stable = step - last_overflow - 1
        last_overflow = step if event == "x" else last_overflow
        assert (scales[step + 1] > scales[step]) == (event == "." and stable > 0 and stable % 3 == 0)


@pytest.mark.parametrize(("scale", "init_scale"), [(MegatronLossScale(), 2.0**32), (DeepSpeedLossScale(), 2.0**16)])
def test_defaults_are_the_source_s(scale, init_scale):
    assert float(scale.loss_scale) == init_scale
    assert (scale.growth_interval, scale.hysteresis, scale.min_scale) == (1000, 2, 1.0)
    assert (scale.growth_factor, scale.backoff_factor) == (2.0, 0.5)
    assert not getattr(scale, "consecutive_hysteresis", False)


@pytest.mark.parametrize("rule", [TorchLossScale, MegatronLossScale, DeepSpeedLossScale])
def test_no_rule_grows_to_inf(rule):
    assert _after(rule(2.0**126, growth_interval=1), "......")[-1] == 2.0**127


@pytest.mark.parametrize(
    "rule", [TorchLossScale, MegatronLossScale, DeepSpeedLossScale, partial(DynamicLossScale, hysteresis=2)]
)
@pytest.mark.parametrize("cut", [1, 3, 4, 6, 7, 10])
def test_a_restored_rule_goes_on_as_if_never_stopped(rule, cut):
    events = ".x..xx....x...x."
    whole = _after(rule(8.0, growth_interval=3), events)
    first, second = rule(8.0, growth_interval=3), rule(64.0, growth_interval=3)
    before = _after(first, events[:cut])
    second.load_state_dict(first.state_dict())
    assert before + _after(second, events[cut:]) == whole


@pytest.mark.parametrize("rule", [TorchLossScale, MegatronLossScale, DeepSpeedLossScale, DynamicLossScale])
def test_a_rule_that_goes_on_with_a_shorter_interval_grows_at_once(rule):
    first, second = rule(8.0, growth_interval=9), rule(8.0, growth_interval=3)
    _after(first, "......")
    second.load_state_dict(first.state_dict())
    assert _after(second, ".") == [16]


@pytest.mark.parametrize("rule", [MegatronLossScale, DeepSpeedLossScale, DynamicLossScale])
def test_a_rule_that_goes_on_with_less_hysteresis_is_no_more_patient(rule):
    first, second = rule(8.0, growth_interval=2, hysteresis=5), rule(8.0, growth_interval=2, hysteresis=1)
    _after(first, "......")
    second.load_state_dict(first.state_dict())
    before = float(second.loss_scale)
    assert _after(second, "x") == [before / 2]
