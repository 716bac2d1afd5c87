"""`megamix.schedules` gives the learning rates of jobs, which after a resume continue from their place, and skipped
steps do not advance them.
"""

import pytest
import torch

from megamix import AdamW, Checkpoints, DynamicLossScale, Precision, schedules
from megamix.builders.objects import lr_table
from megamix.config.optimizers import OptimizerConfig
from megamix.config.sections import Config, LrScheduleConfig, TrainingConfig
from tests.builders import loss_of, make_batch, make_engine

RATES = {
    "cosine": schedules.cosine(3e-3, 30, warmup_steps=4, decay_steps=20, min_lr=1e-4),
    "linear": schedules.linear(3e-3, 30, warmup_steps=4, decay_steps=20, min_lr=1e-4),
    "wsd": schedules.wsd(3e-3, 30, decay_steps=20, warmup_steps=4, min_lr=1e-4),
    "inverse_sqrt": schedules.inverse_sqrt(3e-3, 30, warmup_steps=4, min_lr=1e-4),
    "constant": schedules.constant(3e-3, 30, warmup_steps=4),
}


@pytest.mark.parametrize("style", RATES)
def test_a_program_has_the_rates_of_a_job(style):
    config = Config.model_construct(
        optimizer=OptimizerConfig.model_construct(lr=3e-3, min_lr=1e-4),
        lr_schedule=LrScheduleConfig(decay_style=style, warmup_steps=4, decay_steps=20),
        training=TrainingConfig.model_construct(steps=30),
    )
    assert RATES[style] == lr_table(config)
    assert len({*RATES[style]}) >= 4


def _engine(lr):
    precision = Precision(torch.float16, loss_scale=DynamicLossScale(2.0**10))
    return make_engine(None, AdamW(lr=lr), precision)


def _train(engine, steps):
    """Return the learning rates of a run whose step 2 overflows."""
    rates = []
    for step in steps:
        engine.backward(loss_of(engine.module, make_batch(step, 0, 0)) * (float("inf") if step == 2 else 1.0))
        rates.append(float(engine.step().lr))
    return rates


@pytest.mark.parametrize("style", ["cosine", "wsd"])
def test_a_schedule_goes_on_after_a_resume(style, tmp_path):
    whole, first, second = (_engine(RATES[style]) for _ in range(3))
    rates = _train(whole, range(12))
    assert rates == torch.tensor([*RATES[style][:3], *RATES[style][2:11]]).tolist()  # the fourth tries again
    before = _train(first, range(6))
    Checkpoints(first, tmp_path).save({})
    assert Checkpoints(second, tmp_path).load() == {}
    assert before + _train(second, range(6, 12)) == rates
    ends = whole.full_weights(), second.full_weights()
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


def test_wrong_numbers_are_refused_with_all_of_them():
    for wrong in (
        lambda: schedules.cosine(1e-3, 10, warmup_steps=11),
        lambda: schedules.linear(1e-3, 10, min_lr=1e-2),
        lambda: schedules.wsd(1e-3, 10, decay_steps=8, warmup_steps=4),
        lambda: schedules.inverse_sqrt(float("nan"), 10),
        lambda: schedules.constant(float("inf"), 10),
        lambda: schedules.cosine(1e-3, -1),
    ):
        with pytest.raises(ValueError, match=r"there is no schedule of lr .*, steps .*: give 0 <= min_lr <= lr, and"):
            wrong()
