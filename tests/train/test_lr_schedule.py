"""The learning rate follows its equation."""

import math
import re

import pytest

from megamix.config.optimizers import OptimizerConfig
from megamix.config.sections import LrScheduleConfig
from megamix.train.objects import lr_table
from tests.builders import pace_of

STYLES = ["cosine", "linear", "wsd", "inverse_sqrt", "constant"]


def table(decay_style, warmup_steps, decay_steps, steps, min_lr):
    optimizer = OptimizerConfig.model_construct(lr=1.0, min_lr=min_lr)  # unchecked, because min_lr may be wrong
    schedule = LrScheduleConfig.model_construct(
        decay_style=decay_style, warmup_steps=warmup_steps, decay_steps=decay_steps
    )
    return lr_table(schedule, optimizer, pace_of(steps))


HALF_ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("decay_style", "warmup_steps", "decay_steps", "min_lr", "want"),
    [
        ("constant", 4, None, 0.5, [0.25, 0.5, 0.75, 1, 1]),
        ("linear", 2, None, 0.5, [0.5, 1, 1, 0.875, 0.75, 0.625]),
        ("linear", 0, 2, 0.5, [1, 0.75, 0.5, 0.5, 0.5]),  # past the decay: min_lr
        ("cosine", 0, None, 0.0, [1, 0.5 + HALF_ROOT / 2, 0.5, 0.5 - HALF_ROOT / 2]),
        ("cosine", 1, 2, 0.5, [1, 1, 0.75, 0.5, 0.5]),
        ("wsd", 2, 2, 0.0, [0.5, 1, 1, 1, 1, 1, 0.5]),
        ("wsd", 2, None, 0.0, [0.5, 1, 1, 0.5]),
        ("inverse_sqrt", 2, None, 0.0, [0.5, 1, math.sqrt(2 / 3), math.sqrt(2 / 4)]),
        ("inverse_sqrt", 1, 2, 0.6, [1, math.sqrt(1 / 2), 0.6, 0.6]),  # min_lr is the floor
    ],
)
def test_lr_follows_the_equation(decay_style, warmup_steps, decay_steps, min_lr, want):
    assert table(decay_style, warmup_steps, decay_steps, len(want), min_lr) == pytest.approx(want, rel=1e-15)


@pytest.mark.parametrize("decay_style", STYLES)
@pytest.mark.parametrize("warmup_steps", [0, 7, 100])
def test_no_update_is_spent_on_nothing_and_none_exceeds_the_peak(decay_style, warmup_steps):
    lrs = table(decay_style, warmup_steps, None, 100, 0.0)
    assert len(lrs) == 100
    assert all(0 < lr <= 1 for lr in lrs)
    assert lrs[0] == 1 / max(1, warmup_steps)
    assert max(lrs) == 1


@pytest.mark.parametrize("decay_style", STYLES)
def test_lr_rises_through_the_warm_up_and_never_after_it(decay_style):
    lrs = table(decay_style, 10, 40, 100, 0.1)
    assert lrs[:10] == sorted(lrs[:10])
    assert lrs[9:] == sorted(lrs[9:], reverse=True)
    assert min(lrs[10:]) >= 0.1


@pytest.mark.parametrize(("warmup_steps", "decay_steps", "min_lr"), [(5, 6, 0.0), (0, 0, 0.0), (0, None, 2.0)])
def test_what_cannot_be_is_refused_with_every_number(warmup_steps, decay_steps, min_lr):
    numbers = f"lr 1.0, steps 10, warmup_steps {warmup_steps}, decay_steps {decay_steps}, min_lr {min_lr}: give 0 <="
    with pytest.raises(ValueError, match=re.escape(numbers)):
        table("linear", warmup_steps, decay_steps, 10, min_lr)
