"""Collectives are launched in order while backward runs. A step that read a weight before its gather arrived is
refused; a failed backward leaves nothing behind; compiled blocks and dropped engines work, too.
"""

import gc
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from megamix import AdamW, DynamicLossScale, Precision, ShardedEngine, Sharding, StaticLossScale, TorchLossScale
from tests.builders import bf16_engine, compiled_model, loss_of, make_batch, make_engine, make_model
from tests.conftest import FULL
from tests.distributed.late_gather import late_gathers
from tests.distributed.test_equals_reference import Case, differences, run_engine

pytestmark = pytest.mark.uncounted

GATHER = "megamix.mixed_precision.param_gather"


def _train_with_late_gathers(units, forget, tied):
    case = Case(torch.bfloat16, torch.bfloat16, dp_size=2, bucket_size=1500, units=units, tied=tied)
    with late_gathers():
        if forget:  # a unit's hook awaits nothing, and nobody sees it
            hook, guard = f"{GATHER}._Await.__call__", f"{GATHER}.ParamGather.backward_pass"
            with mock.patch(hook, lambda *_: None), mock.patch(guard, lambda _, grads: grads):
                engine, losses, norms = run_engine(case)
        else:
            engine, losses, norms = run_engine(case)
    return differences(case, engine, losses, norms)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("units", [True, False])
def test_forward_never_reads_a_weight_before_its_gather_has_landed(run_ranks, units, tied):
    assert run_ranks(_train_with_late_gathers, 2, units, False, tied) == [[], []]


def test_the_late_gather_catches_a_missing_wait(run_ranks):
    assert all(run_ranks(_train_with_late_gathers, 2, True, True, True))


def _read_early(shard):
    """Return the errors of steps: one that skips a block; one that does not call the model and one that does not call
    its blocks, so that nothing awaits their weights; and one whose weights were awaited before.
    """
    model = make_model(tied=False)
    sharding = Sharding(units=[*model.blocks], shard=shard, bucket_size=1)
    engine = bf16_engine(model, sharding=sharding)
    block, told = type(model.blocks[0]), []
    for way in ("skips", "root", "calls", "blocks", "waits"):
        if way == "waits":
            engine.wait()
        called = (
            nullcontext() if way not in ("blocks", "waits") else mock.patch.object(block, "__call__", block.forward)
        )
        with called:
            forward = model.forward if way == "root" else model
            loss = loss_of(forward, make_batch(0, dist.get_rank(), 0), flavour=int(way == "skips"))
        try:
            engine.backward(loss)
            engine.step()
            told.append("applied")
        except RuntimeError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("shard", ["states", "gradients"])
def test_gradients_of_weights_that_no_call_has_awaited_are_refused(run_ranks, shard):
    for skips, root, calls, blocks, waits in run_ranks(_read_early, 2, shard):
        assert (skips, calls, waits) == ("applied",) * 3
        assert blocks.startswith("the forward read blocks.0.gain and 20 more while")
        assert root.startswith("the forward read embedding.weight and 3 more while")
        assert all("such as [*model.blocks]; or call engine.wait() before each forward" in it for it in (blocks, root))


def _evaluate_early():
    """Return logits without gradients of a model that calls no block, before its weights have landed, and after."""
    model = make_model(tied=False)
    sharding = Sharding(units=[*model.blocks], bucket_size=1)
    with late_gathers():
        engine = bf16_engine(model, sharding=sharding)
        engine.backward(loss_of(model, make_batch(0, dist.get_rank(), 0)))
        engine.step()
        block = type(model.blocks[0])
        with torch.no_grad(), mock.patch.object(block, "__call__", block.forward):
            early = model(make_batch(0, 0, 0))
            engine.wait()
            return early, model(make_batch(0, 0, 0))


def test_an_evaluation_awaits_blocks_that_the_model_does_not_call(run_ranks):
    for early, late in run_ranks(_evaluate_early, 2):
        assert torch.equal(early, late)


def _order_of_events(overlap, flavour):
    """Return the arrivals of gradients and launches of buckets, in their order in one backward."""
    model = make_model(tied=False)
    sharding = Sharding(units=[*model.blocks], bucket_size=1, overlap=overlap)
    engine = bf16_engine(model, sharding=sharding)
    events = []
    (among,) = {bucket.owners for bucket in engine.buckets}
    launch = among.reduce_scatter
    buckets = {bucket.grads.data_ptr(): index for index, bucket in enumerate(engine.buckets)}

    def record(grads, grad_shard, use):
        events.append(f"launch {buckets[grads.data_ptr()]}")
        return launch(grads, grad_shard, use)

    among.reduce_scatter = record
    last_of = engine.buckets[-1].plan.slots[0].spec.name
    dict(model.named_parameters())[last_of].register_hook(lambda grad: events.append("last gradient"))
    engine.backward(loss_of(model, make_batch(0, dist.get_rank(), 0), flavour))
    engine.step()
    return events


