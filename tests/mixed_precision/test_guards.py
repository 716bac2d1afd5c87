"""Whoever writes a training script: arguments of a wrong kind, and changes of the module that training would not
notice, are refused with a fix; an average of weights and a loss in half are logged.
"""

import copy
import logging
import threading
import warnings
from typing import get_args

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from megamix import NAG, AdamW, Checkpoints, ParamGroup, Precision, ShardedEngine, StaticLossScale
from megamix.mixed_precision.settings import Shard
from tests.builders import BF16, bf16_engine, loss_of, make_batch, make_engine, make_model, train_step


def _with_batch_norm(kind, **settings):
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"norm": kind(4, **settings)}))


WRONG_KINDS = [
    (
        lambda: ShardedEngine(make_model(), torch.optim.AdamW(make_model().parameters(), lr=1e-3)),
        TypeError,
        r"optimizer is torch.optim.AdamW, .* pass megamix.AdamW\(lr=3e-4\) or megamix.NAG",
    ),
    (
        lambda: ShardedEngine(make_model(), 3e-4),
        TypeError,
        r"optimizer is a float, not of Optimizer; pass megamix.AdamW",
    ),
    (lambda: ShardedEngine(make_model().parameters(), AdamW(lr=1.0)), TypeError, "model is a generator, not of Module"),
    (
        lambda: make_engine(precision=torch.bfloat16),
        TypeError,
        r"precision is a dtype, not of Precision; pass megamix.Pr",
    ),
    (lambda: bf16_engine(sharding=[]), TypeError, r"sharding is a list, not of Sharding; pass megamix.Sharding\(...\)"),
    (
        lambda: AdamW(lr=1.0, groups=[{"params": [], "lr": 0.1}]),
        TypeError,
        r"groups takes ParamGroup, got dict .*; write ParamGroup\(pattern=",
    ),
    (lambda: AdamW(make_model().parameters(), lr=1e-3), TypeError, r"AdamW takes settings by name.*: write AdamW\(lr="),
    (lambda: NAG(params=make_model().parameters(), lr=1e-3), TypeError, "NAG takes settings by name, and no param"),
    (
        lambda: AdamW(lr=1e-3, amsgrad=True, foreach=True),
        TypeError,
        r"AdamW: got an unexpected keyword argument 'amsgrad'; write its settings by name: AdamW\(lr=..., .*eps=..., ",
    ),
    (
        lambda: ParamGroup("*.bias"),
        TypeError,
        r"ParamGroup: too many positional .*; write its settings by name: ParamGroup\(pattern=..., lr_factor=",
    ),
    (
        lambda: ParamGroup(pattern="*.bias", amsgrad=True),
        TypeError,
        r"ParamGroup: got an unexpected .* 'amsgrad'; write its settings by name: ParamGroup\(pattern=..., lr_factor=",
    ),
    (lambda: Checkpoints(make_model(), "runs"), TypeError, "engine is a .*; pass the ShardedEngine that trains it"),
    (lambda: bf16_engine(nn.ReLU()), ValueError, "no trainable parameter: it has none, or"),
    (
        lambda: bf16_engine(nn.Linear(2, 2).requires_grad_(False)),
        ValueError,
        "no trainable parameter: it has none, or every requires_grad is False",
    ),
    (lambda: copy.deepcopy(bf16_engine()), TypeError, r"neither copied nor pickled.* take deepcopy\(engine.module\)"),
    (
        lambda: AdamW(lr=torch.tensor(1.0)),
        TypeError,
        r"lr of AdamW must be a number, or a sequence .*, got tensor\(1\.\)",
    ),
    (lambda: AdamW(lr="1e-3"), TypeError, "lr of AdamW must be a number, or a sequence .*, got '1e-3'"),
    (lambda: bf16_engine(nn.Linear(2, 2, device="meta")), ValueError, "weight is on the meta device .* model.to_empty"),
    (
        lambda: bf16_engine(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False, device="meta"))),
        ValueError,
        "1.running_mean is on the meta device",
    ),
    (
        lambda: bf16_engine(nn.DataParallel(nn.Linear(2, 2))),
        ValueError,
        "the model is wrapped by DataParallel.*module inside",
    ),
    *(
        (
            lambda kind=kind: bf16_engine(_with_batch_norm(kind)),
            ValueError,
            f"module 1.norm is a {kind.__name__} whose torch.bfloat16 weights would .* GroupNorm or LayerNorm",
        )
        for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
    ),
]


