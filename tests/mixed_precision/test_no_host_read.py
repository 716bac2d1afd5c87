"""`step()` reads nothing from the device: twenty steps, one with an overflow, pass in a mode that refuses
every read.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
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
    Precision,
    ShardedEngine,
    Sharding,
    TorchLossScale,
    WeightAverage,
)
from tests.builders import loss_of, make_batch, make_model

pytestmark = pytest.mark.uncounted

ADAMW = AdamW(lr=0.01)
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
    def refuse(method):
        def raising(*args, **kwargs):
            raise HostRead(method)

        return raising

    with mock.patch.multiple(Tensor, **{method: refuse(method) for method in METHODS}), _RefuseReads():
        yield


def _twenty_steps(scale=None, optimizer=ADAMW, reduce_dtype="half", examine=False):
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = make_model()
    scale = scale or DynamicLossScale(2.0**8, growth_interval=4)
    precision = Precision(torch.float16, loss_scale=scale, reduce_dtype=reduce_dtype)
    sharding = Sharding(units=[*model.blocks], bucket_size=1500)
    engine = ShardedEngine(model, optimizer, precision, sharding, clip_grad=0.5, compile_update=False)
    WeightAverage(engine, 0.9)
    results = []
    engine.backward(loss_of(model, make_batch(0, rank, 0)))
    with no_host_read():
        engine.probe_loss_scale()
    for step in range(20):
        loss = loss_of(model, make_batch(step, rank, 0))
        if examine:
            engine.examine_next_step()
        with no_host_read() if examine else nullcontext():
            engine.backward(loss * float("inf") if step == 7 and rank == 0 else loss, weight=step % 3 / 2)
        with no_host_read():
            results.append(engine.step())
    return sum(int(result.found_inf) for result in results), int(engine.applied_updates)


SCALES = [DynamicLossScale(2.0**8, growth_interval=4), HeadroomLossScale(window=4), TorchLossScale(2.0**8)]
SCALES += [MegatronLossScale(2.0**8), DeepSpeedLossScale(2.0**8)]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: type(scale).__name__)
def test_a_step_reads_nothing_with_any_loss_scale(scale):
    assert _twenty_steps(scale) == (1, 19)


@pytest.mark.parametrize("optimizer", [NAG(lr=0.01), NAG(lr=0.01, momentum_form="velocity")])
def test_a_step_reads_nothing_with_any_optimizer(optimizer):
    assert _twenty_steps(None, optimizer) == (1, 19)


@pytest.mark.parametrize("reduce_dtype", ["half", "half_fp32_sum"])
def test_a_step_reads_nothing_on_two_ranks(run_ranks, reduce_dtype):
    assert run_ranks(_twenty_steps, 2, None, ADAMW, reduce_dtype) == [(1, 19), (1, 19)]


def test_an_examined_step_reads_nothing_in_backward_either(run_ranks):
    assert run_ranks(_twenty_steps, 2, None, ADAMW, "half", True) == [(1, 19), (1, 19)]


PLANTED = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.sum() > 0),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "index": lambda t: [1, 2, 3][t.sum().long()],
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "array": lambda t: t.__array__(),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "masked_select": lambda t: torch.masked_select(t, t > 0),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "unique": lambda t: torch.unique(t),
    "unique_consecutive": lambda t: torch.unique_consecutive(t),
    "local_scalar": lambda t: torch.ops.aten._local_scalar_dense(t.sum()),
    "to another device": lambda t: t.to("meta"),
    "copy to another device": lambda t: torch.empty(3, device="meta").copy_(t),
}


@pytest.mark.parametrize("read", PLANTED.values(), ids=PLANTED.keys())
def test_the_check_catches_a_planted_read(read):
    with pytest.raises(HostRead), no_host_read():
        read(torch.zeros(3))


def test_the_check_catches_a_read_planted_in_the_step(monkeypatch):
    update_ = DynamicLossScale.update_
    monkeypatch.setattr(
        DynamicLossScale, "update_", lambda self, found_inf, *seen: update_(self, torch.tensor(bool(found_inf)), *seen)
    )
    with pytest.raises(HostRead):
        _twenty_steps(DynamicLossScale(2.0**8))
