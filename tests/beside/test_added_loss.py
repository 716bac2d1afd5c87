"""The gradient of a loss given to `add_loss` is, bit for bit, that of the same loss added to the one that backward
gets: in every dtype, with a loss scale, weights and recompute, compiled, on ranks that read or divide, and in pipelines
of every schedule. Its overflow skips the step on all ranks. Without an engine its factor is 1.
"""

import pytest
import torch
from torch import nn

import megamix
from megamix import Precision, StaticLossScale, add_loss
from megamix.beside.added_loss import added_losses_times
from megamix.comm.topology import Topology
from megamix.parallel.micro_batch_runner import MicroBatchRunner
from tests.beside.choosers import Choosers, choosers, loss_of, tokens_of
from tests.builders import BF16, FP32, make_engine
from tests.distributed.pipelines import SCHEDULES, Case, make_pipeline, make_whole, micro_batches, state_of

FP16 = Precision(torch.float16, loss_scale=StaticLossScale(2.0**10))
WEIGHTS = (1.0, 0.5)  # of a step's micro-batches


def _given(engine, tokens):
    """Return the loss to give to backward: with the layers' own losses, unless these are added where they arise."""
    model, loss = engine.module, loss_of(engine, tokens)
    assert isinstance(model, Choosers)
    for block in model.blocks:
        loss = loss if block.adds else loss + block.loss
    return loss


def _trained(adds, precision=FP32, axis="dp", **settings):
    """Return gradient norms, and weights, after some steps on this rank."""
    topology = Topology.connect() if axis == "dp" else Topology.connect(**{axis: 2})
    model = choosers(adds=adds, recompute=settings.pop("recompute", False))
    engine = make_engine(model, precision=precision, topology=topology, grad_accum_steps=2, **settings)
    norms = []
    for step in range(3):
        for number, weight in enumerate(WEIGHTS):
            engine.backward(_given(engine, tokens_of(step, topology.readers.rank, number)), weight)
        norms.append(float(engine.step().grad_norm))
    weights = engine.full_weights()
    return [norms, *(weights[name].flatten().tolist() for name in sorted(weights) if "chosen" not in name)]


@pytest.mark.parametrize("shard", ["states", "parameters"])
@pytest.mark.parametrize("precision", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_its_gradient_is_that_of_the_sum_of_both_losses(precision, shard):
    wanted = _trained(False, precision)
    assert _trained(True, precision, shard=shard) == wanted
    assert _trained(True, precision, recompute=True, shard=shard) == wanted


def _both(precision, axis):
    return [_trained(adds, precision, axis, shard="states") for adds in (True, False)]


@pytest.mark.parametrize("axis", ["dp", "cp", "replicas", "tp"])
@pytest.mark.parametrize("precision", [FP32, FP16], ids=["fp32", "fp16"])
def test_ranks_scale_and_divide_it_as_the_own_loss(run_ranks, precision, axis):
    for added, summed in run_ranks(_both, 2, precision, axis):
        assert added == summed


def _overflow_on_the_last_rank():
    model = choosers()
    engine = make_engine(model, precision=FP16)
    router = model.blocks[0].router
    told = []
    for overflows in (False, True, False):
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        times = 1e38 if overflows and engine.topology.dp.rank == 1 else 1.0
        hook = router.register_forward_hook(lambda module, args, out, times=times: out.float() * times)
        engine.backward(loss_of(engine, tokens_of(0, engine.topology.dp.rank)))
        hook.remove()
        result = engine.step()
        same = all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
        told.append((bool(result.found_inf), same, bool(result.loss.isfinite()), float(result.loss)))
    return told


def test_its_overflow_on_one_rank_skips_the_step_on_all(run_ranks):
    first, second = run_ranks(_overflow_on_the_last_rank, 2)
    assert first == second
    assert [told[:3] for told in first] == [(False, False, True), (True, True, True), (False, False, True)]


def test_it_is_no_part_of_the_loss_that_is_told():
    engine = make_engine(choosers())
    loss = loss_of(engine, tokens_of(0))
    engine.backward(loss)
    assert torch.equal(engine.step().loss, loss.detach())


def _check_plain():
    """Compare the gradients of a model without an engine."""
    grads = []
    for adds in (True, False):
        model = choosers(adds=adds)
        loss = loss_of(model, tokens_of(0))
        (loss if adds else loss + sum(block.loss for block in model.blocks)).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_without_an_engine_its_factor_is_one():
    _check_plain()


def test_each_engine_has_its_own_scale_and_a_plain_model_has_none_after_it():
    scales = (2.0**4, 2.0**12)
    engines = [make_engine(choosers(), precision=_fp16(scale)) for scale in scales]
    losses = [loss_of(engine, tokens_of(0)) for engine in engines]
    for engine, loss in zip(engines, losses, strict=True):
        engine.backward(loss)
    norms = [float(engine.step().grad_norm) for engine in engines]
    summed = make_engine(choosers(adds=False), precision=_fp16(scales[0]))
    summed.backward(_given(summed, tokens_of(0)))
    assert norms == pytest.approx([float(summed.step().grad_norm)] * 2, rel=2e-3)
    _check_plain()


def _fp16(scale):
    return Precision(torch.float16, loss_scale=StaticLossScale(scale))


def test_a_backward_that_fails_leaves_no_factor_behind():
    engine = make_engine(choosers(), precision=FP16)

    def fail(grad):
        raise ValueError("planted")

    loss = loss_of(engine, tokens_of(0))
    loss.register_hook(fail)
    with pytest.raises(ValueError, match="planted"):
        engine.backward(loss)
    _check_plain()


@pytest.mark.uncounted
@pytest.mark.parametrize("backend", ["eager", "aot_eager_decomp_partition"])
def test_compiled_blocks_read_the_factor_in_backward(backend):
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)

    def forward(x):
        out = layer(x).relu()
        return add_loss(out, out.square().mean())

    def gradient(called, factor):
        out = called(torch.arange(8.0).view(2, 4)).sum()
        with added_losses_times(factor):
            (grad,) = torch.autograd.grad(out, layer.weight)
        return grad

    compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
    for factor in (1.0, torch.tensor(64.0), torch.tensor(3.0), 0.0):
        torch.testing.assert_close(gradient(compiled, factor), gradient(forward, factor))
    assert not torch.equal(gradient(compiled, 2.0), gradient(compiled, 1.0))


EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "balance_loss": 0.5, "z_loss": 0.1, "bias_rate": 0.01}


def _differences(cases):
    """Return the differences of pipelines of experts from one process, bit for bit."""
    topology, wrong = Topology.connect(pp=2), []
    for case in cases:
        engine, pipeline = make_pipeline(case, topology)
        whole = make_whole(case, topology)
        plain, tallied = MicroBatchRunner(whole), {}
        for step in range(3):
            pipeline.forward_backward(micro_batches(case, step, 0))
            plain.forward_backward(micro_batches(case, step, 0))
            got, want = engine.step(), whole.step()
            if not torch.equal(got.grad_norm, want.grad_norm) or got.found_inf:
                wrong.append(f"{case}: grad_norm {got.grad_norm} instead of {want.grad_norm} in step {step}")
            for name, counts in got.tallied.items():
                tallied[name] = counts
                if not torch.equal(counts, want.tallied[name]):
                    wrong.append(f"{case}: counts of {name} in step {step}")
        reference = state_of(whole)
        for name, tensors in state_of(engine).items():
            if not all(torch.equal(one, other) for one, other in zip(tensors, reference[name], strict=True)):
                wrong.append(f"{case}: {name}")
        weights, expected = engine.full_weights(), whole.full_weights()
        wrong += [f"{case}: full weight {name}" for name in expected if not torch.equal(weights[name], expected[name])]
        if not 0 < len(tallied) < len(want.tallied):
            wrong.append(f"{case}: tallies {[*tallied]} of {[*want.tallied]}")
        if not any(weights[name].any() for name in weights if name.endswith("balance.value")):
            wrong.append(f"{case}: no bias has moved")
    return wrong


@pytest.mark.uncounted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stages_of_a_pipeline_add_losses_and_counts_as_one_process_does(run_ranks, dtype):
    more = (("experts", EXPERTS),)
    cases = [Case(schedule=schedule, dtype=dtype, more=more, packed=True) for schedule in SCHEDULES]
    cases.append(Case(dtype=dtype, more=(*more, ("recompute", "full"))))
    assert run_ranks(_differences, 2, cases, deadline_s=120.0) == [[], []]


def test_a_loss_of_another_shape_is_refused():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"add_loss: loss must be of shape \(\), got \(2,\); pass its mean\(\)"):
        megamix.add_loss(x, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_a_loss_of_another_dtype_is_refused(dtype):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=f"add_loss: loss must be FP32 or FP64, got {dtype}"):
        megamix.add_loss(x, torch.ones((), dtype=dtype))
