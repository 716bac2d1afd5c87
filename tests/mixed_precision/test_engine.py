"""The engine works as a library, with foreign modules, guards, and weights and state in and out; its memory is freed
when it is dropped.
"""

import gc
import math
import weakref
from functools import partial
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import megamix
from megamix import NAG, AdamW, DynamicLossScale, HeadroomLossScale, ParamGroup, Precision, Sharding, StaticLossScale
from megamix.mixed_precision.census import single_device
from megamix.mixed_precision.settings import Shard
from tests.builders import FP32, bf16_engine, loss_of, make_batch, make_engine, make_model, train_step, train_steps
from tests.mixed_precision.spoilers import SPOILERS, failed_in_backward


class BorrowedHead(nn.Module):
    """A module that reads `embedding.weight` in its own forward: the weight has one owner and two readers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.register_buffer("kind", torch.zeros(3, dtype=torch.int16))  # a dtype that backends do not send
        layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)

    def forward(self, tokens):
        return self.encoder(self.embedding(tokens)) @ self.embedding.weight.T


def _learn_to_count():
    torch.manual_seed(0)
    model = BorrowedHead()
    engine = bf16_engine(model, sharding=Sharding(units=[*model.encoder.layers]))
    tokens = (torch.arange(12) + torch.arange(8).unsqueeze(1)) % 20
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses[0], losses[-1]


def test_modules_that_are_not_ours_train_on_two_ranks(run_ranks):
    for first, last in run_ranks(_learn_to_count, 2):
        assert first > 2.5
        assert last < 0.3


def test_a_parameter_without_a_gradient_counts_as_zeros_and_is_named_once(caplog):
    engine = make_engine()
    for step in range(3):
        train_step(engine, step, flavour=1)  # skips block 0
    (message,) = caplog.messages
    assert all(f"blocks.0.{name}" in message for name in ("norm.weight", "up.bias", "gain"))
    assert "blocks.1" not in message


def test_a_group_that_matches_no_parameter_is_named(caplog):
    groups = (ParamGroup(pattern="*.biass"), ParamGroup(pattern="*.up.*"))
    make_engine(optimizer=AdamW(lr=0.01, groups=groups))
    assert caplog.messages == ["the optimizer's group '*.biass' matches no parameter of the model"]


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 1 * x

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(3)


def test_a_gradient_that_shares_memory_is_taken_before_others_write_there():
    """Take a gradient that shares memory at once, like that of a table that is added unchanged: a later node that
    computes in place would overwrite it.
    """
    model = nn.Linear(8, 8)
    model.table = nn.Parameter(torch.zeros(4, 8))
    engine = make_engine(model, AdamW(lr=0.1))
    out = _InPlace.apply(model(torch.ones(1, 4, 8)))
    engine.backward(((out + model.table[None]) * torch.ones(1, 4, 8)).sum())
    (bucket,) = engine.buckets
    assert torch.equal(bucket.param_grads["table"].view, torch.ones(4, 8))
    assert torch.equal(bucket.param_grads["bias"].view, torch.full((8,), 12.0))


def test_loss_backward_outside_the_engine_is_refused():
    engine = make_engine()
    with pytest.raises(RuntimeError, match=r"outside the engine.*Call engine.backward\(loss\) instead"):
        loss_of(engine.module, make_batch(0, 0, 0)).backward()
    assert all(param.grad is None for param in engine.module.parameters())
    assert train_steps(engine) == train_steps(make_engine())


def test_units_share_buckets_unless_their_parameters_come_and_go():
    buckets = [len(make_engine(shard=shard).buckets) for shard in ("states", "gradients", "parameters")]
    assert buckets == [1, 1, 3 + 2]  # one for each block, one before and one after them


def _backward(engine, step, micro_batches=range(2)):
    for micro_batch in micro_batches:
        engine.backward(loss_of(engine.module, make_batch(step, engine.topology.dp.rank, micro_batch)))


def _failed_in_the_second_backward(engine, forward):
    engine.backward(forward())
    failed_in_backward(engine, forward)


def _failed_in_the_update(engine, forward):
    planted = mock.patch.object(AdamW, "library_update_", side_effect=ValueError("planted"))
    for _ in range(2):
        engine.backward(forward())
    with planted, pytest.raises(ValueError, match="planted"):
        engine.step()


@pytest.mark.parametrize("spoil", [*SPOILERS, _failed_in_the_second_backward, _failed_in_the_update])
@pytest.mark.parametrize("shard", get_args(Shard))
def test_a_step_that_raised_or_is_discarded_leaves_nothing_in_the_next_one(spoil, shard):
    masters = []
    for spoiled in (True, False):
        engine = make_engine(shard=shard, grad_accum_steps=2)
        if spoiled:
            spoil(engine, partial(loss_of, engine.module, make_batch(9, 0, 0)))
        for step in range(2):
            _backward(engine, step)
            engine.step()
        masters.append([bucket.master for bucket in engine.buckets])
    assert all(map(torch.equal, *masters))


class _Twice(nn.Linear):
    def forward(self, x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)
        return x


def test_a_reentrant_recompute_adds_up_but_in_the_last_micro_batch_where_it_is_refused():
    model = _Twice(2, 2, bias=False)
    weight = model.weight.detach().clone().requires_grad_()
    engine = make_engine(model, grad_accum_steps=2)
    engine.backward(model(torch.ones(1, 2, requires_grad=True)).sum())
    (torch.ones(1, 2) @ weight.T @ weight.T).sum().backward()
    assert torch.allclose(engine.buckets[0].grads[:4].view(2, 2), weight.grad)
    with pytest.raises(RuntimeError, match="second gradient.*use_reentrant=False"):
        engine.backward(model(torch.ones(1, 2, requires_grad=True)).sum())


def test_calls_out_of_order_are_refused():
    engine = make_engine(grad_accum_steps=2)
    with pytest.raises(RuntimeError, match=r"step\(\) needs 2 backward\(\) calls \(grad_accum_steps\), got 0"):
        engine.step()
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)))
    with pytest.raises(RuntimeError, match=r"probe_loss_scale\(\) needs 2 backward\(\) calls .* got 1"):
        engine.probe_loss_scale()
    for call in (engine.state_dict, engine.full_weights, lambda: engine.load_weights({})):
        with pytest.raises(RuntimeError, match="after 1 backward.. calls of a step; call it right after step"):
            call()
    engine.backward(loss_of(engine.module, make_batch(0, 0, 1)))
    with pytest.raises(RuntimeError, match="called 2 times already"):
        engine.backward(loss_of(engine.module, make_batch(0, 0, 2)))
    engine.step()
    with pytest.raises(ValueError, match=r"one element, got shape \(2,\)"):
        engine.backward(torch.ones(2))


WRONG_SETTINGS = [
    (lambda: make_engine(precision=Precision(torch.float16)), "FP16 gradients need one; pass loss_scale=DynamicLoss"),
    (lambda: Precision(torch.float64), "precision.dtype must be .* got torch.float64"),
    (lambda: Precision(torch.bfloat16, torch.float16), "precision.grad_dtype must be None"),
    (lambda: Precision(reduce_dtype="fp32"), "with half gradients .'fp32' needs grad_dtype=torch.float32., got 'fp32'"),
    (lambda: Precision(torch.float32, reduce_dtype="half"), "'fp32' with FP32 gradients .* got 'half'"),
    (lambda: Precision(torch.bfloat16, torch.float32, reduce_dtype="half"), "'fp32' with FP32 gradients"),
    (lambda: make_engine(clip_grad=-1.0), "clip_grad must be a number of at least 0, got -1.0; 0 turns clipping off"),
    (lambda: make_engine(clip_grad=math.nan), "clip_grad must be a number of at least 0, got nan"),
    (lambda: make_engine(grad_accum_steps=0), "grad_accum_steps must be at least 1, got 0"),
    (lambda: make_engine(nn.ParameterList([torch.ones(2, dtype=torch.complex64)])), "0 is torch.complex64"),
    (lambda: make_engine(sharding=Sharding([nn.ReLU()])), "units must be different submodules .*; ReLU is not one"),
    (
        lambda: make_engine(model := make_model(), sharding=Sharding([model.blocks])),
        r"a ModuleList has no forward, .* Pass the modules that it holds, e\.g\. \[\*model\.blocks\]",
    ),
    (lambda: single_device(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])), "must lie on one device"),
    (lambda: NAG(lr=1.0, momentum_form="heavy"), "momentum_form of NAG must be 'gradient' or 'velocity', got .heavy."),
]


@pytest.mark.parametrize(("build", "message"), WRONG_SETTINGS)
def test_a_wrong_setting_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_second_engine_on_the_same_model_is_refused():
    model = make_model()
    first = make_engine(model)
    with pytest.raises(ValueError, match="parameter embedding.weight belongs to another engine, or did"):
        make_engine(model)
    assert train_steps(first) == train_steps(make_engine())  # the first one is unchanged


@pytest.mark.parametrize("shard", get_args(Shard))
def test_a_dropped_engine_gives_its_memory_back(shard):
    """Drop an engine while its module and a loss of that live on: memory is free at once, as the next engine would have
    no room otherwise.
    """

    def use():
        model = make_model()
        engine = make_engine(model, shard=shard)
        train_steps(engine)
        loss = loss_of(model, make_batch(0, 0, 0))
        flats = (flat for bucket in engine.buckets for flat in (bucket.params, bucket.grads, bucket.master))
        held = (engine, engine.world, *(bucket.owners for bucket in engine.buckets), *flats)
        return model, loss, [weakref.ref(one) for one in held]

    use()  # imports of the first use stay in memory
    gc.collect()
    gc.disable()
    try:
        *_alive, used = use()
        assert [one() for one in used] == [None] * len(used)
    finally:
        gc.enable()


def test_loaded_weights_reach_masters_half_and_frozen_parameters_and_buffers():
    model = make_model()
    model.register_buffer("table", torch.zeros(3))
    model.norm.bias.requires_grad_(False)
    engine = bf16_engine(model)
    train_steps(engine)
    weights = {name: torch.randn_like(tensor, dtype=torch.float32) for name, tensor in model.state_dict().items()}
    weights["head.weight"] = weights["embedding.weight"]
    engine.load_weights(weights)
    out = engine.full_weights()
    assert out.keys() == weights.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name].to(tensor.dtype))
        assert torch.equal(out[name], tensor if name == "norm.bias" else weights[name])  # FP32, bit for bit
    train_steps(engine)  # the guards accept it


def test_wrong_weights_are_refused_all_at_once_and_change_nothing():
    engine = make_engine()
    before = engine.full_weights()
    weights = make_model().state_dict()
    weights["norm.weight"] = torch.ones(3)
    del weights["norm.bias"]
    weights |= {f"layers.{number}.weight": torch.ones(2) for number in range(300)}
    told = "missing norm.bias; unknown layers.0.weight; .* layers.7.weight; and 292 more unknown; norm.weight has shape"
    with pytest.raises(ValueError, match=told):
        engine.load_weights(weights)
    assert all(torch.equal(before[name], value) for name, value in engine.full_weights().items())


@pytest.mark.parametrize(
    ("dtype", "name", "value", "told"),
    [
        (torch.bfloat16, "blocks.0.gain", math.nan, "nan, and torch.bfloat16 holds up to 3.3895e\\+38"),
        (torch.bfloat16, "blocks.0.gain", 3.4e38, r"3.4e\+38, and torch.bfloat16"),
        (torch.float16, "blocks.0.gain", -65505.0, "65505, and torch.float16 holds up to 65504"),
        (torch.float16, "blocks.1.down.weight", -65505.0, "65505, and torch.float16 holds up to 65504"),
        (torch.float32, "blocks.1.down.weight", -math.inf, "inf, and torch.float32"),
    ],
)
def test_values_that_the_dtype_cannot_hold_are_refused_by_name(dtype, name, value, told):
    model = make_model()
    model.blocks[0].gain.requires_grad_(False)
    model.norm.register_buffer("mask", torch.full((2,), -math.inf))
    engine = make_engine(model, precision=Precision(dtype, loss_scale=StaticLossScale(1.0)))
    before = engine.full_weights()
    weights = {one: weight.float() for one, weight in before.items()}
    engine.load_weights(weights | {"blocks.0.gain": torch.tensor([-math.inf])})  # a frozen mask may have it
    engine.load_weights(weights | {name: torch.full_like(weights[name], 65504.0)})
    engine.load_weights(weights)
    wrong = weights[name].clone()
    wrong.view(-1)[-1] = value
    with pytest.raises(ValueError, match=rf"load_weights\(\) .* {name} has {told}"):
        engine.load_weights({one: weight + 1 for one, weight in weights.items()} | {name: wrong})
    assert all(torch.equal(before[one], weight) for one, weight in engine.full_weights().items())


def _resumed_equals_uninterrupted():
    straight, first, second = (
        make_engine(precision=Precision(torch.float16, loss_scale=DynamicLossScale(2.0**24, growth_interval=3)))
        for _ in range(3)
    )
    train_steps(straight, range(12))
    train_steps(first, range(6))
    train_steps(second, range(2))
    second.load_state_dict(first.state_dict())
    train_steps(second, range(6, 12))
    assert straight.skipped_steps > 0
    ends = [
        [engine.skipped_steps, engine.loss_scale.loss_scale, *engine.full_weights().values()]
        for engine in (straight, second)
    ]
    return all(map(torch.equal, *ends))


def test_a_restored_engine_continues_bitwise(run_ranks):
    assert all(run_ranks(_resumed_equals_uninterrupted, 2))


def _state(optimizer=None, precision=FP32, bucket_size=None):
    return make_engine(None, optimizer, precision, Sharding(bucket_size=bucket_size)).state_dict()


def _state_without_a_tensor():
    state = _state()
    return state | {"states": state["states"][1:]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (partial(_state, bucket_size=100), r"saved by rank 0 with layout \w+, but this is rank 0 with"),
        (partial(_state, NAG(lr=0.1)), "build the engine as it was then: .* optimizer and its groups"),
        (partial(_state, precision=Precision(torch.float32, loss_scale=HeadroomLossScale())), "kind of loss scale"),
        (lambda: make_model().state_dict(), r"call engine.load_weights\(state_dict\)"),
        (_state_without_a_tensor, "same number of tensors"),
    ],
)
def test_the_state_of_another_engine_is_refused_and_changes_nothing(state, message):
    engine = make_engine()
    train_steps(engine, range(1))
    before = engine.full_weights()
    with pytest.raises((ValueError, RuntimeError), match=message):
        engine.load_state_dict(state())
    assert all(map(torch.equal, before.values(), engine.full_weights().values()))
    assert int(engine.applied_updates) == 1


def test_a_state_leaves_an_engine_its_own_settings():
    def build(lr, scale):
        precision = Precision(torch.bfloat16, loss_scale=StaticLossScale(scale))
        return make_engine(None, AdamW(lr=lr), precision)

    engine, other = build(0.5, 4.0), build(0.25, 8.0)
    train_steps(other, range(1))
    engine.set_lr(0.75)
    engine.load_state_dict(other.state_dict())
    result = train_step(engine)
    assert (float(result.lr), float(result.loss_scale), int(engine.applied_updates)) == (0.75, 4.0, 2)


def test_the_step_reports_what_a_user_logs():
    engine = make_engine(precision=Precision(torch.float16, loss_scale=StaticLossScale(2.0**6)))
    result = train_step(engine)
    assert float(result.max_abs) == float(engine.buckets[0].grads.abs().max())
    loss, norm, max_abs = (f"{float(one):.6g}" for one in (result.loss, result.grad_norm, result.max_abs))
    assert str(result) == (
        f"StepResult(loss={loss}, grad_norm={norm}, max_abs={max_abs}, loss_scale=64, lr=0.01, found_inf=False)"
    )


def test_what_is_no_observer_is_refused_before_the_step():
    engine = make_engine()
    with pytest.raises(TypeError, match=r"observe\(\) takes a megamix.StepObserver, got 3"), engine.observe(3):
        pass
    seen = mock.Mock(spec=megamix.StepObserver)
    seen.cut.side_effect = lambda bucket, spans: spans
    with engine.observe(seen):
        train_steps(engine, range(2))
    train_steps(engine, range(1))
    assert seen.on_gradient.call_count == 2 * len([*engine.module.parameters()])
    assert seen.on_use.call_count == 2 * len(engine.buckets)


def _steps_of_each_number(sharding):
    """Compare an engine that takes 1, 3 and 2 micro-batches with engines that are built with them."""
    engine = make_engine(sharding=sharding, grad_accum_steps=3)
    for step, count in enumerate((1, 3, 2)):
        engine.set_grad_accum_steps(count)
        other = make_engine(sharding=sharding, grad_accum_steps=count)
        other.load_state_dict(engine.state_dict())
        for one in (engine, other):
            _backward(one, step, range(count))
            one.step()
        assert torch.equal(engine.buckets[0].master, other.buckets[0].master), count
    with pytest.raises(ValueError, match="grad_accum_steps"):
        engine.set_grad_accum_steps(1 + dist.get_rank())


@pytest.mark.parametrize("sharding", [Sharding(), Sharding(shard="gradients", accumulate="owner")])
def test_an_engine_takes_another_number_of_micro_batches_as_one_built_with_it(run_ranks, sharding):
    run_ranks(_steps_of_each_number, 2, sharding)


def test_a_number_of_micro_batches_that_cannot_be_is_refused_and_changes_nothing():
    engine = make_engine(grad_accum_steps=2)
    with pytest.raises(ValueError, match="grad_accum_steps must be at least 1, got 0"):
        engine.set_grad_accum_steps(0)
    _backward(engine, 0, [0])
    with pytest.raises(RuntimeError, match="set_grad_accum_steps.. after 1 backward.. calls of a step; call it right"):
        engine.set_grad_accum_steps(1)
    _backward(engine, 0, [1])
    engine.step()
    alone = make_engine(sharding=Sharding(accumulate="owner"))
    with pytest.raises(ValueError, match="needs sums that an engine of one micro-batch does not hold; build it with"):
        alone.set_grad_accum_steps(2)
