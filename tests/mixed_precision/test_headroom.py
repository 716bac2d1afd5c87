"""The headroom scale keeps its margin, learns from overflow and forgets; a probe sets the scale and nothing else; all
ranks choose one scale.
"""

import math
import random

import pytest
import torch

from megamix import DynamicLossScale, HeadroomLossScale, Precision, Sharding
from megamix.mixed_precision.headroom import FP16_MAX
from tests.builders import loss_of, make_batch, make_engine

NAN = float("nan")


def _step_(scale, peak):
    """Take one step whose largest gradient, without the scale, is `peak` (NaN: a batch that no scale cures); return the
    new scale.
    """
    max_abs = torch.tensor(peak * float(scale.loss_scale), dtype=torch.float64)
    found_inf = ~(max_abs <= FP16_MAX)
    scale.update_(found_inf, torch.where(found_inf, float("inf") * max_abs, max_abs), scale.loss_scale.clone())
    return float(scale.loss_scale)


def _after(scale, peaks):
    return [_step_(scale, peak) for peak in peaks]


ONE = FP16_MAX / 2**10  # the largest gradient for which 2**10 leaves no room: with margin 4 it calls for 2**8

# First scale 1, margin 4, window 3, floor 1, ceiling 2**20. Peaks in units of ONE, and the exponent of the scale after
# each.
STORIES = [
    ([1], [8]),
    ([1.01], [7]),  # rounded down to a power of two, so that the margin is never less than 4
    ([1, 2, 4, 8], [8, 7, 6, 5]),
    ([1, 2**-9, 2**-9, 2**-9], [8, 8, 8, 17]),  # a peak outside the window is forgotten; up by any power of two
    ([1, 1, 3.9], [8, 8, 6]),  # within the margin: down in the same step
    ([1, 5, 1, 1, 1], [8, 7, 7, 7, 8]),  # beyond it: an overflow halves, for as long as the window
    ([1, 30, 30, 30, 30], [8, 7, 6, 5, 3]),  # ... and again, until the gradient is seen
    ([1, NAN, 1, 1, 1, NAN, 1, 1, 1], [8, 7, 7, 7, 8, 7, 7, 7, 8]),  # rare NaNs do not add up
    ([1, *[NAN] * 10, 1, 1, 1], [8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0, 8]),  # the floor, and back in one window
    ([0, 0, 1], [1, 2, 8]),  # nothing known: all gradients may have vanished
    ([1, 0, 0, 1], [8, 8, 8, 8]),
    ([1, 0, 0, 0, 0, 1], [8, 8, 8, 9, 10, 8]),
    ([2**-30, 2**-30], [20, 20]),  # the ceiling
    ([2**-30, 0, 0, 0], [20, 20, 20, 20]),
]


@pytest.mark.parametrize(("peaks", "want"), STORIES)
def test_the_scale_follows_the_table(peaks, want):
    scale = HeadroomLossScale(window=3, max_scale=2.0**20)
    assert [math.log2(value) for value in _after(scale, [peak * ONE for peak in peaks])] == want


@pytest.mark.parametrize("margin", [2.0, 4.0, 16.0])
def test_the_margin_is_kept_over_the_window_and_never_doubled(margin):
    rng = random.Random(0)
    scale = HeadroomLossScale(2.0**-60, margin=margin, window=5, min_scale=2.0**-60, max_scale=2.0**60)
    peaks = []
    for _ in range(300):
        peaks.append(2.0 ** rng.uniform(-40, math.log2(FP16_MAX / float(scale.loss_scale))))  # no overflow
        room = FP16_MAX / _step_(scale, peaks[-1]) / max(peaks[-5:])
        assert margin <= room < 2 * margin


def test_a_scale_that_was_set_by_hand_does_not_distort_what_was_measured():
    scale = HeadroomLossScale()
    scale.loss_scale.fill_(2.0**30)  # after backward: the gradient carries the 2**4 that backward used
    scale.update_(torch.tensor(False), torch.tensor(ONE * 2**4, dtype=torch.float64), torch.tensor(2.0**4))
    assert float(scale.loss_scale) == 2.0**8
    scale.loss_scale.fill_(2.0**30)
    scale.update_(torch.tensor(True), torch.tensor(NAN, dtype=torch.float64), torch.tensor(2.0**6))
    assert float(scale.loss_scale) == 2.0**5


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_restored_scale_goes_on_as_if_never_stopped(cut):
    peaks = [ONE * factor for factor in (1, 3, 9, 0.1, NAN, 0.1, 0.1, 0.1, 1, 0.2)]
    whole = _after(HeadroomLossScale(window=4), peaks)
    first, second = HeadroomLossScale(window=4), HeadroomLossScale(window=4)
    before = _after(first, peaks[:cut])
    second.load_state_dict(first.state_dict())
    assert not second.wants_probe
    assert before + _after(second, peaks[cut:]) == whole


