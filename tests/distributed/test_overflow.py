"""A value that is not finite, on any rank, in any bucket or micro-batch, or only in the sum, changes not a bit on any
rank; every rank knows it; the scale backs off once.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from megamix import DynamicLossScale, Precision
from tests.builders import loss_of, make_batch, make_engine, make_model
from tests.conftest import FULL

ACCUM = 2


class Injector:
    """Overwrites one element of one parameter's gradient, on given ranks in one micro-batch, before it is
    accumulated.
    """

    def __init__(self, model):
        self.target = None  # parameter, micro-batch, value
        self.micro_batch = 0
        for name, param in model.named_parameters():
            param.register_hook(lambda grad, name=name: self._poison(name, grad))

    def _poison(self, name, grad):
        if self.target is None or self.target[:2] != (name, self.micro_batch):
            return grad
        grad = grad.clone()
        grad.view(-1)[-1] = self.target[2]
        return grad


def _build(dtype, reduce_dtype="half"):
    model = make_model()
    injector = Injector(model)
    scale = DynamicLossScale(init_scale=2.0**8, growth_interval=1, max_scale=2.0**8)
    precision = Precision(dtype, loss_scale=scale, reduce_dtype=reduce_dtype)
    settings = {"clip_grad": 0.5, "grad_accum_steps": ACCUM}
    return make_engine(model, None, precision, shard="states", bucket_size=1500, **settings), injector


def _step(engine, injector, step):
    for micro_batch in range(ACCUM):
        injector.micro_batch = micro_batch
        batch = make_batch(step, engine.topology.dp.rank, micro_batch)
        engine.backward(loss_of(engine.module, batch))
    return engine.step()


def _everything(engine):
    engine.wait()
    held = [engine.applied_updates]
    for bucket in engine.buckets:
        held += [bucket.params, bucket.master, *(state for states in bucket.states for state in states.values())]
    return [tensor.clone() for tensor in held]


def _inject_everywhere(dtype, values, all_ranks, reduce_dtype="half", some=False):
    """Return (number of injections, failures) over every rank x bucket x micro-batch x value; with `some`, one
    micro-batch and value in each bucket of each rank.
    """
    engine, injector = _build(dtype, reduce_dtype)
    me, dp_size = engine.topology.dp.rank, engine.topology.dp.size
    wrong, count, step = [], 0, 0
    _step(engine, injector, step)
    ranks = [None] if all_ranks else range(dp_size)
    moments = [*itertools.product(range(ACCUM), values)]
    places = [
        (rank, bucket, *moment)
        for number, (rank, bucket) in enumerate(itertools.product(ranks, engine.plan.layout.buckets))
        for moment in (moments[number % len(moments) :][:1] if some else moments)
    ]
    for rank, bucket, micro_batch, value in places:
        where = f"{value} at rank {rank}, {bucket.slots[-1].spec.name}, micro-batch {micro_batch}"
        before, scale = _everything(engine), engine.loss_scale.loss_scale.item()
        injector.target = (bucket.slots[-1].spec.name, micro_batch, value) if rank in (None, me) else None
        result = _step(engine, injector, step := step + 1)
        after = _everything(engine)
        if not result.found_inf:
            wrong.append(f"{where}: not found by rank {me}")
        if not all(map(torch.equal, before, after)):
            wrong.append(f"{where}: rank {me} changed")
        if engine.loss_scale.loss_scale.item() != scale / 2:
            wrong.append(f"{where}: scale went from {scale} to {engine.loss_scale.loss_scale.item()} on rank {me}")
        injector.target = None
        result = _step(engine, injector, step := step + 1)
        moved = [not torch.equal(a, b) for a, b in zip(after, _everything(engine), strict=True)]
        if result.found_inf or not all(moved) or not all(torch.isfinite(t).all() for t in _everything(engine)):
            wrong.append(f"{where}: the next step is not fine on rank {me}")
        count += 1
    return count, wrong


@pytest.mark.parametrize(("dp_size", "reduce_dtype"), [(1, "half"), (2, "half"), (2, "half_fp32_sum"), (4, "half")])
def test_a_non_finite_value_anywhere_changes_nothing(run_ranks, dp_size, reduce_dtype):
    values = [float("inf"), float("-inf"), float("nan")]
    some = (dp_size, reduce_dtype) != (2, "half") and not FULL
    answers = run_ranks(_inject_everywhere, dp_size, torch.float16, values, False, reduce_dtype, some)
    assert not sum((wrong for _, wrong in answers), [])
    moments = 1 if some else ACCUM * len(values)
    assert min(count for count, _ in answers) >= dp_size * 3 * moments  # at least three buckets


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 40_000.0), (torch.bfloat16, 3e38)])
def test_finite_gradients_whose_sum_overflows_change_nothing(run_ranks, dtype, value):
    for count, wrong in run_ranks(_inject_everywhere, 2, dtype, [value], True):
        assert count >= 3 * ACCUM
        assert not wrong


def _finite_but_too_large_to_square():
    engine, injector = _build(torch.bfloat16)
    before = _everything(engine)
    injector.target = ("norm.weight", 0, 1e25) if dist.get_rank() == 1 else None
    result = _step(engine, injector, 0)
    assert result.found_inf
    assert all(map(torch.equal, before, _everything(engine)))


def test_a_finite_gradient_too_large_to_square_counts_as_overflow(run_ranks):
    run_ranks(_finite_but_too_large_to_square, 2)
