"""An examined step computes the same bits, and counts every element and every micro-batch's gradient once."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megamix import NAG, AdamW, DynamicLossScale, ParamGroup, Precision
from megamix.mixed_precision import examination
from megamix.mixed_precision.examination import count_exponents, layer_of, layers_of
from tests.builders import loss_of, make_batch, make_engine, make_model

ACCUM = 2


NAMES = {
    "blocks.11.feed_forward.down.bias": "blocks.11",
    "transformer.h.3.mlp.experts.7.weight": "transformer.h.3",
    "encoder.projection.weight": "encoder.projection",
    "0.weight": "0",
    "gain": "gain",
    "scales.0": "scales",
}


def test_parameters_names_say_their_layers_in_the_order_of_the_model():
    assert {name: layer_of(name) for name in NAMES} == NAMES
    names = [name for name, _ in make_model(tied=False).named_parameters()]
    assert layers_of(names) == ("embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_value_is_counted_in_the_bin_of_its_exponent(dtype):
    smallest, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.5, -2.0, smallest, largest, float("inf"), float("nan")], dtype=dtype)
    counts = torch.zeros(256, dtype=torch.int64)
    count_exponents(values, counts)
    wanted = {0: 2, 127: 3, 128: 1, 255: 2}
    for value in (smallest, largest):
        exponent = int(torch.tensor(value, dtype=torch.float64).frexp().exponent) - 1
        wanted[127 + exponent] = wanted.get(127 + exponent, 0) + 1
    assert {exponent: count for exponent, count in enumerate(counts.tolist()) if count} == wanted


def _build(model, optimizer, precision):
    settings = {"clip_grad": 0.5, "grad_accum_steps": ACCUM}
    return make_engine(model, optimizer, precision, shard="states", bucket_size=1500, **settings)


def _trained(examined, dtype, grad_dtype, recompute):
    """Return the state and the results of four steps, one of them an overflow."""
    model = make_model(recompute=recompute)
    optimizer = AdamW(lr=0.01, groups=(ParamGroup(pattern="*.down.*", lr_factor=0.5),))
    engine = _build(model, optimizer, Precision(dtype, grad_dtype, DynamicLossScale(2.0**8, growth_interval=2)))
    said = []
    for step in range(4):
        if examined:
            engine.examine_next_step()
        for micro_batch in range(ACCUM):
            loss = loss_of(model, make_batch(step, dist.get_rank(), micro_batch), flavour=dist.get_rank())
            engine.backward(loss * float("inf") if step == 1 else loss)
        *result, recorded, _, examination = engine.step()
        assert (examination is not None) == examined
        said += [*result, recorded.table]
    engine.wait()
    for bucket in engine.buckets:
        said += [bucket.params, bucket.master, *(state for states in bucket.states for state in states.values())]
    return [*said, engine.applied_updates]


def _differences(chunk, *args):
    with mock.patch.object(examination, "_CHUNK", chunk):
        pairs = zip(_trained(False, *args), _trained(True, *args), strict=True)
    bits = [[tensor.flatten().view(torch.uint8) for tensor in pair] for pair in pairs]
    return [place for place, (plain, examined) in enumerate(bits) if not torch.equal(plain, examined)]


@pytest.mark.parametrize(
    ("chunk", "dtype", "grad_dtype", "recompute"),
    [
        (examination._CHUNK, torch.float16, torch.float16, True),
        (examination._CHUNK, torch.float16, torch.float32, False),
        (128, torch.bfloat16, torch.bfloat16, False),  # cuts leave no element out, and keep its group
        (examination._CHUNK, torch.float32, torch.float32, False),
    ],
)
def test_an_examined_step_computes_the_same_bits(run_ranks, chunk, dtype, grad_dtype, recompute):
    assert run_ranks(_differences, 2, chunk, dtype, grad_dtype, recompute) == [[], []]


def test_each_micro_batch_s_gradient_is_seen_before_it_is_added():
    model = make_model()  # tied: one parameter with two uses
    engine = _build(model, NAG(lr=0.01), Precision(torch.bfloat16, grad_dtype=torch.float32))
    seen = {}
    now = 0
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: spoil(grad, name))

    def spoil(grad, name):
        grad = grad.clone()
        if name.endswith("up.weight"):
            grad.view(-1)[: 5 + now] = float("inf")
        if name.startswith("blocks.1"):
            grad.view(-1)[-1] = float("nan")
        # A shared parameter's uses may come one by one; only their sum counts.
        seen[now, name] = seen.get((now, name), 0) + grad
        return grad

    engine.examine_next_step()
    for now in range(ACCUM):
        engine.backward(loss_of(model, make_batch(0, 0, now)))
    local = engine.step().examination.local
    for (micro_batch, name), grad in seen.items():
        inf, nan, max_abs = local[micro_batch, engine.plan.param_names.index(name)]
        assert (inf, nan) == (grad.isinf().sum(), grad.isnan().sum())
        assert torch.equal(max_abs.nan_to_num(), grad.abs().max().double().nan_to_num())
    # Three up.weight, seven parameters of blocks.1.
    assert local[:, :, :2].sum(1).tolist() == [[15.0, 7.0], [18.0, 7.0]]


def test_gradients_that_come_twice_in_a_micro_batch_are_both_counted():
    engine = _build(make_model(), NAG(lr=0.01), Precision(torch.bfloat16))
    names = engine.plan.param_names
    examiner = examination.Examiner(names, ACCUM, torch.device("cpu"))
    examiner.on_gradient("norm.weight", 1, torch.tensor([[1.0, float("inf")], [2.0, 3.0]]).T)  # not contiguous
    examiner.on_gradient("norm.weight", 1, torch.tensor([float("inf"), float("nan")]))
    local = examiner.examination.local[1, names.index("norm.weight")]
    assert local[:2].tolist() == [2.0, 1.0]
    assert local[2].isnan()


def test_a_request_holds_for_one_whole_step():
    model = make_model()
    engine = _build(model, NAG(lr=0.01), Precision(torch.bfloat16))

    def step():
        for micro_batch in range(ACCUM):
            engine.backward(loss_of(model, make_batch(0, 0, micro_batch)))
        return engine.step().examination

    engine.examine_next_step()
    assert step() is not None
    assert step() is None
    engine.examine_next_step()
    engine.backward(loss_of(model, make_batch(0, 0, 0)))
    with pytest.raises(RuntimeError, match="after 1 backward.. calls of a step; call it before the first"):
        engine.examine_next_step()
    loss = loss_of(model, make_batch(0, 0, 1))
    torch.autograd.grad(loss, model.parameters())
    with pytest.raises(RuntimeError, match="a second time"):
        engine.backward(loss)  # a failed backward discards its step
    assert step() is None
