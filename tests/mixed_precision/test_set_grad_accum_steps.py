"""The number of micro-batches can be set between steps: the engine then steps as one that was built with it. What
cannot be is refused, and changes nothing.
"""

import pytest
import torch
import torch.distributed as dist

from megamix import Sharding
from tests.builders import loss_of, make_batch, make_engine


def _step(engine, step, count):
    for micro_batch in range(count):
        engine.backward(loss_of(engine.module, make_batch(step, engine.topology.world.rank, micro_batch)))
    engine.step()


def _steps_of_each_number(sharding):
    """Return whether an engine takes 1, 3 and 2 micro-batches as engines that are built with them do, and why it
    refuses numbers that differ between ranks.
    """
    engine = make_engine(sharding=sharding, grad_accum_steps=3)
    for step, count in enumerate((1, 3, 2)):
        engine.set_grad_accum_steps(count)
        other = make_engine(sharding=sharding, grad_accum_steps=count)
        other.load_state_dict(engine.state_dict())
        _step(engine, step, count)
        _step(other, step, count)
        if not torch.equal(engine.buckets[0].master, other.buckets[0].master):
            return False, f"of {count} micro-batches"
    try:
        engine.set_grad_accum_steps(1 + dist.get_rank())
    except ValueError as error:
        return True, str(error)
    return False, ""


@pytest.mark.parametrize("sharding", [Sharding(), Sharding(shard="gradients", accumulate="owner")])
def test_an_engine_takes_another_number_as_one_built_with_it(run_ranks, sharding):
    for is_same, refusal in run_ranks(_steps_of_each_number, 2, sharding):
        assert is_same, refusal
        assert "grad_accum_steps" in refusal


def test_what_cannot_be_is_refused_and_changes_nothing():
    engine = make_engine(grad_accum_steps=2)
    with pytest.raises(ValueError, match="grad_accum_steps must be at least 1, got 0"):
        engine.set_grad_accum_steps(0)
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)))
    with pytest.raises(RuntimeError, match="set_grad_accum_steps.. after 1 backward.. calls of a step; call it right"):
        engine.set_grad_accum_steps(1)
    engine.backward(loss_of(engine.module, make_batch(0, 0, 1)))
    engine.step()
    alone = make_engine(sharding=Sharding(accumulate="owner"))
    with pytest.raises(ValueError, match="needs sums that an engine of one micro-batch does not hold; build it with"):
        alone.set_grad_accum_steps(2)
