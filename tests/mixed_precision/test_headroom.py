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
    ([1.01], [7]),  # rounded down to a power of two, so that the margin is never less than 4
    ([1, 2, 4, 8], [8, 7, 6, 5]),
    ([1, 2**-9, 2**-9, 2**-9], [8, 8, 8, 17]),  # a peak outside the window is forgotten; up by any power of two
    ([1, 1, 3.9], [8, 8, 6]),  # within the margin: down in the same step
    ([1, 5, 1, 1, 1], [8, 7, 7, 7, 8]),  # beyond it: an overflow halves, for as long as the window
    ([1, 30, 30, 30, 30], [8, 7, 6, 5, 3]),  # ... and again, until the gradient is seen
    ([1, NAN, 1, 1, 1, NAN, 1, 1, 1], [8, 7, 7, 7, 8, 7, 7, 7, 8]),  # rare NaNs do not add up
    ([1, *[NAN] * 10, 1, 1, 1], [8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0, 8]),  # the floor, and back in one window
    ([0, 0, 1], [1, 2, 8]),  # nothing known: all gradients may have vanished
    ([1, 0, 0, 0, 0, 1], [8, 8, 8, 9, 10, 8]),
    ([2**-30, 0, 0, 0], [20, 20, 20, 20]),  # the ceiling
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


@pytest.mark.parametrize("cut", [1, 2, 4, 7])
def test_a_restored_scale_goes_on_as_if_never_stopped(cut):
    peaks = [ONE * factor for factor in (1, 3, 9, 0.1, NAN, 0.1, 0.1, 0.1, 1, 0.2)]
    whole = _after(HeadroomLossScale(window=4), peaks)
    first, second = HeadroomLossScale(window=4), HeadroomLossScale(window=4)
    before = _after(first, peaks[:cut])
    second.load_state_dict(first.state_dict())
    assert not second.wants_probe
    assert before + _after(second, peaks[cut:]) == whole


def _engine(scale, **settings):
    return make_engine(None, None, Precision(torch.float16, loss_scale=scale), Sharding(bucket_size=1500), **settings)


def _backward(engine, step, times=1.0):
    for micro_batch in range(engine.grad_accum_steps):
        batch = make_batch(step, engine.topology.dp.rank, micro_batch)
        engine.backward(loss_of(engine.module, batch) * times)


def _probed_against_not_probed():
    """Return the margin of the first step, and the scales, of an engine that begins with a probe on the first step's
    batch; otherwise it trains as one that begins with the scale that the probe has found.
    """
    probed = _engine(HeadroomLossScale(), grad_accum_steps=2)
    assert probed.loss_scale.wants_probe
    _backward(probed, 0)
    probed.probe_loss_scale()
    assert not probed.loss_scale.wants_probe
    plain = _engine(HeadroomLossScale(float(probed.loss_scale.loss_scale)), grad_accum_steps=2)
    results = []
    for step in range(4):
        for engine in (probed, plain):
            _backward(engine, step)
        results.append(probed.step())
        assert results[-1].grad_norm == plain.step().grad_norm
    assert all(map(torch.equal, probed.full_weights().values(), plain.full_weights().values()))
    assert int(probed.applied_updates) == 4
    return FP16_MAX / float(results[0].max_abs), [float(result.loss_scale) for result in results]


@pytest.mark.parametrize("size", [1, 2])
def test_a_probe_finds_the_first_scale_on_all_ranks_and_changes_nothing_else(run_ranks, size):
    for room, scales in (ranks := run_ranks(_probed_against_not_probed, size)):
        # The probe at scale 1 sees the largest gradient to FP16's own precision, hence the allowance of 1 %.
        assert 4 * 0.99 < room < 8 * 1.01
        assert min(scales) > 2.0**10
        assert (room, scales) == ranks[0]


@pytest.mark.parametrize("times", [1.0, float("inf")])
def test_a_step_is_measured_by_the_scale_that_its_backward_used(times):
    scales = []
    for factor in (1.0, 2.0**9):
        engine = _engine(HeadroomLossScale())
        _backward(engine, 0, times)
        engine.loss_scale.loss_scale.mul_(factor)
        engine.step()
        scales.append(float(engine.loss_scale.loss_scale))
    assert scales[0] == scales[1]


def test_a_search_may_begin_with_probes_of_which_each_that_overflows_halves_the_scale():
    engine = _engine(DynamicLossScale(2.0**30))
    assert not engine.loss_scale.wants_probe
    for _ in range(20):
        _backward(engine, 0)
        engine.probe_loss_scale()
    assert (int(engine.applied_updates), int(engine.skipped_steps)) == (0, 0)
    _backward(engine, 0)
    assert not engine.step().found_inf
