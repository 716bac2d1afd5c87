"""The gradient of a loss given to `add_loss` is, bit for bit, that of the same loss added to the one that backward
gets: in every dtype, with a loss scale, weights and recompute, compiled, on ranks that read or divide, and in pipelines
of every schedule. Its overflow skips the step on all ranks. Without an engine its factor is 1.
"""

from unittest import mock

import pytest
import torch
from torch import nn

from megamix import Precision, StaticLossScale, add_loss
from megamix.base.added_loss import added_losses_times
from megamix.comm.topology import Topology
from megamix.parallel.micro_batch_runner import MicroBatchRunner
from tests.base.choosers import choosers
from tests.builders import BF16, FP32, loss_of, make_batch, make_engine
from tests.distributed.pipelines import SCHEDULES, Case, make_pipeline, make_whole, micro_batches

FP16 = Precision(torch.float16, loss_scale=StaticLossScale(2.0**10))
WEIGHTS = (1.0, 0.5)  # of a step's micro-batches


def _given(engine, tokens):
    """Return the loss to give to backward: with the layers' own losses, unless these are added where they arise."""
    loss = loss_of(engine, tokens)
    for block in engine.module.blocks:
        loss = loss if block.adds else loss + block.loss
    return loss


def _trained(adds, precision, axis="dp", shard=None, recompute=False):
    """Return gradient norms, and weights, after some steps on this rank."""
    topology = Topology.connect() if axis == "dp" else Topology.connect(**{axis: 2})
    model = choosers(adds=adds, recompute=recompute)
    engine = make_engine(model, precision=precision, shard=shard, topology=topology, grad_accum_steps=2)
    norms = []
    for step in range(3):
        for number, weight in enumerate(WEIGHTS):
            engine.backward(_given(engine, make_batch(step, topology.readers.rank, number)), weight)
        norms.append(float(engine.step().grad_norm))
    weights = engine.full_weights()
    return norms, {name: weight.tolist() for name, weight in weights.items() if "chosen" not in name}


@pytest.mark.parametrize("shard", ["states", "parameters"])
@pytest.mark.parametrize("precision", [FP32, BF16, FP16])
def test_its_gradient_is_that_of_the_sum_of_both_losses(precision, shard):
    wanted = _trained(False, precision)
    assert _trained(True, precision, shard=shard) == wanted
    assert _trained(True, precision, recompute=True, shard=shard) == wanted


@pytest.mark.parametrize("axis", ["dp", "cp", "replicas", "tp"])
@pytest.mark.parametrize("precision", [FP32, FP16])
def test_ranks_scale_and_divide_it_as_the_own_loss(run_ranks, precision, axis):
    added, summed = (run_ranks(_trained, 2, adds, precision, axis, "states") for adds in (True, False))
    assert added == summed


def _overflow_on_the_last_rank():
    model = choosers()
    engine = make_engine(model, precision=FP16)
    rank = engine.topology.dp.rank
    model.blocks[0].router.register_forward_hook(lambda module, args, out: out.float() * (1e38 if rank == 1 else 1.0))
    loss = loss_of(engine, make_batch(0, rank, 0))
    assert loss.isfinite()
    engine.backward(loss)
    return bool(engine.step().found_inf)


def test_its_overflow_on_one_rank_skips_the_step_on_all(run_ranks):
    assert run_ranks(_overflow_on_the_last_rank, 2) == [True, True]


def test_it_is_no_part_of_the_loss_that_is_told():
    engine = make_engine(choosers())
    loss = loss_of(engine, make_batch(0, 0, 0))
    engine.backward(loss)
    assert torch.equal(engine.step().loss, loss.detach())


def test_each_engine_has_its_own_scale_and_a_plain_model_has_none_though_a_backward_failed():
    engines = [
        make_engine(choosers(adds=adds), precision=Precision(torch.float16, loss_scale=StaticLossScale(scale)))
        for adds, scale in ((True, 2.0**4), (True, 2.0**12), (False, 2.0**4))
    ]
    losses = [_given(engine, make_batch(0, 0, 0)) for engine in engines]
    for engine, loss in zip(engines, losses, strict=True):
        engine.backward(loss)
    *norms, summed = (float(engine.step().grad_norm) for engine in engines)
    assert norms == pytest.approx([summed] * 2, rel=2e-3)
    loss = loss_of(engines[0], make_batch(0, 0, 0))
    loss.register_hook(mock.Mock(side_effect=ValueError("planted")))
    with pytest.raises(ValueError, match="planted"):
        engines[0].backward(loss)
    grads = []
    for adds in (True, False):
        model = choosers(adds=adds)
        loss = loss_of(model, make_batch(0, 0, 0))
        (loss if adds else loss + sum(block.loss for block in model.blocks)).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_compiled_blocks_read_the_factor_in_backward():
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

    compiled = torch.compile(forward, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    for factor in (1.0, torch.tensor(64.0), torch.tensor(3.0), 0.0):
        torch.testing.assert_close(gradient(compiled, factor), gradient(forward, factor))
    assert not torch.equal(gradient(compiled, 2.0), gradient(compiled, 1.0))


EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "balance_loss": 0.5, "z_loss": 0.1, "bias_rate": 0.01}


def _compare(cases):
    """Compare pipelines of experts with one process, bit for bit."""
    topology = Topology.connect(pp=2)
    for case in cases:
        (engine, pipeline), whole = make_pipeline(case, topology), make_whole(case, topology)
        plain = MicroBatchRunner(whole)
        for step in range(3):
            pipeline.forward_backward(micro_batches(case, step, 0))
            plain.forward_backward(micro_batches(case, step, 0))
            got, want = engine.step(), whole.step()
            assert torch.equal(got.grad_norm, want.grad_norm), f"{case}: step {step}"
            assert not got.found_inf
            assert 0 < len(got.tallied) < len(want.tallied)
            for name, counts in got.tallied.items():
                assert torch.equal(counts, want.tallied[name]), f"{case}: counts of {name} in step {step}"
        weights, expected = engine.full_weights(), whole.full_weights()
        assert not [name for name in expected if not torch.equal(weights[name], expected[name])], case
        assert any(weights[name].any() for name in weights if name.endswith("balance.value")), "no bias has moved"


def test_stages_of_a_pipeline_add_losses_and_counts_as_one_process_does(run_ranks):
    more = (("experts", EXPERTS),)
    cases = [Case(schedule=schedule, dtype=torch.float16, more=more, packed=True) for schedule in SCHEDULES]
    cases.append(Case(more=(*more, ("recompute", "full"))))
    run_ranks(_compare, 2, cases, deadline_s=120.0)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (torch.ones(2), r"of shape \(\), got \(2,\); pass its mean\(\)"),
        (torch.ones((), dtype=torch.bfloat16), "FP32 or FP64, got torch.bfloat16"),
    ],
)
def test_a_loss_of_another_shape_or_dtype_is_refused(loss, told):
    with pytest.raises(ValueError, match=f"add_loss: loss must be {told}"):
        add_loss(torch.ones(2, requires_grad=True), loss)
