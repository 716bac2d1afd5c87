"""Learning rates by update: `megamix.schedules` gives the rates of jobs, which go on after a resume.
A rate can be set at run time, as a number or a table: it holds from the next update on, the first rank's for all ranks,
without a host read. Skipped steps advance no rate.
"""

import pytest
import torch
import torch.distributed as dist

from megamix import AdamW, Checkpoints, DynamicLossScale, ParamGroup, Precision
from megamix.config.optimizers import OptimizerConfig
from megamix.config.sections import LrScheduleConfig
from megamix.mixed_precision.optim import schedules
from megamix.train.objects import lr_table
from tests.builders import FP32, loss_of, make_batch, make_engine, pace_of
from tests.mixed_precision.test_no_host_read import no_host_read

RATES = {
    "cosine": schedules.cosine(3e-3, 30, warmup_steps=4, decay_steps=20, min_lr=1e-4),
    "linear": schedules.linear(3e-3, 30, warmup_steps=4, decay_steps=20, min_lr=1e-4),
    "wsd": schedules.wsd(3e-3, 30, decay_steps=20, warmup_steps=4, min_lr=1e-4),
    "inverse_sqrt": schedules.inverse_sqrt(3e-3, 30, warmup_steps=4, min_lr=1e-4),
    "constant": schedules.constant(3e-3, 30, warmup_steps=4),
}


@pytest.mark.parametrize("style", RATES)
def test_a_program_has_the_rates_of_a_job(style):
    schedule = LrScheduleConfig(decay_style=style, warmup_steps=4, decay_steps=20)
    optimizer = OptimizerConfig.model_construct(lr=3e-3, min_lr=1e-4)
    assert RATES[style] == lr_table(schedule, optimizer, pace_of(30))
    assert len({*RATES[style]}) >= 4


def _engine(lr, precision=FP32):
    groups = (ParamGroup(pattern="blocks.1.*", lr_factor=0.5),)
    return make_engine(None, AdamW(lr=lr, groups=groups), precision)


def _step(engine, step, overflow=False):
    loss = loss_of(engine.module, make_batch(step, engine.topology.world.rank, 0))
    engine.backward(loss * float("inf") if overflow else loss)
    return float(engine.step().lr)


def test_a_schedule_goes_on_after_a_resume(tmp_path):
    fp16 = Precision(torch.float16, loss_scale=DynamicLossScale(2.0**10))
    whole, first, second = (_engine(RATES["cosine"], fp16) for _ in range(3))

    def rates(engine, steps):
        return [_step(engine, step, overflow=step == 2) for step in steps]

    all_rates = rates(whole, range(12))
    assert all_rates == torch.tensor([*RATES["cosine"][:3], *RATES["cosine"][2:11]]).tolist()  # the fourth tries again
    before = rates(first, range(6))
    Checkpoints(first, tmp_path).save({})
    assert Checkpoints(second, tmp_path).load() == {}
    assert before + rates(second, range(6, 12)) == all_rates
    assert all(map(torch.equal, whole.full_weights().values(), second.full_weights().values()))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: schedules.cosine(1e-3, 10, warmup_steps=11),
        lambda: schedules.linear(1e-3, 10, min_lr=1e-2),
        lambda: schedules.wsd(1e-3, 10, decay_steps=8, warmup_steps=4),
        lambda: schedules.inverse_sqrt(float("nan"), 10),
        lambda: schedules.constant(float("inf"), 10),
        lambda: schedules.cosine(1e-3, -1),
    ],
)
def test_wrong_numbers_are_refused_with_all_of_them(wrong):
    with pytest.raises(ValueError, match=r"there is no schedule of lr .*, steps .*: give 0 <= min_lr <= lr, and"):
        wrong()


def test_a_setting_by_update_rises_stays_and_falls():
    assert schedules.setting(0.75, 6, start=0.25, warmup_steps=2, end=0.0, decay_steps=3) == pytest.approx(
        [0.25, 0.5, 0.75, 0.75, 0.5, 0.25]
    )
    assert schedules.setting(1.0, 4, end=0.0) == [1.0, 0.75, 0.5, 0.25]
    assert schedules.setting(1.0, 2, end=0.0, curve="cosine") == pytest.approx([1.0, 0.5])
    assert schedules.setting(0.9, 2, warmup_steps=2, start=0.8) == pytest.approx([0.8, 0.85])
    for wrong in ({"warmup_steps": 5}, {"warmup_steps": 3, "decay_steps": 2}, {"warmup_steps": -1}):
        with pytest.raises(ValueError, match="there is no schedule of steps 4, warmup_steps .*: give warmup_steps and"):
            schedules.setting(0.9, 4, **wrong)


SET = [0.01, 0.007, 0.02, 0.02, 0.0, 0.005]


def test_numbers_set_one_by_one_are_the_table_of_the_constructor():
    by_table, by_number = _engine(SET), _engine(1.0)
    for step, lr in enumerate(SET):
        with no_host_read():
            by_number.set_lr(lr)
        assert _step(by_number, step) == _step(by_table, step) == pytest.approx(lr)
    assert torch.equal(by_table.buckets[0].master, by_number.buckets[0].master)


def test_a_table_is_indexed_by_applied_updates():
    engine = _engine(0.5)
    seen = [_step(engine, 0), _step(engine, 1, overflow=True)]
    with no_host_read():
        engine.set_lr([0.1, 0.2, 0.3])
    seen += [_step(engine, 2, overflow=True), _step(engine, 3), _step(engine, 4), _step(engine, 5)]
    assert seen == pytest.approx([0.5, 0.5, 0.2, 0.2, 0.3, 0.3])  # past the table's end its last entry holds


def test_a_rate_set_between_backward_and_step_is_this_steps():
    engine = _engine(0.5)
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)))
    engine.set_lr(0.25)
    assert float(engine.step().lr) == 0.25


@pytest.mark.parametrize("lr", [-1.0, [0.1, float("inf")], "fast", None])
def test_a_rate_that_cannot_be_is_refused_and_changes_nothing(lr):
    engine = _engine(0.5)
    with pytest.raises((TypeError, ValueError), match="lr of AdamW must (be|have) .*, got"):
        engine.set_lr(lr)
    assert _step(engine, 0) == 0.5


def _ranks_that_differ():
    """Let rank 1 ask for other rates, or none; return the rates of each step."""
    engine, alike = _engine(0.5), _engine(0.5)
    seen = []
    for step, lr in enumerate(SET):
        if step % 3 or dist.get_rank() == 0:
            engine.set_lr(lr * (1 + dist.get_rank()))
        alike.set_lr(lr)
        seen.append(_step(engine, step))
        _step(alike, step)
    assert torch.equal(engine.full_weights()["embedding.weight"], alike.full_weights()["embedding.weight"])
    return seen


def test_the_first_ranks_rate_holds_on_every_rank(run_ranks):
    for seen in run_ranks(_ranks_that_differ, 2):
        assert seen == pytest.approx(SET)
