"""`step()` reads nothing from the device: ten steps, one with an overflow, pass in a mode that refuses
every read.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megamix import (
    NAG,
    AdamW,
    DeepSpeedLossScale,
    DynamicLossScale,
    HeadroomLossScale,
    MegatronLossScale,
    ParamGroup,
    Precision,
    TorchLossScale,
    WeightAverage,
)
from tests.builders import loss_of, make_batch, make_engine

READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "is_nonzero", "item")
METHODS = ("numpy", "tolist", "__array__", "item", "__bool__", "__float__", "__int__", "__index__")


class HostRead(AssertionError):
    pass


class _RefuseReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name in READS or name.startswith(("unique", "_unique")):
            raise HostRead(name)
        if name.startswith("index") and any(
            t.dtype == torch.bool for t in tree_iter(args[1:]) if isinstance(t, Tensor)
        ):
            raise HostRead(f"{name} by a mask")  # its kernel calls nonzero, which no mode sees
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device for leaf in tree_iter((args, kwargs, result)) if isinstance(leaf, Tensor)}
        if len(devices) > 1:
            raise HostRead(f"{name} between {devices}")
        return result


@contextmanager
def no_host_read():
    methods = {method: mock.Mock(side_effect=HostRead(method)) for method in METHODS}
    with mock.patch.multiple(Tensor, **methods), _RefuseReads():
        yield


def _ten_steps(scale=None, optimizer=None, reduce_dtype="half", examine=False, decay=0.9, hook=None):
    scale = scale or DynamicLossScale(2.0**8, growth_interval=4)
    precision = Precision(torch.float16, loss_scale=scale, reduce_dtype=reduce_dtype)
    engine = make_engine(None, optimizer, precision, shard="states", bucket_size=1500, clip_grad=0.5)
    model, rank = engine.module, engine.topology.dp.rank
    WeightAverage(engine, decay)
    engine.hook_gradients(hook)
    results = []
    engine.backward(loss_of(model, make_batch(0, rank, 0)))
    with no_host_read():
        engine.probe_loss_scale()
    for step in range(10):
        loss = loss_of(model, make_batch(step, rank, 0))
        if examine:
            engine.examine_next_step()
        with no_host_read() if examine else nullcontext():
            engine.backward(loss * float("inf") if step == 3 and rank == 0 else loss, weight=step % 3 / 2)
        with no_host_read():
            results.append(engine.step())
    return sum(int(result.found_inf) for result in results), int(engine.applied_updates)


@pytest.mark.parametrize(
    "scale",
    [None, HeadroomLossScale(window=4), TorchLossScale(2.0**8), MegatronLossScale(2.0**8), DeepSpeedLossScale(2.0**8)],
)
def test_a_step_reads_nothing_with_any_loss_scale(scale):
    assert _ten_steps(scale) == (1, 9)


@pytest.mark.parametrize("optimizer", [NAG(lr=0.01), NAG(lr=0.01, momentum_form="velocity")])
def test_a_step_reads_nothing_with_any_optimizer(optimizer):
    assert _ten_steps(None, optimizer) == (1, 9)


def test_a_step_reads_nothing_with_what_changes_by_the_update():
    groups = (ParamGroup(pattern="blocks.1.*", lr_factor=[0.0, 1.0, 0.0], max=0.1),)

    def hook(name, grad, divisor, first):
        grad.clamp_(-divisor, divisor)

    assert _ten_steps(None, AdamW(lr=0.01, groups=groups), decay=[0.5, 0.9], hook=hook) == (1, 9)


@pytest.mark.parametrize(("reduce_dtype", "examine"), [("half", False), ("half_fp32_sum", False), ("half", True)])
def test_a_step_reads_nothing_on_two_ranks_and_one_that_is_examined_not_even_in_backward(
    run_ranks, reduce_dtype, examine
):
    assert run_ranks(_ten_steps, 2, None, None, reduce_dtype, examine) == [(1, 9), (1, 9)]