def test_buckets_are_launched_in_order_while_backward_runs(run_ranks):
    for events in run_ranks(_order_of_events, 2, True, 0):
        launched = [event for event in events if event != "last gradient"]
        assert launched == [f"launch {index}" for index in range(len(launched))]
        assert events.index("last gradient") >= len(launched) - 1  # all buckets but the last were on their way by then


def test_a_bucket_that_is_full_before_its_predecessor_waits_for_it(run_ranks):
    for events in run_ranks(_order_of_events, 2, True, 2):  # blocks run in reverse: the predecessors fill last
        launched = [event for event in events if event != "last gradient"]
        assert launched == [f"launch {index}" for index in range(len(launched))]


def test_without_overlap_nothing_is_launched_before_backward_ends(run_ranks):
    for events in run_ranks(_order_of_events, 2, False, 0):
        assert events[0] == "last gradient"


class _Planted(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("planted")


def _train_after_a_backward_that_failed_under_way(reduce_dtype):
    case = Case(torch.bfloat16, torch.bfloat16, reduce_dtype, dp_size=2, bucket_size=1500, tied=False)
    backward, attempts = ShardedEngine.backward, []

    def twice(engine, loss, last):
        attempts.append(loss)
        if len(attempts) == 1:
            block = engine.module.blocks[1]  # only the first bucket is on its way when this block fails
            with block.register_forward_hook(lambda module, args, out: _Planted.apply(out)):
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
    model = make_model()
    engine = bf16_engine(model)
    engine.backward(loss_of(model, make_batch(0, dist.get_rank(), 0)))
    engine.step()  # gathers are under way now
    del engine, model
    gc.collect()
    case = Case(torch.bfloat16, torch.bfloat16, dp_size=2)
    return differences(case, *run_engine(case))


def test_an_engine_dropped_in_flight_leaves_the_group_to_the_next(run_ranks):
    assert run_ranks(_drop_an_engine_in_flight_then_train, 2) == [[], []]


def _compiled_blocks_and_update(reduce_dtype):
    """Return (losses compiled, losses plain, number of the blocks' graphs)."""

    def train(compiled):
        model = compiled_model(compiled=compiled)
        precision = Precision(torch.float16, loss_scale=StaticLossScale(2.0**8), reduce_dtype=reduce_dtype)
        settings = {"clip_grad": 0.5, "compile_update": compiled}
        engine = make_engine(model, None, precision, shard="states", bucket_size=1500, **settings)
        losses = []
        for step in range(6):
            loss = loss_of(model, make_batch(step, dist.get_rank(), 0))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        assert engine.update_path == ("compiled" if compiled else "library")
        return losses

    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    compiled = train(True)
    graphs = counters["stats"]["unique_graphs"] - before - 2  # the update and the statistics
    return compiled, train(False), graphs


@pytest.mark.parametrize("reduce_dtype", ["half", "half_fp32_sum"] if FULL else ["half"])
def test_compiled_blocks_with_a_compiled_update_train_alike_in_one_graph(run_ranks, reduce_dtype):
    for compiled, plain, graphs in run_ranks(_compiled_blocks_and_update, 2, reduce_dtype, deadline_s=300.0):
        # FP16 activations round at 2**-11. Six steps of a model this small stay within a few of those.
        assert compiled == pytest.approx(plain, abs=2.0**-8)
        assert graphs == 1  # all blocks share one, and the hooks that await gathers split none


def _different_models():
    model = nn.Linear(3, 3 + dist.get_rank())
    try:
        ShardedEngine(model, AdamW(lr=0.01), compile_update=False)
    except ValueError as error:
        return str(error)
    return "accepted"


def _different_settings():
    """Return the error of building an engine if the second rank has another loss scale, order of gathers,
    or compiler.
    """

    def build(scale=None, units=(), compile_update=False):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        sharding = Sharding(units=[model[place] for place in units], bucket_size=1)
        precision = Precision(torch.float16, loss_scale=scale or DynamicLossScale())
        return ShardedEngine(model, AdamW(lr=0.01), precision, sharding, compile_update=compile_update)

    others = [
        {"scale": TorchLossScale(2.0**24)},
        {"scale": DynamicLossScale(2.0**23)},
        {"scale": DynamicLossScale(growth_interval=1999)},
        {"units": (0,)},  # would send the second layer, which the root awaits, first
        {"units": (0, 1)},  # gives the same order as without units
        {"compile_update": True},
    ]
    told = []
    for other in others:
        try:
            build(**other if dist.get_rank() else {})
        except ValueError as error:
            told.append(str(error))
        else:
            told.append("accepted")
    return told


def test_ranks_with_different_settings_are_told_so(run_ranks):
    for told in run_ranks(_different_settings, 2):
        assert told.pop(4) == "accepted"
        assert ["hold different models or settings" in message for message in told] == [True] * 5


def test_ranks_with_different_models_are_told_so(run_ranks):
    for message in run_ranks(_different_models, 2):
        assert "hold different models or settings" in message
