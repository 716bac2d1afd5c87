"""A learning rate can be set at run time, as a number or a table: it holds from the next update on, the first rank's
for all ranks, without a host read.
"""

import pytest
import torch
import torch.distributed as dist

from megamix import AdamW, ParamGroup
from tests.builders import loss_of, make_batch, make_engine
from tests.mixed_precision.test_no_host_read import no_host_read

GROUPS = (ParamGroup(pattern="blocks.1.*", lr_factor=0.5),)
RATES = [0.01, 0.007, 0.02, 0.02, 0.0, 0.005]


def _engine(lr=1.0):
    return make_engine(optimizer=AdamW(lr=lr, groups=GROUPS))


def _step(engine, step, overflow=False):
    loss = loss_of(engine.module, make_batch(step, engine.topology.world.rank, 0))
    engine.backward(loss * float("inf") if overflow else loss)
    return float(engine.step().lr)


def test_numbers_set_one_by_one_are_the_table_of_the_constructor():
    by_table, by_number = _engine(RATES), _engine()
    for step, lr in enumerate(RATES):
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


@pytest.mark.parametrize("lr", [-1.0, float("nan"), [], [0.1, float("inf")], "fast", None, torch.tensor(0.1)])
def test_a_rate_that_cannot_be_is_refused_and_changes_nothing(lr):
    engine = _engine(0.5)
    with pytest.raises((TypeError, ValueError), match="lr of AdamW must (be|have) .*, got"):
        engine.set_lr(lr)
    assert _step(engine, 0) == 0.5


def test_no_state_keeps_the_rate():
    engine, other = _engine(0.5), _engine(0.125)
    engine.set_lr(0.25)
    _step(engine, 0)
    other.load_state_dict(engine.state_dict())
    assert _step(other, 1) == 0.125
    engine.load_state_dict(engine.state_dict())
    assert _step(engine, 1) == 0.25


def test_a_torch_scheduler_drives_it_through_a_stand_in():
    engine = _engine()
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.5), step_size=2, gamma=0.5)
    seen = []
    for step in range(5):
        engine.set_lr(scheduler.get_last_lr()[0])
        seen.append(_step(engine, step))
        scheduler.optimizer.step()
        scheduler.step()
    assert seen == [0.5, 0.5, 0.25, 0.25, 0.125]


def _ranks_that_differ():
    """Let rank 1 ask for other rates, or none; return (the rates of each step, whether the weights are as by the first
    rank's).
    """
    engine, alike = _engine(0.5), _engine(0.5)
    seen = []
    for step, lr in enumerate(RATES):
        if step % 3 or dist.get_rank() == 0:
            engine.set_lr(lr * (1 + dist.get_rank()))
        alike.set_lr(lr)
        seen.append(_step(engine, step))
        _step(alike, step)
    return seen, torch.equal(engine.full_weights()["embedding.weight"], alike.full_weights()["embedding.weight"])


def test_the_first_ranks_rate_holds_on_every_rank(run_ranks):
    for seen, alike in run_ranks(_ranks_that_differ, 2):
        assert seen == pytest.approx(RATES)
        assert alike
