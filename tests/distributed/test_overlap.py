"""Collectives are launched in order while backward runs. A step that read a weight before its gather arrived is
refused; a failed backward and a dropped engine leave nothing behind.
"""

import gc
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamix import AdamW, DynamicLossScale, Precision, ShardedEngine, Sharding, TorchLossScale
from tests.builders import bf16_engine, loss_of, make_batch, make_model, train_step
from tests.distributed.late_gather import late_gathers
from tests.distributed.test_equals_reference import Case, differences, run_engine


def _train_with_late_gathers(units, tied):
    case = Case(torch.bfloat16, torch.bfloat16, dp_size=2, bucket_size=1500, units=units, tied=tied)
    with late_gathers():
        return differences(case, *run_engine(case))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("units", ["blocks", "none"])
def test_forward_never_reads_a_weight_before_its_gather_has_landed(run_ranks, units, tied):
    assert run_ranks(_train_with_late_gathers, 2, units, tied) == [[], []]


def _read_early(shard):
    """Train steps: one that skips a block; one that does not call the model and one that does not call its blocks, so
    that nothing awaits their weights; and one whose weights were awaited before.
    """
    model = make_model(tied=False)
    engine = bf16_engine(model, sharding=Sharding([*model.blocks], shard=shard, bucket_size=1))
    block = type(model.blocks[0])
    early = {"root": "embedding.weight and 3 more", "blocks": "blocks.0.gain and 20 more"}
    for way in ("skips", "root", "calls", "blocks", "waits"):
        if way == "waits":
            engine.wait()
        uncalled = mock.patch.object(block, "__call__", block.forward)
        with uncalled if way in ("blocks", "waits") else nullcontext():
            forward = model.forward if way == "root" else model
            loss = loss_of(forward, make_batch(0, dist.get_rank(), 0), flavour=int(way == "skips"))
        told = rf"^the forward read {early.get(way)} while.*\[\*model.blocks\]; or call engine.wait\(\) before each"
        with pytest.raises(RuntimeError, match=told) if way in early else nullcontext():
            engine.backward(loss)
            engine.step()


@pytest.mark.parametrize("shard", ["states", "gradients"])
def test_gradients_of_weights_that_no_call_has_awaited_are_refused(run_ranks, shard):
    run_ranks(_read_early, 2, shard)


def _evaluate_early():
    """Evaluate a model that calls no block, before its weights have landed, and after."""
    model = make_model(tied=False)
    with late_gathers():
        engine = bf16_engine(model, sharding=Sharding([*model.blocks], bucket_size=1))
        train_step(engine)
        block = type(model.blocks[0])
        with torch.no_grad(), mock.patch.object(block, "__call__", block.forward):
            early = model(make_batch(0, 0, 0))
            engine.wait()
            assert torch.equal(early, model(make_batch(0, 0, 0)))


def test_an_evaluation_awaits_blocks_that_the_model_does_not_call(run_ranks):
    run_ranks(_evaluate_early, 2)


def _order_of_events(overlap, flavour):
    """Return the launches of buckets and the arrival of the last gradient, in their order in one backward."""
    model = make_model(tied=False)
    engine = bf16_engine(model, sharding=Sharding([*model.blocks], bucket_size=1, overlap=overlap))
    events = []
    (among,) = {bucket.owners for bucket in engine.buckets}
    buckets = {bucket.grads.data_ptr(): index for index, bucket in enumerate(engine.buckets)}
    launch = among.reduce_scatter

    def record(grads, *rest):
        events.append(buckets[grads.data_ptr()])
        return launch(grads, *rest)

    among.reduce_scatter = record
    last_of = engine.buckets[-1].plan.slots[0].spec.name
    model.get_parameter(last_of).register_hook(lambda grad: events.append("last gradient"))
    train_step(engine, 0, flavour)
    return events


@pytest.mark.parametrize("flavour", [0, 2])  # 2: blocks run in reverse, so the buckets that come first fill last
def test_buckets_are_launched_in_order_while_backward_runs(run_ranks, flavour):
    for events in run_ranks(_order_of_events, 2, True, flavour):
        arrived = events.index("last gradient")
        assert events[:arrived] + events[arrived + 1 :] == [*range(len(events) - 1)]
        assert flavour or arrived >= len(events) - 2  # all buckets but the last were on their way by then


def test_without_overlap_nothing_is_launched_before_backward_ends(run_ranks):
    for events in run_ranks(_order_of_events, 2, False, 0):
        assert events[0] == "last gradient"


def _train_after_a_backward_that_failed_under_way(reduce_dtype):
    case = Case(torch.bfloat16, torch.bfloat16, reduce_dtype, dp_size=2, bucket_size=1500, tied=False)
    backward, attempts = ShardedEngine.backward, []

    def fails(grad):
        raise ValueError("planted")

    def plant(module, args, out):
        out.register_hook(fails)

    def twice(engine, loss, last):
        attempts.append(loss)
        if len(attempts) == 1:
            block = engine.module.blocks[1]  # only the first bucket is on its way when this block fails
            with block.register_forward_hook(plant):
                other = loss_of(engine.module, make_batch(9, dist.get_rank(), 0))
            with pytest.raises(ValueError, match="planted"):
                backward(engine, other)
        backward(engine, loss)

    with mock.patch.object(ShardedEngine, "backward", twice):
        return differences(case, *run_engine(case))


@pytest.mark.parametrize("reduce_dtype", ["half", "half_fp32_sum"])
def test_a_backward_that_failed_under_way_leaves_nothing_in_the_next_step(run_ranks, reduce_dtype):
    assert run_ranks(_train_after_a_backward_that_failed_under_way, 2, reduce_dtype) == [[], []]


def _drop_an_engine_in_flight_then_train():
    engine = bf16_engine()
    train_step(engine)  # gathers are under way now
    del engine
    gc.collect()
    case = Case(torch.bfloat16, torch.bfloat16, dp_size=2)
    return differences(case, *run_engine(case))


def test_an_engine_dropped_in_flight_leaves_the_group_to_the_next(run_ranks):
    assert run_ranks(_drop_an_engine_in_flight_then_train, 2) == [[], []]


def _different_settings():
    """Return what building an engine says if the second rank has another model, loss scale, sum, order of gathers, or
    compiler.
    """

    def build(scale=None, units=(), compile_update=False, width=8, reduce_dtype=None):
        model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
        sharding = Sharding(units=[model[place] for place in units], bucket_size=1)
        precision = Precision(torch.float16, None, scale or DynamicLossScale(), reduce_dtype)
        ShardedEngine(model, AdamW(lr=0.01), precision, sharding, compile_update=compile_update)
        return "accepted"

    others = [
        {"width": 9},
        {"scale": TorchLossScale(2.0**24)},
        {"scale": DynamicLossScale(2.0**23)},
        {"reduce_dtype": "half_fp32_sum"},
        {"units": (0,)},  # would send the second layer, which the root awaits, first
        {"compile_update": True},
        {"units": (0, 1)},  # gives the same order as without units
    ]
    told = []
    for other in others:
        try:
            told.append(build(**other if dist.get_rank() else {}))
        except ValueError as error:
            told.append(str(error))
    return told


def test_ranks_with_different_models_or_settings_are_told_so(run_ranks):
    for told in run_ranks(_different_settings, 2):
        assert told.pop() == "accepted"
        assert ["hold different models or settings" in message for message in told] == [True] * 6
