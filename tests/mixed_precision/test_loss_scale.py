"""The loss scale follows its table and stays a power of two; a step divides by the scale that backward used; a skipped
step advances neither learning rate nor bias correction.
"""

import pytest
import torch
from torch import nn

from megamix import AdamW, DynamicLossScale, Precision, ShardedEngine, StaticLossScale, TorchLossScale


def _after(scale, events):
    """Return the scale after each event: x is an overflow, . a clean step."""
    scales = []
    for event in events:
        scale.update_(torch.tensor(event == "x"), torch.tensor(1.0), scale.loss_scale)
        scales.append(float(scale.loss_scale))
    return scales


# Growth interval 3, first scale 8, floor 2, ceiling 64.
STORIES = [
    (1, "x", [4]),
    (1, "...", [8, 8, 16]),
    (1, "..x...", [8, 8, 4, 4, 4, 8]),  # an overflow restarts the count of clean steps
    (1, "...x", [8, 8, 16, 8]),  # a growth probe that overflows backs off at once
    (1, "xxxx", [4, 2, 2, 2]),  # the floor
    (1, "............", [8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64]),  # the ceiling
    (2, "xx", [4, 2]),  # a scale that never worked is not guarded: the first search loses one step per halving
    (2, ".xx", [8, 8, 4]),  # a proven scale survives one overflow
    (2, ".x.x.xx", [8, 8, 8, 8, 8, 8, 4]),  # a clean step forgives
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


@pytest.mark.parametrize("cut", range(8))
def test_a_restored_scale_goes_on_as_if_never_stopped(cut):
    events = ".x..xx....x."
    settings = {"growth_interval": 3, "hysteresis": 2}
    whole = _after(DynamicLossScale(8.0, **settings), events)
    first, second = DynamicLossScale(8.0, **settings), DynamicLossScale(64.0, **settings)
    before = _after(first, events[:cut])
    second.load_state_dict(first.state_dict())
    assert before + _after(second, events[cut:]) == whole


def test_a_static_scale_never_moves():
    scale = StaticLossScale(128.0)
    scale.update_(torch.tensor(True), torch.tensor(1.0), scale.loss_scale)
    restored = StaticLossScale(2.0)
    restored.load_state_dict(scale.state_dict())
    assert (float(scale.loss_scale), float(restored.loss_scale)) == (128.0, 2.0)


WRONG = [
    ({"init_scale": 3.0}, "init_scale of DynamicLossScale must be a power of two .* got 3.0; leave it out for 1677"),
    ({"init_scale": 0.0}, "init_scale .* must be greater than 0"),
    ({"init_scale": float("inf")}, "init_scale .* must be finite"),
    ({"growth_factor": 1.5}, "growth_factor .* must be a power of two"),
    ({"growth_factor": 0.5}, "growth_factor .* must be greater than 1, got 0.5"),
    ({"backoff_factor": 2.0}, "backoff_factor .* must be less than 1, got 2.0"),
    ({"growth_interval": 0}, "growth_interval .* must be at least 1, got 0"),
    ({"growth_interval": 2**31}, r"growth_interval .* must be at most 1e\+09, got 2147483648"),  # torch: 0 >= 2**31
    ({"hysteresis": 0}, "hysteresis .* must be at least 1"),
    ({"init_scale": 2.0, "min_scale": 4.0}, "init_scale 2 must lie between min_scale 4"),
    ({"max_scale": 7.0}, "max_scale must be a power of two"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**settings)


def _linear_engine(scale, lr=1.0):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 4.0)
    optimizer = AdamW(lr=lr, weight_decay=0.0, eps=1e-30)
    return ShardedEngine(model, optimizer, Precision(torch.float16, loss_scale=scale), compile_update=False), model


def test_a_growing_step_is_unscaled_with_the_scale_that_backward_used():
    engine, model = _linear_engine(DynamicLossScale(8.0, growth_interval=2))
    norms, scales = [], []
    for _ in range(5):
        engine.backward(3.0 * model(torch.ones(1, 1, dtype=torch.float16)))  # d loss / d weight = 3 at every weight
        result = engine.step()
        norms.append(float(result.grad_norm))
        scales.append(float(result.loss_scale))
    assert scales == [8, 8, 16, 16, 32]
    assert norms == [3.0] * 5
    # exp_avg must also have seen 3 at every step: 3 * (1 - 0.9**5).
    exp_avg = float(engine.buckets[0].states[0]["exp_avg"][0])
    assert exp_avg == pytest.approx(3 * (1 - 0.9**5), rel=1e-6)


def test_a_scale_changed_between_backward_and_step_does_not_reach_this_step():
    engine, model = _linear_engine(DynamicLossScale(8.0))
    engine.backward(3.0 * model(torch.ones(1, 1, dtype=torch.float16)))
    engine.loss_scale.loss_scale.mul_(2)
    assert float(engine.step().grad_norm) == 3.0


def test_a_rule_without_a_floor_does_not_turn_weights_into_nan():
    engine, model = _linear_engine(TorchLossScale())
    engine.loss_scale.loss_scale.zero_()  # torch's rule ends there after enough overflows
    engine.backward(3.0 * model(torch.ones(1, 1, dtype=torch.float16)))
    result = engine.step()
    assert (float(result.loss_scale), float(result.grad_norm)) == (2.0**-126, 0.0)
    assert float(engine.buckets[0].master[0]) == 4.0


def test_a_skipped_step_advances_neither_lr_nor_bias_correction():
    def run(events):
        engine, model = _linear_engine(StaticLossScale(8.0), lr=[0.5, 0.25, 0.125])
        lrs = []
        for event in events:
            value = float("inf") if event == "x" else 3.0
            engine.backward(value * model(torch.ones(1, 1, dtype=torch.float16)))
            lrs.append(float(engine.step().lr))
        return lrs, engine.buckets[0].master, int(engine.applied_updates), int(engine.skipped_steps)

    clean, skipping = run("...."), run("x.xx..x.")
    assert clean[0] == [0.5, 0.25, 0.125, 0.125]  # past the end of the table its last entry holds
    assert skipping[0] == [0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125]
    assert torch.equal(clean[1], skipping[1])
    assert (clean[2:], skipping[2:]) == ((4, 0), (4, 4))
