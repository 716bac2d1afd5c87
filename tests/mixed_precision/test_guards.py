"""Whoever writes a training script: arguments of a wrong kind, and changes of the module that training would not
notice, are refused with a fix; an average of weights and a loss in half are logged.
"""

import copy
import threading
import warnings
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from megamix import NAG, AdamW, Checkpoints, ParamGroup, Precision, ShardedEngine, StaticLossScale
from megamix.mixed_precision.settings import Shard
from tests.builders import BF16, bf16_engine, loss_of, make_batch, make_engine, make_model, train_step, train_steps

WRONG_KINDS = [
    (lambda: ShardedEngine(make_model(), torch.optim.SGD([torch.ones(1)])), "torch.optim.SGD, .* pass megamix.AdamW"),
    (lambda: ShardedEngine(make_model(), 3e-4), r"optimizer is a float, not of Optimizer; pass megamix.AdamW"),
    (lambda: ShardedEngine(make_model().parameters(), AdamW(lr=1.0)), "model is a generator, not of Module"),
    (lambda: make_engine(precision=torch.bfloat16), "precision is a dtype, not of Precision; pass megamix.Pr"),
    (lambda: bf16_engine(sharding=[]), r"sharding is a list, not of Sharding; pass megamix.Sharding\(...\)"),
    (lambda: AdamW(lr=1.0, groups=[{"lr": 0.1}]), r"groups takes ParamGroup, got dict .*; write ParamGroup\(pattern="),
    (lambda: AdamW(make_model().parameters(), lr=1e-3), r"AdamW takes settings by name.*: write AdamW\(lr="),
    (lambda: NAG(params=make_model().parameters(), lr=1e-3), "NAG takes settings by name, and no param"),
    (
        lambda: AdamW(lr=1e-3, amsgrad=True, foreach=True),
        r"AdamW: got an unexpected keyword argument 'amsgrad'; write its settings by name: AdamW\(lr=..., .*eps=..., ",
    ),
    (lambda: ParamGroup("*.bias"), r"ParamGroup: too many positional .*; write .* ParamGroup\(pattern=..., lr_factor="),
    (lambda: Checkpoints(make_model(), "runs"), "engine is a .*; pass the ShardedEngine that trains it"),
    (lambda: bf16_engine(nn.Linear(2, 2).requires_grad_(False)), "no trainable .* or every requires_grad is False"),
    (lambda: copy.deepcopy(bf16_engine()), r"neither copied nor pickled.* take deepcopy\(engine.module\)"),
    (lambda: bf16_engine(nn.Linear(2, 2, device="meta")), "weight is on the meta device .* model.to_empty"),
    (
        lambda: bf16_engine(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False, device="meta"))),
        "1.running_mean is on the meta device",
    ),
    (lambda: bf16_engine(nn.DataParallel(nn.Linear(2, 2))), "the model is wrapped by DataParallel.*module inside"),
    (
        lambda: bf16_engine(nn.ModuleDict({"norm": nn.SyncBatchNorm(4)})),
        "module norm is a SyncBatchNorm whose torch.bfloat16 weights would .* GroupNorm or LayerNorm",
    ),
    (lambda: bf16_engine(nn.EmbeddingBag(4, 2, max_norm=1.0)), "the model is a EmbeddingBag with max_norm 1.0, .*out"),
]


@pytest.mark.parametrize(("build", "message"), WRONG_KINDS)
def test_a_wrong_kind_is_answered_with_the_right_one(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


@pytest.mark.parametrize(
    ("precision", "settings"),
    [(Precision(torch.float32), {}), (BF16, {"affine": False}), (BF16, {"track_running_stats": False})],
)
def test_the_ways_out_of_batch_norm_train(precision, settings):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **settings))
    engine = make_engine(model, precision=precision)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).to(precision.dtype)
    engine.backward((engine(x).float() * torch.arange(32).view(8, 4)).mean())
    engine.step()
    assert not torch.equal(model[0].weight, before["0.weight"])
    if model[1].running_mean is not None:
        assert model[1].running_mean.dtype == torch.float32
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])