@pytest.mark.parametrize(("build", "kind", "message"), WRONG_KINDS)
def test_a_wrong_kind_is_answered_with_the_right_one(build, kind, message):
    with pytest.raises(kind, match=message):
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
    """Return the engine's error for a model that torch has sharded or replicated, and for one inside a larger model."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (2,))
    sharded = fully_shard(make_model(), mesh=mesh)
    inner = make_model()
    fully_shard(inner.blocks[0], mesh=mesh)
    models = [DistributedDataParallel(make_model()), nn.ModuleDict({"net": DistributedDataParallel(make_model())})]
    models += [FullyShardedDataParallel(make_model(tied=False), device_id=torch.device("cpu")), sharded, inner]
    told = []
    for model in models:
        try:
            bf16_engine(model)
        except ValueError as error:
            told.append(str(error))
    from torch.distributed.tensor import distribute_tensor

    plain = nn.Linear(4, 4)
    plain.weight = nn.Parameter(distribute_tensor(plain.weight.data, mesh))
    with pytest.raises(ValueError, match="weight is a DTensor, .* pass the plain module") as error:
        bf16_engine(plain)
    return [*told, str(error.value)]


def test_a_model_inside_ddp_or_fsdp_is_refused(run_ranks):
    for ddp, inner_ddp, fsdp1, fsdp2, inner_fsdp2, _ in run_ranks(_wrapped, 2):
        assert "the model is wrapped by DistributedDataParallel" in ddp
        assert "module net is wrapped by DistributedDataParallel" in inner_ddp
        assert "the model is wrapped by FullyShardedDataParallel" in fsdp1
        assert "the model is wrapped by FSDPModule" in fsdp2
        assert "module blocks.0 is wrapped by FSDPModule" in inner_fsdp2


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
    (
        lambda engine: torch.optim.lr_scheduler.LambdaLR(engine, lambda step: 1.0),
        r"'param_groups'; .*engine.set_lr\(lr\)",
    ),
    (lambda engine: engine.zero_grad(), "'zero_grad'; there is nothing to clear"),
    (lambda engine: nn.utils.clip_grad_norm_(engine.parameters(), 1.0), "'parameters'; .* set clip_grad to clip"),
    (lambda engine: engine.eval(), r"'eval'; call engine.module.eval\(\)"),
    (lambda engine: engine.save("runs/mine"), r"'save'; call megamix.Checkpoints\(engine, folder\).save"),
    (lambda engine: engine.load("runs/mine"), r"'load'; call megamix.Checkpoints\(engine, folder\).load"),
    (lambda engine: engine.model, "'model'; the module is engine.module"),
    (lambda engine: engine.grad_norm, r"'grad_norm'; read the result of step\(\): result.grad_norm"),
    (
        lambda engine: engine.save_checkpoint("runs/mine"),
        r"'save_checkpoint'; call megamix.Checkpoints\(engine, folder",
    ),
    (lambda engine: engine.lr_scheduler.step(), r"'lr_scheduler'; .*engine.set_lr\(lr\)"),
    (lambda engine: engine.nonsense, "ShardedEngine has no attribute 'nonsense'$"),
]


@pytest.mark.parametrize(("attempt", "message"), ATTEMPTS)
def test_what_torchs_objects_have_is_answered_with_what_the_engine_has(attempt, message):
    with pytest.raises(AttributeError, match=message):
        attempt(bf16_engine())


def _ema(average, weight, count):
    return average.lerp(weight.float(), 0.001)


def _ema_in_half(caplog, precision):
    engine = make_engine(precision=precision)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megamix"):
        AveragedModel(engine.module, avg_fn=get_ema_avg_fn(0.999))
        copy.deepcopy(engine.module)  # logged once
    return [record.getMessage() for record in caplog.records]


def test_an_average_copied_in_half_is_told_and_what_the_words_say_works(caplog):
    (message,) = _ema_in_half(caplog, BF16)
    assert "copied in torch.bfloat16" in message
    assert "AveragedModel" in message
    assert _ema_in_half(caplog, Precision(torch.float32)) == []
    model = make_model()
    early = AveragedModel(model, avg_fn=_ema)
    engine = bf16_engine(model)
    late = AveragedModel(engine.module, avg_fn=_ema).float()
    half = AveragedModel(engine.module, avg_fn=get_ema_avg_fn(0.999))
    want = {}
    for step in range(4):
        train_step(engine, step)
        for average in (early, late, half):
            average.update_parameters(engine.module)
        now = {name: param.detach().double() for name, param in model.named_parameters()}
        want = {name: 0.999 * want[name] + 0.001 * now[name] if want else now[name].clone() for name in now}
    for average in (early, late):
        for name, value in average.module.named_parameters():
            assert value.dtype == torch.float32
            assert torch.allclose(value.double(), want[name], rtol=2.0**-21, atol=1e-9), name
    lost = [
        not torch.allclose(v.double(), want[n], rtol=2.0**-21, atol=1e-9) for n, v in half.module.named_parameters()
    ]
    assert any(lost)  # the reason for the log line


def test_a_copy_trains_under_an_engine_of_its_own():
    engine = bf16_engine()
    train_step(engine)
    other = bf16_engine(copy.deepcopy(engine.module))
    other.load_weights(engine.full_weights())
    for one in (engine, other):
        one.backward(loss_of(one.module, make_batch(1, 0, 0)))
    first, second = engine.step(), other.step()
    assert float(first.loss) == float(second.loss)


def _add_parameter(model):
    model.blocks[1].scale = nn.Parameter(torch.ones(1))


def _add_module(model):
    model.blocks[1].adapter = nn.Linear(2, 2)


def _replace_module(model):
    model.head = nn.Linear(24, 29, bias=False)


def _delete_and_replace(model):
    del model.norm
    model.norm = nn.LayerNorm(24)


def _untie(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def _take_out(model):
    del model.blocks[1].gain


def _wrap(model):
    model.blocks[1] = nn.Sequential(model.blocks[1])


def _swap(model):
    model.blocks[1], model.blocks[2] = model.blocks[2], model.blocks[1]


def _repeat(model):
    model.blocks[2] = model.blocks[1]


def _tie(model):
    model.norm.bias = model.norm.weight


def _name_again(model):
    model.blocks[1].also = model.norm


def _drop_a_name(model):
    del model.head.weight


CHANGES = [
    (_swap, "parameter blocks.1.gain is now the one that the engine trains as blocks.2.gain: .* another model than"),
    (_repeat, "parameter blocks.2.gain is now the one that the engine trains as blocks.1.gain"),
    (_tie, "parameter norm.bias is now the one that the engine trains as norm.weight"),
    (_name_again, "parameter blocks.1.also.weight is now the one that the engine trains as norm.weight"),
    (_drop_a_name, "parameter head.weight is no longer in the module under this name"),
    (_add_parameter, "parameter blocks.1.scale was added: nothing would train it; build the engine after the model"),
    (_add_module, "parameter blocks.1.adapter.weight was added: nothing would train it"),
    (_replace_module, "parameter head.weight is another Parameter now than the one that .* nothing would train it"),
    (_delete_and_replace, "parameter norm.weight is another Parameter now"),
    (_untie, "parameter head.weight is another Parameter now"),
    (_take_out, "parameter blocks.1.gain is no longer in the module under this name"),
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


def test_a_change_that_leaves_the_parameters_alone_is_none():
    model = make_model()
    engine, plain = bf16_engine(model), bf16_engine()
    for step in range(3):
        if step == 1:
            model.blocks[1].probe = nn.Dropout(0.5)
        train_step(engine, step)
        train_step(plain, step)
    assert torch.equal(engine.buckets[0].master, plain.buckets[0].master)


def test_a_parameter_is_frozen_later_as_the_message_says():
    engine = bf16_engine()
    train_step(engine)
    frozen = make_model()
    frozen.load_state_dict(engine.full_weights())
    frozen.blocks[0].requires_grad_(False)
    before = frozen.blocks[0].up.weight.detach().bfloat16()
    second = bf16_engine(frozen)
    train_step(second, 1)
    assert torch.equal(frozen.blocks[0].up.weight, before)


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


def _grad_before_the_build(engine_of):
    model = make_model()
    loss_of(model, make_batch(0, 0, 0)).backward()
    engine_of(model)


def _grad_before_a_pass(engine_of):
    engine = engine_of(make_model())
    train_step(engine)
    weight = engine.module.blocks[1].up.weight
    weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
    engine.backward(loss_of(engine.module, make_batch(1, 0, 0)))


def _grad_before_the_step(engine_of):
    engine = engine_of(make_model())
    engine.backward(loss_of(engine.module, make_batch(0, 0, 0)))
    weight = engine.module.blocks[1].up.weight
    weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
    engine.step()


@pytest.mark.parametrize("shard", get_args(Shard))
@pytest.mark.parametrize(
    ("put", "message"),
    [
        (_grad_before_the_build, r"embedding.weight has a .grad already.*call model.zero_grad\(\)"),
        (_grad_before_a_pass, r"parameter blocks.1.up.weight has a .grad that is not the eng.*model.zero_grad\(\)"),
        (_grad_before_the_step, r"parameter blocks.1.up.weight has a .grad that is not the engine's"),
    ],
)
def test_a_gradient_that_somebody_put_there_is_refused_by_name(put, message, shard):
    with pytest.raises((ValueError, RuntimeError), match=message):
        put(lambda model: bf16_engine(model, shard=shard))


def test_a_gradient_left_by_a_backward_that_failed_is_in_no_step():
    def first_norm(fail):
        model = make_model()
        weight, fails = model.blocks[1].up.weight, [fail]

        def user_hook(param):
            if any(fails):
                fails.clear()
                raise ValueError("planted")

        weight.register_post_accumulate_grad_hook(user_hook)  # runs before the engine's hook
        engine = bf16_engine(model)
        if fail:
            with pytest.raises(ValueError, match="planted"):
                engine.backward(loss_of(model, make_batch(0, 0, 0)) * 1000)
        engine.backward(loss_of(model, make_batch(0, 0, 0)))
        return float(engine.step().grad_norm)

    assert first_norm(True) == first_norm(False)


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
    for step in range(2):
        train_step(engine, step)


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

    def loss():
        x = nn.functional.embedding(tokens, table).mean(-1)
        return ((x * scale) * leaf).mean() + loss_of(model, tokens)

    engine = bf16_engine(model, shard=shard)
    with caplog.at_level(logging.WARNING, logger="megamix"):
        for step in range(4):
            if step == 2:
                engine.examine_next_step()
            engine.backward(loss())
            engine.step()
    told = [record.getMessage() for record in caplog.records if "not in the engine's module" in record.getMessage()]
    assert len(told) == 2
    for message in told:
        assert "shape (3, 1), read by MulBackward0" in message
        assert "shape (29, 4), read by EmbeddingBackward0" in message
        assert message.count("shape") == 2


def test_the_modules_own_parameters_are_told_of_nobody(caplog):
    with caplog.at_level(logging.WARNING, logger="megamix"):
        for recompute in (False, True):
            train_step(bf16_engine(make_model(recompute=recompute)))
    assert not caplog.records


@pytest.mark.parametrize("shard", get_args(Shard))
def test_a_second_thread_in_backward_or_step_is_refused(shard):
    def norms(second):
        model, inside, go = make_model(), threading.Event(), threading.Event()
        engine = bf16_engine(model, shard=shard)
        loss, found = loss_of(model, make_batch(0, 0, 0)), []

        def wait(grad):
            inside.set()
            go.wait(60)

        def train():
            engine.backward(loss)
            found.append(float(engine.step().grad_norm))

        if second:
            model.blocks[1].up.weight.register_hook(wait)
        thread = threading.Thread(target=train)
        thread.start()
        if second:
            assert inside.wait(60)
            other = nn.Parameter(torch.ones(())).sum()
            for name, call in (("engine.backward", lambda: engine.backward(other)), (r"step\(\)", engine.step)):
                with pytest.raises(RuntimeError, match=f"{name} is called while a backward .* is under way"):
                    call()
            go.set()
        thread.join()
        engine.backward(loss_of(model, make_batch(1, 0, 0)))
        return [*found, float(engine.step().grad_norm)]

    assert norms(second=True) == norms(second=False)


def test_a_hook_that_takes_a_gradient_away_is_named():
    model = make_model()
    model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    engine = bf16_engine(model)
    with pytest.raises(RuntimeError, match=r"a hook on parameter blocks.1.up.weight has set its .grad to None.*"):
        train_step(engine)
