"""A rank holds the bytes that the formula gives, and what comes and goes in a step is not there between steps."""

import gc
import itertools
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megamix import NAG, AdamW, DynamicLossScale, Precision, Sharding
from megamix.base.live_storage import LiveStorage
from megamix.mixed_precision.flat_layout import ROW
from megamix.tools.plan.engine_memory import EngineMemory
from tests.builders import make_engine, make_model, train_step


def _trained(optimizer, grad_dtype, reduce_dtype, sharding=lambda model: Sharding(bucket_size=2000)):
    """Return (the engine, its tracked memory, what passed in the second step) after two steps."""
    with LiveStorage() as tracker:
        model = make_model(tied=False)
        precision = Precision(torch.float16, grad_dtype, DynamicLossScale(init_scale=2.0**8), reduce_dtype)
        engine = make_engine(model, optimizer, precision, sharding(model))
        train_step(engine)
        with _Passing(engine) as passing:
            train_step(engine, 1)
        engine.wait()
    return engine, tracker, passing


def _live(tracker, held):
    """Return the live bytes without those of small tensors, once they equal `held`. Gloo's threads release the tables
    of an agreement a moment after the tables were awaited.

    Small tensors have less than a row of FP32 numbers, the unit of flat buffers: scalars, and the borders of a bucket's
    parameters. All of them together have less than a KiB.
    """
    end_s = time.monotonic() + 5.0
    while True:
        gc.collect()
        tracker._recount()
        small = sum(size for _, size in tracker._known.values() if size < 4 * ROW)
        live = tracker.live_bytes - small
        if (live == held and small < 1024) or time.monotonic() > end_s:
            assert small < 1024
            return live
        time.sleep(0.01)


def _bytes(optimizer, num_states, grad_dtype, reduce_dtype):
    """Return (live bytes counted, bytes by the layout, bytes per element of the layout)."""
    engine, tracker, _ = _trained(optimizer, grad_dtype, reduce_dtype)
    layout = engine.plan.layout
    # Half parameters and gradients are whole; masters and states are a share.
    resident = layout.padded_numel * (2 + grad_dtype.itemsize)
    resident += sum(bucket.plan.shard_numel for bucket in engine.buckets) * (4 + 4 * num_states)
    return _live(tracker, resident), resident, resident / layout.padded_numel


CASES = [
    (AdamW(lr=0.01), 2, torch.float16, "half", lambda dp_size: 4 + 12 / dp_size),
    (AdamW(lr=0.01), 2, torch.float16, "half_fp32_sum", lambda dp_size: 4 + 12 / dp_size),
    (NAG(lr=0.01), 1, torch.float16, "half", lambda dp_size: 4 + 8 / dp_size),
    (NAG(lr=0.01, momentum=0.0), 0, torch.float16, "half", lambda dp_size: 4 + 4 / dp_size),
    (AdamW(lr=0.01), 2, torch.float32, "fp32", lambda dp_size: 6 + 12 / dp_size),
]


@pytest.mark.parametrize(("optimizer", "num_states", "grad_dtype", "reduce_dtype", "formula"), CASES)
@pytest.mark.parametrize("dp_size", [1, 2])
def test_live_bytes_equal_the_formula(run_ranks, optimizer, num_states, grad_dtype, reduce_dtype, formula, dp_size):
    for live, resident, each in run_ranks(_bytes, dp_size, optimizer, num_states, grad_dtype, reduce_dtype):
        assert live == resident
        assert each == pytest.approx(formula(dp_size), rel=1e-12)


class _Passing(TorchDispatchMode):
    """Notes after each operation the memory of the flat buffers that come and go: `most` bytes at once; and the most
    bytes of one bucket's waiting small gradients, `most_waiting`.
    """

    def __init__(self, engine):
        super().__init__()
        halves = [bucket.params for bucket in engine.buckets] if engine.plan.sharding.shard == "parameters" else []
        flats = (*halves, *(bucket.grads for bucket in engine.buckets))
        self._storages = [flat.untyped_storage() for flat in flats]
        self._buckets = engine.buckets
        self.most = self.most_waiting = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, sum(storage.nbytes() for storage in self._storages))
        waiting = [sum(grad.nbytes for grad in bucket._waiting.values()) for bucket in self._buckets]
        self.most_waiting = max(self.most_waiting, *waiting)
        return result


def _passing_bytes(shard, reduce_dtype):
    """Return the bytes that live between steps, the most passing bytes in a step and those of waiting small gradients,
    and the plan of all three.
    """
    # One bucket for each unit.
    half, sharding = torch.float16, lambda model: Sharding([*model.blocks], shard=shard)
    engine, tracker, passing = _trained(AdamW(lr=0.01), half, reduce_dtype, sharding)
    plans = engine.plan.layout.buckets
    resident = sum((shard == "gradients") * 2 * plan.padded_numel + 12 * plan.shard_numel for plan in plans)
    buckets = [bucket.bytes for bucket in engine.buckets]
    memory = EngineMemory(buckets, engine.plan.precision, [], 1, on_gpu=False, compiled=False)
    peak = max(filling.grads + filling.params for filling in memory.fillings())
    waiting = max(filling.waiting for filling in memory.fillings())
    return [_live(tracker, resident), passing.most, passing.most_waiting], [resident, peak, waiting]


@pytest.mark.parametrize("dp_size", [1, 2])
def test_what_comes_and_goes_is_not_there_between_steps(run_ranks, dp_size):
    for case in itertools.product(["gradients", "parameters"], ["half", "half_fp32_sum"]):
        for measured, planned in run_ranks(_passing_bytes, dp_size, *case):
            assert measured == planned, case
