"""The loss-scale rules of torch, Megatron-LM and DeepSpeed are followed event for event, each with its source.

x is a step that overflowed, . a clean one.
"""

import inspect
import random

import pytest
import torch

from megamix import DeepSpeedLossScale, DynamicLossScale, MegatronLossScale, TorchLossScale


def _after(scale, events):
    """Return the scale after each event."""
    scales = []
    for event in events:
        scale.update_(torch.tensor(event == "x"), torch.tensor(1.0), scale.loss_scale)
        scales.append(float(scale.loss_scale))
    return scales


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
    ({}, "x", [8], "the first overflow only takes from the tracker"),
    ({}, "xxx", [8, 4, 2], "the second backs off (tracker 0), and so does the third (tracker -1)"),
    ({}, "x.x", [8, 8, 4], "a clean step does not refill the tracker"),
    ({}, "......", [8, 8, 16, 16, 16, 32], "growth_interval clean steps, then the count begins anew"),
    ({}, "...x", [8, 8, 16, 16], "growth refills the tracker: a growth that overflows is kept"),
    ({}, "...xx", [8, 8, 16, 16, 8], "... and backs off at the second overflow"),
    ({}, "..x...", [8, 8, 8, 8, 8, 16], "an overflow restarts the count though the scale has stayed"),
    ({}, "xx...x", [8, 4, 4, 4, 8, 8], "growth refills a tracker that was spent"),
    ({}, "xxxxx", [8, 4, 2, 2, 2], "the floor holds without an error"),
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
    ({}, "x", [8], "the first overflow only takes from cur_hysteresis"),
    ({}, "xxx", [8, 4, 2], "at cur_hysteresis 1 each overflow backs off"),
    ({}, "x.x", [8, 8, 4], "a clean step does not refill it"),
    ({}, "...", [8, 8, 8], "the first clean step is stable_interval 0: three make 2, no growth yet"),
    ({}, ".......", [8, 8, 8, 16, 16, 16, 32], "stable_interval 3 and 6: growth at the fourth and the seventh"),
    ({}, "....x", [8, 8, 8, 16, 16], "growth refills cur_hysteresis: a growth that overflows is kept"),
    ({}, "....xx", [8, 8, 8, 16, 16, 8], "... and backs off at the second overflow"),
    ({}, "...x....", [8, 8, 8, 8, 8, 8, 8, 16], "an overflow moves last_overflow_iter though the scale has stayed"),
    ({}, "xx....x", [8, 4, 4, 4, 4, 8, 8], "growth refills a cur_hysteresis that was spent"),
    ({}, "xxxxx", [8, 4, 2, 2, 2], "the floor; DeepSpeed's own run ends here, at the fourth overflow"),
    ({"hysteresis": 1}, "x.x", [4, 4, 2], "with delayed_shift 1 each overflow backs off"),
    (
        {"consecutive_hysteresis": True},
        ".x.xx....x",
        [8, 8, 8, 8, 4, 4, 4, 4, 8, 8],
        "consecutive_hysteresis: a clean step refills it",
    ),
]


@pytest.mark.parametrize(("settings", "events", "want", "rule"), MEGATRON)
def test_megatron_s_rule(settings, events, want, rule):
    scale = MegatronLossScale(**({"init_scale": 8.0, "growth_interval": 3, "min_scale": 2.0} | settings))
    assert _after(scale, events) == want, rule


@pytest.mark.parametrize(("settings", "events", "want", "rule"), DEEPSPEED)
def test_deepspeed_s_rule(settings, events, want, rule):
    scale = DeepSpeedLossScale(**({"init_scale": 8.0, "growth_interval": 3, "min_scale": 2.0} | settings))
    assert _after(scale, events) == want, rule


def test_deepspeed_s_growth_falls_on_multiples_of_the_window_since_the_last_overflow():
    rng = random.Random(1)
    events = "".join("x" if rng.random() < 0.2 else "." for _ in range(500))
    scales = [2.0**60, *_after(DeepSpeedLossScale(2.0**60, growth_interval=3), events)]
    last_overflow = -1
    for step, event in enumerate(events):
        stable = step - last_overflow - 1
        last_overflow = step if event == "x" else last_overflow
        assert (scales[step + 1] > scales[step]) == (event == "." and stable > 0 and stable % 3 == 0)


# Megatron-LM: --initial-loss-scale, --loss-scale-window, --hysteresis, --min-loss-scale in
# megatron/core/optimizer/optimizer_config.py at e914fb7. DeepSpeed: initial_scale_power, loss_scale_window, hysteresis,
# min_loss_scale and consecutive_hysteresis in deepspeed/runtime/precision_config.py at 0ac4684.
@pytest.mark.parametrize(
    ("scale", "init_scale", "growth_interval", "hysteresis", "min_scale"),
    [(MegatronLossScale(), 2.0**32, 1000, 2, 1.0), (DeepSpeedLossScale(), 2.0**16, 1000, 2, 1.0)],
)
def test_defaults_are_the_source_s(scale, init_scale, growth_interval, hysteresis, min_scale):
    assert float(scale.loss_scale) == init_scale
    assert (scale.growth_interval, scale.hysteresis, scale.min_scale) == (growth_interval, hysteresis, min_scale)
    assert (scale.growth_factor, scale.backoff_factor) == (2.0, 0.5)
    assert not getattr(scale, "consecutive_hysteresis", False)


@pytest.mark.parametrize("rule", [TorchLossScale, MegatronLossScale, DeepSpeedLossScale])
def test_no_rule_grows_to_inf(rule):
    assert _after(rule(2.0**126, growth_interval=1), "......")[-1] == 2.0**127


@pytest.mark.parametrize("rule", [TorchLossScale, MegatronLossScale, DeepSpeedLossScale])
@pytest.mark.parametrize("cut", [1, 4, 7, 10])
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