def _wrapped():
    """Refuse a model that torch has sharded or replicated, and one inside a larger model."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    plain = nn.Linear(4, 4)
    plain.weight = nn.Parameter(distribute_tensor(plain.weight.data, mesh))
    inner = make_model()
    fully_shard(inner.blocks[0], mesh=mesh)
    models = {
        "the model is wrapped by DistributedDataParallel": DistributedDataParallel(make_model()),
        "the model is wrapped by FullyShardedDataParallel": FullyShardedDataParallel(
            make_model(tied=False), device_id=torch.device("cpu")
        ),
        "the model is wrapped by FSDPModule": fully_shard(make_model(), mesh=mesh),
        "module blocks.0 is wrapped by FSDPModule": inner,
        "weight is a DTensor, .* pass the plain module": plain,
    }
    for said, model in models.items():
        with pytest.raises(ValueError, match=said):
            bf16_engine(model)


def test_a_model_inside_ddp_or_fsdp_is_refused(run_ranks):
    run_ranks(_wrapped, 2)


class _Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) + mask.to(x.dtype)


def test_fp32_inputs_are_named_when_the_module_cannot_take_them():
    engine = bf16_engine(_Masked(4, 4))
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype") as error:
        engine(torch.ones(2, 4), mask=torch.ones(2, 4).bfloat16())
    (note,) = error.value.__notes__
    assert note.startswith("input [0] of the module is torch.float32, the engine's parameters are torch.bfloat16: cast")
    assert engine(torch.ones(2, 4).bfloat16(), mask=torch.ones(2, 4)).dtype == torch.bfloat16  # a mask may be FP32
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        engine(torch.ones(2, 5).bfloat16(), mask=torch.ones(2, 4))
    assert not hasattr(error.value, "__notes__")  # the mask is not the cause


ATTEMPTS = [
    (lambda engine: torch.optim.lr_scheduler.LambdaLR(engine, len), r"'param_groups'; .*engine.set_lr\(lr\)"),
    (lambda engine: nn.utils.clip_grad_norm_(engine.parameters(), 1.0), "'parameters'; .* set clip_grad to clip"),
    (lambda engine: engine.grad_norm, r"'grad_norm'; read the result of step\(\): result.grad_norm"),
    (lambda engine: engine.nonsense, "ShardedEngine has no attribute 'nonsense'$"),
]


@pytest.mark.parametrize(("attempt", "message"), ATTEMPTS)
def test_what_torchs_objects_have_is_answered_with_what_the_engine_has(attempt, message):
    with pytest.raises(AttributeError, match=message):
        attempt(bf16_engine())


def test_an_average_copied_in_half_is_told_once_and_one_in_fp32_works(caplog):
    copy.deepcopy(make_engine().module)
    assert not caplog.records
    engine = bf16_engine()
    average = AveragedModel(engine.module, avg_fn=lambda average, weight, _: average.lerp(weight.float(), 0.5)).float()
    copy.deepcopy(engine.module)
    (message,) = caplog.messages
    assert "copied in torch.bfloat16" in message
    assert "AveragedModel" in message
    for step in range(2):
        before = [value.clone() for value in average.module.parameters()]
        train_step(engine, step)
        average.update_parameters(engine.module)
    want = [(old + param.float()) / 2 for old, param in zip(before, engine.module.parameters(), strict=True)]
    torch.testing.assert_close([*average.module.parameters()], want)


def test_a_copy_trains_under_an_engine_of_its_own():
    engine = bf16_engine()
    train_step(engine)
    other = bf16_engine(copy.deepcopy(engine.module))
    other.load_weights(engine.full_weights())
    assert train_step(engine, 1).loss == train_step(other, 1).loss


def _swap(model):
    model.blocks[1], model.blocks[2] = model.blocks[2], model.blocks[1]


def _repeat(model):
    model.blocks[2] = model.blocks[1]


def _wrap(model):
    model.blocks[1] = nn.Sequential(model.blocks[1])


CHANGES = [
    (_swap, "parameter blocks.1.gain is now the one that the engine trains as blocks.2.gain: .* another model than"),
    (_repeat, "parameter blocks.2.gain is now the one that the engine trains as blocks.1.gain"),
    (
        lambda model: setattr(model.norm, "bias", model.norm.weight),
        "parameter norm.bias is now the one that the engine trains as norm.weight",
    ),
    (
        lambda model: model.blocks[1].add_module("also", model.norm),
        "parameter blocks.1.also.weight is now the one that the engine trains as norm.weight",
    ),
    (lambda model: delattr(model.head, "weight"), "parameter head.weight is no longer in the module under this name"),
    (
        lambda model: model.blocks[1].add_module("adapter", nn.Linear(2, 2)),
        "parameter blocks.1.adapter.weight was added: nothing would train it; build the engine after the model",
    ),
    (
        lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(29, 24))),
        "parameter head.weight is another Parameter now than the one that .* nothing would train it",
    ),
    (_wrap, r"parameter blocks.1.\w+.* is no longer in the module under this name: .* its module wrapped"),
    (
        lambda model: model.blocks[2].up.weight.requires_grad_(False),
        "parameter blocks.2.up.weight was frozen .* decay and momentum would go on moving it. .* build the model anew",
    ),
    (lambda model: model.blocks[0].requires_grad_(True), "blocks.0.gain was frozen when .* nothing would train it"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
@pytest.mark.parametrize("when", ["before backward", "before step"])
def test_a_later_change_of_the_module_is_refused_by_name(change, message, when):
    model = make_model()
    model.blocks[0].requires_grad_(False)
    engine = bf16_engine(model)
    train_step(engine)
    loss = loss_of(model, make_batch(1, 0, 0))
    if when == "before step":
        engine.backward(loss)
    change(model)
    with pytest.raises(RuntimeError, match=message):
        engine.step() if when == "before step" else engine.backward(loss)


@pytest.mark.parametrize("optimizer", [AdamW, NAG])
def test_a_group_without_a_rate_keeps_its_parameters(optimizer):
    groups = (ParamGroup(pattern="blocks.0.*", lr_factor=0.0),)
    precision = Precision(torch.float16, loss_scale=StaticLossScale(2.0**8))
    engine = make_engine(None, optimizer(lr=0.1, groups=groups), precision)
    before = engine.full_weights()
    train_step(engine)
    after = engine.full_weights()
    kept = [name for name in before if torch.equal(before[name], after[name])]
    assert kept == [name for name in before if name.startswith("blocks.0.")]


def test_a_loss_in_half_is_told_once_with_what_to_write():
    engine, tokens = bf16_engine(), make_batch(0, 0, 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        train_step(engine)
        assert not told
        for _ in range(2):
            engine.backward(engine(tokens).mean())
            engine.step()
    (warning,) = told
    assert warning.filename == __file__
    assert "a rounded loss, in torch.bfloat16; compute it in FP32" in str(warning.message)
    assert "F.cross_entropy(engine(x).float(), y)" in str(warning.message)


def test_a_gradient_left_by_a_backward_that_failed_is_in_no_step():
    norms = []
    for effects in ([ValueError("planted"), None], [None]):
        model = make_model()
        weight = model.blocks[1].up.weight
        weight.register_post_accumulate_grad_hook(mock.Mock(side_effect=effects))  # it runs before the engine's hook
        engine = bf16_engine(model)
        if effects[0]:
            with pytest.raises(ValueError, match="planted"):
                train_step(engine)
        norms.append(train_step(engine).grad_norm)
    assert norms[0] == norms[1]


WRITERS = [
    train_step,
    lambda engine: engine.load_weights(engine.full_weights()),
    lambda engine: engine.load_state_dict(engine.state_dict()),
    lambda engine: engine.publish_masters(),
]


@pytest.mark.parametrize("shard", get_args(Shard))
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("write", WRITERS)
def test_a_loss_from_before_the_weights_were_written_is_refused(write, recompute, shard):
    model = make_model(recompute=recompute)
    engine = bf16_engine(model, shard=shard)
    train_step(engine)
    stale = loss_of(model, make_batch(1, 0, 0))
    write(engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
        engine.backward(stale)
    assert "before step() or a load wrote the weights: call engine.backward(loss) first" in error.value.__notes__[-1]
    train_steps(engine)


def test_a_probe_of_the_loss_scale_writes_nothing_and_takes_no_graph_away():
    engine = bf16_engine()
    loss = loss_of(engine.module, make_batch(0, 0, 0))
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)))
    engine.probe_loss_scale()
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize("shard", get_args(Shard))
def test_a_parameter_outside_the_module_is_told_by_shape_and_by_what_reads_it(caplog, shard):
    model = make_model(tied=False)
    model.blocks[0].requires_grad_(False)
    scale, table = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.ones(29, 4))
    leaf = torch.ones((), requires_grad=True)  # e.g. an input whose gradient is wanted
    tokens = make_batch(0, 0, 0)
    engine = bf16_engine(model, shard=shard)
    for step in range(4):
        if step == 2:
            engine.examine_next_step()
        x = nn.functional.embedding(tokens, table).mean(-1)
        engine.backward(((x * scale) * leaf).mean() + loss_of(model, tokens))
        engine.step()
    told = [message for message in caplog.messages if "not in the engine's module" in message]
    assert len(told) == 2
    for message in told:
        assert "shape (3, 1), read by MulBackward0" in message
        assert "shape (29, 4), read by EmbeddingBackward0" in message
        assert message.count("shape") == 2


def test_the_modules_own_parameters_are_told_of_nobody(caplog):
    for recompute in (False, True):
        train_step(bf16_engine(make_model(recompute=recompute)))
    assert not caplog.records


@pytest.mark.parametrize("shard", get_args(Shard))
def test_a_second_thread_in_backward_or_step_is_refused(shard):
    def norms(second):
        model, inside, go = make_model(), threading.Event(), threading.Event()
        engine, found = bf16_engine(model, shard=shard), []

        def wait(grad):
            inside.set()
            go.wait(60)

        if second:
            model.blocks[1].up.weight.register_hook(wait)
        thread = threading.Thread(target=lambda: found.append(train_step(engine).grad_norm))
        thread.start()
        if second:
            assert inside.wait(60)
            other = nn.Parameter(torch.ones(())).sum()
            for name, call in (("engine.backward", lambda: engine.backward(other)), (r"step\(\)", engine.step)):
                with pytest.raises(RuntimeError, match=f"{name} is called while a backward .* is under way"):
                    call()
            go.set()
        thread.join()
        return [*found, train_step(engine, 1).grad_norm]

    assert norms(second=True) == norms(second=False)


def test_a_step_that_is_applied_in_spite_of_its_loss_is_told_once(caplog):
    engine, tokens = make_engine(), make_batch(0, 0, 0)
    no_targets = torch.full_like(tokens, -100).flatten()
    told = list[int]()
    for masked in (False, True, False, True, True):
        logits = engine(tokens).flatten(0, 1)
        engine.backward(nn.functional.cross_entropy(logits, no_targets if masked else tokens.flatten()))
        result = engine.step()
        assert (bool(result.loss.isnan()), bool(result.found_inf)) == (masked, False)
        told.append(len(caplog.messages))
    assert told == [0, 0, 0, 1, 1]  # two steps later, where no step waits for the device
    assert "engine.backward(loss, weight)" in caplog.messages[0]


def test_a_step_whose_gradients_overflow_with_its_loss_is_not(caplog):
    engine = make_engine()
    for _ in range(4):
        engine.backward(loss_of(engine, make_batch(0, 0, 0)) * float("nan"))
        assert engine.step().found_inf
    assert caplog.messages == []
