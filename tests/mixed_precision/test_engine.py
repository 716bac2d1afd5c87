"""The engine works as a library, with foreign modules, guards, and weights and state in and out; its memory is freed
when it is dropped.
"""

import gc
import logging
import math
import re
import weakref
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megamix
from megamix import (
    NAG,
    AdamW,
    DynamicLossScale,
    HeadroomLossScale,
    MegatronLossScale,
    ParamGroup,
    Precision,
    Sharding,
    StaticLossScale,
    TorchLossScale,
)
from megamix.mixed_precision.census import single_device
from megamix.mixed_precision.settings import Shard
from megamix.mixed_precision.step import Recorded, StepProgress, StepResult
from megamix.mixed_precision.weights import without_values
from tests.builders import TinyModel, bf16_engine, loss_of, make_batch, make_engine, make_model, train_steps


class BorrowedHead(nn.Module):
    """A module that reads `embedding.weight` in its own forward: the weight has one owner and two readers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.register_buffer("kind", torch.zeros(3, dtype=torch.int16))  # a dtype that backends do not send
        layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.embedding.weight.dtype)
        return self.encoder(self.embedding(tokens), mask=mask, is_causal=True) @ self.embedding.weight.T


def _learn_to_count(rank=0):
    torch.manual_seed(0)
    model = BorrowedHead()
    engine = bf16_engine(model, sharding=Sharding(units=[*model.encoder.layers]))
    tokens = (torch.arange(12) + torch.arange(8).unsqueeze(1) + rank) % 20
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses[0], losses[-1]


def test_modules_that_are_not_ours_train_in_bf16():
    first, last = _learn_to_count()
    assert first > 2.5
    assert last < 0.3


@pytest.mark.uncounted
def test_modules_that_are_not_ours_train_on_two_ranks(run_ranks):
    for first, last in run_ranks(_learn_to_count, 2):
        assert first > 2.5
        assert last < 0.3


def test_a_step_s_result_prints_in_a_line():
    zero, by_piece = torch.zeros(()), torch.zeros(2, 100_000, dtype=torch.float64)
    recorded = Recorded((), torch.zeros(0, 2), zero)
    result = StepResult(
        torch.tensor(2.5), torch.tensor(True), torch.tensor(0.125), torch.tensor(math.inf), torch.tensor(65536.0),
        torch.tensor(3e-4), zero, by_piece, by_piece, recorded, {},
    )  # fmt: skip
    told = "StepResult(loss=2.5, grad_norm=0.125, max_abs=inf, loss_scale=65536, lr=0.0003, found_inf=True)"
    assert repr(result) == str(result) == told


def test_parameters_are_cast_and_buffers_keep_their_dtype():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    model[0].bias.requires_grad_(False)
    params = list(model.parameters())
    bf16_engine(model)
    assert all(param.dtype == torch.bfloat16 for param in params)
    assert list(model.parameters()) == params  # the same objects
    assert model[1].running_mean.dtype == torch.float32


def test_a_frozen_parameter_is_left_alone():
    model = make_model()
    model.blocks[0].up.weight.requires_grad_(False)
    before = model.blocks[0].up.weight.detach().clone()
    engine = make_engine(model)
    train_steps(engine)
    assert torch.equal(model.blocks[0].up.weight, before)
    assert "blocks.0.up.weight" not in {name for bucket in engine.buckets for name in bucket.named_params}


def test_a_shared_parameter_has_one_place_under_its_first_name():
    engine = make_engine(make_model(tied=True))
    specs = {slot.spec.name: slot.spec for bucket in engine.plan.layout.buckets for slot in bucket.slots}
    assert specs["embedding.weight"].aliases == ("head.weight",)
    assert "head.weight" not in specs
    assert engine.module.head.weight is engine.module.embedding.weight


def test_a_parameter_without_a_gradient_counts_as_zeros_and_is_named_once(caplog):
    model = make_model()
    engine = make_engine(model)
    with caplog.at_level(logging.WARNING, logger="megamix"):
        for step in range(3):
            engine.backward(loss_of(model, make_batch(step, 0, 0), flavour=1))  # skips block 0
            engine.step()
    (message,) = [record.message for record in caplog.records]
    assert all(f"blocks.0.{name}" in message for name in ("norm.weight", "up.bias", "gain"))
    assert "blocks.1" not in message


def test_groups_set_lr_factor_and_weight_decay_by_name():
    groups = (ParamGroup(pattern="*.up.*", lr_factor=0.0), ParamGroup(pattern="embedding.*", weight_decay=0.0))
    optimizer = AdamW(lr=0.01, weight_decay=0.1, groups=groups)
    shapes = {"blocks.0.up.weight": (3, 2), "blocks.0.down.weight": (3, 2), "blocks.0.norm.weight": (3,)}
    found = [optimizer.group_of(name, shape) for name, shape in (shapes | {"embedding.weight": (3, 2)}).items()]
    assert [group.lr_factor for group in found] == [0.0, 1.0, 1.0, 1.0]
    assert [group.weight_decay for group in found] == [(0.1,), (0.1,), (0.0,), (0.0,)]
    model = make_model()
    up, down = model.blocks[0].up.weight.detach().clone(), model.blocks[0].down.weight.detach().clone()
    engine = make_engine(model, optimizer)
    train_steps(engine)
    assert torch.equal(model.blocks[0].up.weight, up)
    assert not torch.equal(model.blocks[0].down.weight, down)


def test_a_group_that_matches_no_parameter_is_named(caplog):
    groups = (ParamGroup(pattern="*.biass"), ParamGroup(pattern="*.up.*"))
    make_engine(optimizer=AdamW(lr=0.01, groups=groups))
    assert [record.getMessage() for record in caplog.records] == [
        "the optimizer's group '*.biass' matches no parameter of the model"
    ]


# Changes that break a view, and the message that each must get.
BREAKERS = [
    (lambda model: model.float(), "lost its place"),
    (lambda model: model.to(torch.float64), "lost its place"),
    (lambda model: model.load_state_dict(make_model().state_dict(), assign=True), "Parameter|lost its place"),
    (lambda model: setattr(model.norm.weight, "data", torch.ones(24)), "lost its place"),
    (lambda model: model.load_state_dict(make_model().state_dict()), "written in place"),
    (lambda model: nn.init.normal_(model.blocks[1].up.weight), "parameter blocks.1.up.weight was written in place"),
    (lambda model: model.norm.weight.detach().mul_(0.9), "parameter norm.weight was written in place"),
    (lambda model: setattr(model.norm, "weight", nn.Parameter(torch.ones(24))), "norm.weight is another Parameter"),
]


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


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize(("breaker", "message"), BREAKERS)
@pytest.mark.parametrize("when", ["before backward", "before step"])
def test_a_call_that_breaks_a_view_is_refused(breaker, message, when, dtype):
    model = make_model()
    engine = make_engine(model, precision=Precision(dtype))
    train_steps(engine, range(1))
    loss = loss_of(model, make_batch(1, 0, 0))
    if when == "before step":
        engine.backward(loss)
        with torch.no_grad():
            breaker(model)
        with pytest.raises(RuntimeError, match=message):
            engine.step()
    else:
        with torch.no_grad():
            breaker(model)
        with pytest.raises(RuntimeError, match=message) as error:
            engine.backward(loss)
        assert "engine.load_weights(state_dict)" in str(error.value) or "build the engine after" in str(error.value)


def test_zero_grad_breaks_nothing():
    plain, zeroed = make_engine(), make_engine()
    train_steps(plain)
    for step in range(3):
        loss = loss_of(zeroed.module, make_batch(step, 0, 0))
        zeroed.module.zero_grad(set_to_none=True)
        zeroed.backward(loss)
        zeroed.module.zero_grad(set_to_none=False)
        zeroed.step()
    assert torch.equal(plain.buckets[0].master, zeroed.buckets[0].master)


def test_loss_backward_outside_the_engine_is_refused():
    engine = make_engine()
    with pytest.raises(RuntimeError, match=r"outside the engine.*Call engine.backward\(loss\) instead"):
        loss_of(engine.module, make_batch(0, 0, 0)).backward()
    assert all(param.grad is None for param in engine.module.parameters())
    assert train_steps(engine) == train_steps(make_engine())


class _Planted(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("planted")


@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_backward_that_raised_leaves_nothing_in_the_next_step(fails_in):
    def run(fail):
        engine = make_engine(grad_accum_steps=2)
        if fail:
            for micro_batch in range(fails_in):
                engine.backward(loss_of(engine.module, make_batch(9, 0, micro_batch)))
            hook = engine.module.blocks[1].register_forward_hook(lambda module, args, out: _Planted.apply(out))
            with pytest.raises(ValueError, match="planted"):
                engine.backward(loss_of(engine.module, make_batch(9, 0, fails_in)))
            hook.remove()
        for step in range(2):
            for micro_batch in range(2):
                engine.backward(loss_of(engine.module, make_batch(step, 0, micro_batch)))
            engine.step()
        return engine.buckets[0].master

    assert torch.equal(run(fail=True), run(fail=False))


def test_units_share_buckets_unless_their_parameters_come_and_go():
    def buckets(shard):
        model = make_model()
        return len(make_engine(model, shard=shard).buckets)

    assert buckets("gradients") == buckets("states") == 1
    assert buckets("parameters") == len(make_model().blocks) + 2  # plus one before and one after the blocks


@pytest.mark.parametrize("shard", get_args(Shard))
def test_an_update_that_raised_leaves_nothing_in_the_next_step(shard):
    def run(fail):
        model = make_model()
        engine = make_engine(model, shard=shard)
        if fail:
            engine.backward(loss_of(engine.module, make_batch(9, 0, 0)))
            planted = mock.patch.object(AdamW, "library_update_", side_effect=ValueError("planted"))
            with planted, pytest.raises(ValueError, match="planted"):
                engine.step()
        train_steps(engine)
        return [bucket.master for bucket in engine.buckets]

    assert all(map(torch.equal, run(fail=True), run(fail=False)))


def test_a_step_that_is_discarded_leaves_nothing_in_the_next_one():
    def run(discard):
        engine = make_engine(grad_accum_steps=2)
        if discard:
            engine.backward(loss_of(engine.module, make_batch(9, 0, 0)))
            engine.discard_step()
        for micro_batch in range(2):
            engine.backward(loss_of(engine.module, make_batch(0, 0, micro_batch)))
        engine.step()
        return engine.buckets[0].master

    assert torch.equal(run(discard=True), run(discard=False))


def test_a_sparse_gradient_is_refused():
    model = nn.Embedding(10, 4, sparse=True)
    engine = make_engine(model)
    with pytest.raises(RuntimeError, match="weight got a torch.sparse_coo gradient"):
        engine.backward(model(torch.tensor([1, 2])).sum())


def test_a_reentrant_recompute_that_sends_a_second_gradient_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(lambda y: y * self.weight, x, use_reentrant=True)
            return x

    model = Twice()
    engine = make_engine(model)
    with pytest.raises(RuntimeError, match="second gradient.*use_reentrant=False"):
        engine.backward(model(torch.ones(3, requires_grad=True)).sum())


def test_a_reentrant_recompute_before_the_last_micro_batch_adds_up():
    class Twice(nn.Linear):
        def forward(self, x):
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)
            return x

    model = Twice(2, 2, bias=False)
    weight = model.weight.detach().clone().requires_grad_()
    engine = make_engine(model, grad_accum_steps=2)
    engine.backward(model(torch.ones(1, 2, requires_grad=True)).sum())
    (torch.ones(1, 2) @ weight.T @ weight.T).sum().backward()
    assert torch.allclose(engine.buckets[0].grads[:4].view(2, 2), weight.grad)


def test_calls_out_of_order_are_refused():
    engine = make_engine(grad_accum_steps=2)
    with pytest.raises(RuntimeError, match=r"step\(\) needs 2 backward\(\) calls \(grad_accum_steps\), got 0"):
        engine.step()
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)))
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
    (
        lambda: make_engine(precision=Precision(torch.float16)),
        "FP16 gradients need one; pass loss_scale=DynamicLossScale",
    ),
    (lambda: make_engine(precision=Precision(torch.float64)), "precision.dtype must be .* got torch.float64"),
    (lambda: make_engine(precision=Precision(torch.bfloat16, torch.float16)), "precision.grad_dtype must be None"),
    (
        lambda: make_engine(precision=Precision(torch.bfloat16, reduce_dtype="fp32")),
        "precision.reduce_dtype must be .* with half gradients .'fp32' needs grad_dtype=torch.float32., got 'fp32'",
    ),
    (
        lambda: make_engine(precision=Precision(torch.bfloat16, torch.float32, reduce_dtype="half_fp32_sum")),
        "precision.reduce_dtype must be None or 'fp32' with FP32 gradients .* got 'half_fp32_sum'",
    ),
    (lambda: make_engine(precision=Precision(torch.float32, reduce_dtype="half")), "'fp32' with FP32 gradients"),
    (lambda: make_engine(precision=Precision(reduce_dtype="bf16")), "precision.reduce_dtype must be .* got 'bf16'"),
    (lambda: make_engine(clip_grad=-1.0), "clip_grad must be a number of at least 0, got -1.0"),
    (
        lambda: make_engine(clip_grad=math.nan),
        "clip_grad must be a number of at least 0, got nan; 0 turns clipping off",
    ),
    (lambda: make_engine(grad_accum_steps=0), "grad_accum_steps must be at least 1, got 0"),
    (lambda: make_engine(nn.ParameterList([torch.ones(2, dtype=torch.complex64)])), "0 is torch.complex64"),
    (
        lambda: make_engine(sharding=Sharding(units=[nn.Linear(1, 1)])),
        "units must be different submodules of the model; Linear is not one",
    ),
    (
        lambda: make_engine(blocks := nn.Sequential(nn.ModuleList([nn.Linear(1, 1)])), sharding=Sharding([blocks[0]])),
        r"a ModuleList has no forward, .* Pass the modules that it holds, e\.g\. \[\*model\.blocks\]",
    ),
    (lambda: single_device(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])), "must lie on one device"),
    (lambda: AdamW(lr=-1.0), "lr of AdamW must be at least 0, got -1.0"),
    (lambda: AdamW(lr=[]), "lr of AdamW must have at least one number"),
    (lambda: AdamW(lr=1.0, betas=(0.9, 1.0)), "betas of AdamW must be less than 1"),
    (lambda: NAG(lr=1.0, momentum=1.0), "momentum of NAG must be less than 1, got 1.0; leave it out for 0.9"),
    (lambda: NAG(lr=1.0, momentum_form="heavy"), "momentum_form of NAG must be 'gradient' or 'velocity', got .heavy."),
    (lambda: NAG(lr=1.0, weight_decay=-0.1), "weight_decay of NAG must be at least 0, got -0.1; leave it out for 0.0"),
    (lambda: AdamW(lr=1.0, weight_decay=math.nan), "weight_decay of AdamW must be finite, got nan"),
    (lambda: AdamW(lr=1.0, eps=0.0), "eps of AdamW must be at least 1.17549e-38, got 0.0; leave it out for 1e-08"),
    (lambda: AdamW(lr=1.0, eps=-1.0), "eps of AdamW must be at least 1.17549e-38"),
    (lambda: AdamW(lr=1.0, eps=1e-50), "eps of AdamW must be at least 1.17549e-38, got 1e-50"),
    (lambda: AdamW(lr=1.0, eps=math.nan), "eps of AdamW must be finite"),
    (lambda: ParamGroup(pattern="*", lr_factor=-1.0), r"lr_factor of group '\*' must be at least 0, got -1.0; leave"),
    (lambda: ParamGroup(pattern="*", lr_factor=math.nan), r"lr_factor of group '\*' must be"),
    (lambda: ParamGroup(pattern="*.b", weight_decay=math.inf), r"weight_decay of group '\*.b' must be .* got inf"),
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


def test_gradients_are_collected_of_what_is_trained():
    """Pass all parameters of a stage, as a pipeline does: some of them may be empty."""
    engines = []
    for _ in range(2):
        model = make_model()
        model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
        model.blocks[0].requires_grad_(False)
        engines.append(make_engine(model))
    by_hooks, collected = engines
    by_hooks.backward(loss_of(by_hooks.module, make_batch(0, 0, 0)))
    params = {name: param for name, param in collected.module.named_parameters() if param.requires_grad}
    with collected.micro_batches(1):
        loss = collected.progress.scaled(loss_of(collected.module, make_batch(0, 0, 0)), 1.0, counts=True)
        with collected.backward_pass(0, params):
            grads = torch.autograd.grad(loss, [*params.values()], allow_unused=True)
            for param, grad in zip(params.values(), grads, strict=True):
                param.grad = grad
            collected.collect(name for name, _ in collected.module.named_parameters())
    assert by_hooks.step().grad_norm == collected.step().grad_norm
    for name, weight in by_hooks.full_weights().items():
        assert torch.equal(weight, collected.full_weights()[name])


def test_an_unknown_name_in_the_package_is_an_attribute_error():
    import megamix

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        megamix.nonsense  # noqa: B018 (the access is the test)


def test_loaded_weights_reach_masters_and_half_parameters():
    source, engine = make_model(), bf16_engine(make_model(tied=True))
    train_steps(engine)
    weights = {name: torch.randn_like(tensor) for name, tensor in source.state_dict().items()}
    weights["head.weight"] = weights["embedding.weight"]
    engine.load_weights(weights)
    out = engine.full_weights()
    assert out.keys() == weights.keys()
    assert all(torch.equal(out[name], weights[name]) for name in weights)  # FP32, bit for bit
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor, weights[name].bfloat16())
    train_steps(engine)  # the guards accept it


def _trained_from_shapes_alone():
    """Return whether an engine of a module without values ends as one of the module itself, and reads none of its
    values.
    """
    real = make_model()
    with torch.device("meta"):
        hollow = TinyModel()
    without_values(hollow, torch.device("cpu"))
    assert hollow.head.weight is hollow.embedding.weight
    values = {name: param.detach().clone().flatten() for name, param in real.named_parameters()}

    def fill(spec, start, out):
        out.copy_(values[spec.name][start : start + out.numel()])

    ends = []
    for engine in (make_engine(real), make_engine(hollow, fill=fill)):
        train_steps(engine)
        ends.append(engine.full_weights())
    return all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


def test_a_module_without_values_takes_those_that_fill_writes(run_ranks):
    assert all(run_ranks(_trained_from_shapes_alone, 2))


def test_wrong_weights_are_refused_all_at_once_and_change_nothing():
    engine = make_engine()
    before = engine.full_weights()
    weights = make_model().state_dict()
    weights["norm.weight"] = torch.ones(3)
    del weights["norm.bias"]
    weights["extra"] = torch.ones(1)
    with pytest.raises(ValueError, match="missing norm.bias; unknown extra; norm.weight has shape"):
        engine.load_weights(weights)
    assert all(torch.equal(before[name], value) for name, value in engine.full_weights().items())


@pytest.mark.parametrize(
    ("dtype", "value", "told"),
    [
        (torch.bfloat16, math.nan, "nan, and torch.bfloat16 holds up to 3.3895e\\+38"),
        (torch.float32, -math.inf, "inf, and torch.float32"),
        (torch.float16, -65505.0, "65505, and torch.float16 holds up to 65504"),
        (torch.bfloat16, 3.4e38, r"3.4e\+38, and torch.bfloat16"),
    ],
)
@pytest.mark.parametrize("name", ["blocks.1.down.weight", "blocks.0.gain"])  # a trained and a frozen one
def test_values_that_the_dtype_cannot_hold_are_refused_by_name(dtype, value, told, name):
    model = make_model()
    model.blocks[0].gain.requires_grad_(False)
    model.norm.register_buffer("mask", torch.full((2,), -math.inf))  # a frozen mask may have it
    engine = make_engine(model, precision=Precision(dtype, loss_scale=StaticLossScale(1.0)))
    before = engine.full_weights()
    weights = {one: weight.float() for one, weight in before.items()}
    engine.load_weights(weights)
    weights["head.weight"] = weights["embedding.weight"] = weights["embedding.weight"] + 1
    weights[name] = weights[name].clone()
    weights[name].view(-1)[-1] = value
    if math.isinf(value) and name == "blocks.0.gain":  # a frozen mask may have it
        engine.load_weights(weights)
        return
    with pytest.raises(ValueError, match=rf"load_weights\(\) .* {name} has {told}"):
        engine.load_weights(weights)
    assert all(torch.equal(before[one], weight) for one, weight in engine.full_weights().items())
    if dtype == torch.float16:
        weights[name].view(-1)[-1] = 65504.0
        engine.load_weights(weights)


def test_of_another_models_weights_the_first_names_of_each_kind_are_told_and_the_count():
    with pytest.raises(ValueError, match="load_weights") as error:
        make_engine().load_weights({f"layers.{number}.weight": torch.ones(2) for number in range(300)})
    told = str(error.value)
    assert "unknown layers.0.weight" in told
    assert told.endswith("unknown layers.7.weight; and 292 more unknown")
    assert len(told) < 600


def test_full_weights_holds_buffers_and_frozen_parameters_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    engine = make_engine(model)
    weights = {name: torch.full_like(value, 3) for name, value in engine.full_weights().items()}
    engine.load_weights(weights)
    assert all((value == 3).all() for value in model.state_dict().values())


def _resumed_equals_uninterrupted():
    def make():
        scale = DynamicLossScale(2.0**24, growth_interval=3)
        return make_engine(None, AdamW(lr=[0.01, 0.005]), Precision(torch.float16, loss_scale=scale))

    straight, first, second = make(), make(), make()
    train_steps(straight, range(24))
    train_steps(first, range(12))
    train_steps(second, range(2))
    second.load_state_dict(first.state_dict())
    train_steps(second, range(12, 24))
    straight.wait()
    second.wait()
    held = [
        [engine.skipped_steps, engine.loss_scale.loss_scale]
        + [flat for bucket in engine.buckets for flat in (bucket.master, bucket.params)]
        for engine in (straight, second)
    ]
    return [*map(torch.equal, *held), bool(straight.skipped_steps)]


def test_a_restored_engine_continues_bitwise(run_ranks):
    for answer in run_ranks(_resumed_equals_uninterrupted, 2):
        assert all(answer)


def test_a_foreign_state_is_refused():
    engine = make_engine()
    other = make_engine(sharding=Sharding(bucket_size=100))
    with pytest.raises(ValueError, match=r"saved by rank 0 with layout \w+, but this is rank 0 with"):
        engine.load_state_dict(other.state_dict())


def test_the_sums_of_a_step_are_fp32_whatever_torchs_default_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        under_way = StepProgress(1, torch.device("cpu"), lambda: True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (under_way.scale_used.dtype, under_way.loss_sum.dtype) == (torch.float32, torch.float32)


def test_the_modules_own_state_is_answered_with_load_weights():
    engine = make_engine()
    with pytest.raises(ValueError, match=r"call engine.load_weights\(state_dict\)"):
        engine.load_state_dict(engine.module.state_dict())


@pytest.mark.parametrize("spoil", [Tensor.item, Tensor.detach], ids=["number", "detached"])
def test_a_loss_without_a_graph_is_refused_and_forgotten(spoil):
    engine = make_engine()
    with pytest.raises(ValueError, match=r"before \.item\(\) or \.detach\(\)"):
        engine.backward(spoil(loss_of(engine.module, make_batch(0, 0, 0))))
    train_steps(engine, range(1))
    assert int(engine.applied_updates) == 1


def test_a_state_that_lacks_a_tensor_changes_nothing():
    engine = make_engine()
    train_steps(engine)
    before = engine.full_weights()
    state = make_engine().state_dict()
    state["states"].pop()
    with pytest.raises(RuntimeError, match="same number of tensors"):
        engine.load_state_dict(state)
    assert all(map(torch.equal, before.values(), engine.full_weights().values()))


def test_a_state_of_another_loss_scale_rule_is_refused_and_changes_nothing():
    def build(scale):
        return make_engine(precision=Precision(torch.bfloat16, loss_scale=scale))

    engine, others = build(TorchLossScale()), [build(rule()) for rule in (HeadroomLossScale, MegatronLossScale)]
    before = engine.full_weights()
    for other in others:
        train_steps(other, range(1))
        with pytest.raises(ValueError, match="build the engine as it was then: .* kind of loss scale"):
            engine.load_state_dict(other.state_dict())
        assert all(torch.equal(before[name], value) for name, value in engine.full_weights().items())
        assert int(engine.applied_updates) == 0


def test_a_state_leaves_an_engine_its_own_settings():
    def build(lr, scale):
        precision = Precision(torch.bfloat16, loss_scale=StaticLossScale(scale))
        return make_engine(None, AdamW(lr=lr), precision)

    engine, other = build(0.5, 4.0), build(0.25, 8.0)
    train_steps(other, range(1))
    engine.load_state_dict(other.state_dict())
    engine.backward(loss_of(engine.module, make_batch(1, 0, 0)))
    result = engine.step()
    assert (float(result.lr), float(result.loss_scale), int(engine.applied_updates)) == (0.5, 4.0, 2)


def test_the_step_reports_what_a_user_logs():
    engine = make_engine(precision=Precision(torch.float16, loss_scale=StaticLossScale(2.0**6)))
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)))
    result = engine.step()
    assert re.fullmatch(r"\d+\.\d+", f"{float(result.grad_norm):.3f}")
    assert (float(result.loss_scale), bool(result.found_inf)) == (64.0, False)
    assert float(result.lr) == pytest.approx(0.01)
    assert float(result.max_abs) == float(engine.buckets[0].grads.abs().max())


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