WRONG = [
    ({"init_scale": 3.0}, "init_scale .* must be a power of two"),
    ({"init_scale": 0.5}, "init_scale 0.5 must lie between min_scale 1"),
    ({"margin": 3.0}, "margin .* must be a power of two"),
    ({"margin": 1.0}, "margin .* must be at least 2, got 1.0; leave it out for 4.0"),
    ({"window": 0}, "window .* must be at least 1, got 0; leave it out for 1000"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        HeadroomLossScale(**settings)


def _engine(scale, model=None, **settings):
    precision = Precision(torch.float16, loss_scale=scale)
    return make_engine(model, None, precision, Sharding(bucket_size=1500), **settings)


def _backward(engine, step, times=1.0):
    for micro_batch in range(engine.grad_accum_steps):
        batch = make_batch(step, engine.topology.dp.rank, micro_batch)
        engine.backward(loss_of(engine.module, batch) * times)


def _probed_against_not_probed():
    """Return (margin of the first step, difference of norms, scales, masters equal) for two engines, of which only one
    begins with a probe. That engine's first step takes the same batch.
    """
    probed = _engine(HeadroomLossScale(), grad_accum_steps=2)
    assert probed.loss_scale.wants_probe
    _backward(probed, 0)
    probed.probe_loss_scale()
    assert not probed.loss_scale.wants_probe
    plain = _engine(HeadroomLossScale(float(probed.loss_scale.loss_scale)), grad_accum_steps=2)
    scales = []
    for step in range(4):
        for engine in (probed, plain):
            _backward(engine, step)
        result, other = probed.step(), plain.step()
        if step == 0:
            room, difference = FP16_MAX / float(result.max_abs), abs(float(result.grad_norm - other.grad_norm))
        scales.append(float(result.loss_scale))
    equal = all(torch.equal(one.master, other.master) for one, other in zip(probed.buckets, plain.buckets, strict=True))
    return room, difference, scales, equal and int(probed.applied_updates) == 4


def test_a_probe_finds_the_first_scale_and_changes_nothing_else():
    room, difference, scales, equal = _probed_against_not_probed()
    # The probe at scale 1 sees the largest gradient to FP16's own precision, hence the allowance of 1 %.
    assert 4 * 0.99 < room < 8 * 1.01
    assert (difference, equal) == (0.0, True)
    assert min(scales) > 2.0**10


def test_all_ranks_choose_one_scale(run_ranks):
    first, second = run_ranks(_probed_against_not_probed, 2)
    assert first == second
    assert first[3]


def test_a_probe_that_overflows_halves_the_scale():
    engine = _engine(HeadroomLossScale(2.0**10))
    _backward(engine, 0, times=1e6)
    engine.probe_loss_scale()
    assert float(engine.loss_scale.loss_scale) == 2.0**9
    assert (int(engine.applied_updates), int(engine.skipped_steps)) == (0, 0)


def test_a_step_is_measured_by_the_scale_that_its_backward_used():
    scales = []
    for factor in (1.0, 2.0**9):
        engine = _engine(HeadroomLossScale())
        _backward(engine, 0)
        engine.loss_scale.loss_scale.mul_(factor)
        engine.step()
        scales.append(float(engine.loss_scale.loss_scale))
    assert scales[0] == scales[1]


def test_a_search_may_begin_with_probes_too():
    engine = _engine(DynamicLossScale(2.0**30))
    assert not engine.loss_scale.wants_probe
    for _ in range(20):
        _backward(engine, 0)
        engine.probe_loss_scale()
    _backward(engine, 0)
    assert not engine.step().found_inf


def test_a_probe_needs_the_step_s_micro_batches():
    engine = _engine(HeadroomLossScale(), grad_accum_steps=2)
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)))
    with pytest.raises(RuntimeError, match=r"probe_loss_scale\(\) needs 2 backward\(\) calls .* got 1"):
        engine.probe_loss_scale()
