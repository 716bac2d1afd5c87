"""Every schedule of a pipeline trains the bits of one process, with recompute, packing and data-parallel ranks as well;
a tied table stays within a derived bound. An overflow on any stage changes nothing on any stage; dp2 tp2 pp2 runs on
eight ranks.
"""

import itertools
import random
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining import schedules

from megamix.checkpoint.all_or_none import AllOrNone
from megamix.checkpoint.load import load, read_on_all
from megamix.checkpoint.manifest import RunRecord
from megamix.checkpoint.save import save
from megamix.checkpoint.snapshot import take_snapshot
from megamix.comm.topology import Topology
from megamix.model.transformer import Block, Transformer
from megamix.parallel.micro_batch_runner import MicroBatchRunner
from megamix.tools.verify.core.observed_step import rank_device
from tests.conftest import FULL
from tests.distributed.pipelines import (
    SCHEDULES,
    Case,
    batches,
    by_name,
    make_pipeline,
    make_whole,
    micro_batches,
    pipeline_engine,
    state_of,
)  # fmt: skip

STEPS = 3 if FULL else 2
DEADLINE_S = 900.0 if FULL else 120.0  # seconds for many cases
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = ((FP32, None), (BF16, None), (FP16, None), (FP16, FP32))


def _picks(count, pp_size=2):
    """Return untied cases in which every value of every setting appears, then further ones at random."""
    product = [
        Case(schedule=schedule, dtype=dtype, grad_dtype=grad_dtype, model=model, rounds=rounds, pp_size=pp_size)
        for schedule, (dtype, grad_dtype), model, rounds in itertools.product(
            SCHEDULES, DTYPES, ("gpt", "llama"), (1, 2)
        )
        if pp_size == 2 or schedule in ("1f1b", "zbv_zero_bubble")  # one stage per rank, and two
    ]
    random.Random(3).shuffle(product)
    covering, seen = [], set()
    for case in product:
        new = {("schedule", case.schedule), ("dtype", case.dtype, case.grad_dtype)} - seen
        if new | ({("model", case.model, case.rounds)} - seen):
            seen |= new | {("model", case.model, case.rounds)}
            covering.append(case)
    return covering + [case for case in product if case not in covering][: max(0, count - len(covering))]


def _differences(case, topology):
    """Return the differences, bit for bit, after some steps on this rank's part."""
    engine, pipeline = make_pipeline(case, topology)
    whole = make_whole(case, topology)
    plain, dp_rank, wrong = MicroBatchRunner(whole), topology.dp.rank, []
    for step in range(STEPS):
        spans = engine.clock.entered
        pipeline.forward_backward(micro_batches(case, step, dp_rank))
        if engine.clock.entered - spans < 2 * engine.grad_accum_steps:
            wrong.append(f"step {step}: its chunks are one place for the watchdog")
        plain.forward_backward(micro_batches(case, step, dp_rank))
        got, want = engine.step(), whole.step()
        for field in ("loss", "grad_norm", "max_abs", "found_inf"):
            if not torch.equal(getattr(got, field), getattr(want, field)):
                wrong.append(f"step {step}: {field} {getattr(got, field)} instead of {getattr(want, field)}")
    wrong += _evaluation_differences(case, pipeline, plain, dp_rank)
    reference = state_of(whole)
    for name, tensors in state_of(engine).items():
        for kind, one, other in zip(("master", "exp_avg", "exp_avg_sq", "half"), tensors, reference[name], strict=True):
            if not torch.equal(one, other):
                wrong.append(f"{kind} of {name}")
    weights, expected = engine.full_weights(), whole.full_weights()
    wrong += [f"full weight {name}" for name, want in expected.items() if not torch.equal(weights[name], want)]
    return wrong


def _evaluation_differences(case, pipeline, plain, dp_rank):
    both = [
        runner.engine.world.table(runner.evaluate(batches(case, 9, dp_rank))).sum(0) for runner in (pipeline, plain)
    ]
    return [] if torch.equal(*both) else [f"the loss of an evaluation: {both}"]


def _differences_in_parts(cases):
    topology, wrong = Topology.connect(pp=cases[0].pp_size), []
    for case in cases:
        _, pipeline = make_pipeline(case, topology)
        plain = MicroBatchRunner(make_whole(case, topology))
        calls = mock.Mock(side_effect=pipeline._run)
        with mock.patch.object(pipeline, "_run", calls):
            wrong += _evaluation_differences(case, pipeline, plain, topology.dp.rank)
        if calls.call_count != 2:
            wrong.append(f"{case}: {calls.call_count} parts")
    return wrong


def _all_differences(cases):
    topology = Topology.connect(pp=cases[0].pp_size)
    return [f"{case}: {line}" for case in cases for line in _differences(case, topology)[:3]]


@pytest.mark.uncounted
def test_every_schedule_equals_one_process(run_ranks):
    assert run_ranks(_all_differences, 2, _picks(1000 if FULL else 0), deadline_s=DEADLINE_S) == [[], []]


@pytest.mark.uncounted
def test_an_evaluation_in_two_parts_equals_one_process(run_ranks):
    cases = [
        Case(schedule=schedule, dtype=FP16, packed=True, rounds=8) for schedule in [*SCHEDULES][:: 1 if FULL else 2]
    ]
    assert run_ranks(_differences_in_parts, 2, cases) == [[], []]


@pytest.mark.uncounted
def test_pipelines_side_by_side_equal_data_parallel_ranks(run_ranks):
    cases = [case for case in _picks(1000) if case.dtype != FP32 or FULL]
    assert run_ranks(_all_differences, 4, cases[: None if FULL else 2], deadline_s=DEADLINE_S) == [[]] * 4


@pytest.mark.uncounted
def test_four_stages_and_eight_equal_one_process(run_ranks):
    cases = _picks(1000, pp_size=4)
    assert run_ranks(_all_differences, 4, cases[: None if FULL else 2], deadline_s=DEADLINE_S) == [[]] * 4


@pytest.mark.uncounted
def test_recompute_packed_documents_and_their_weights_equal_one_process(run_ranks):
    cases = [
        Case(schedule=schedule, dtype=FP16, packed=True, more=(("recompute", recompute),), rounds=2)
        for schedule, recompute in (("1f1b", "full"), ("zbv_zero_bubble", "full"), ("interleaved_1f1b", "selective"))
        if schedule in SCHEDULES
    ]
    assert run_ranks(_all_differences, 2, cases, deadline_s=DEADLINE_S) == [[], []]


# Both ends of the pipeline hold a tied table, or the one rank of a V that has both ends.


def _table_bound(case, dp_size):
    """Return how far two orders of summation of a tied table's gradient may be apart, element by element.

    Each of the 2 n parts (n micro-batches, looked up and multiplied) on each of dp_size ranks passes fewer than 2 n + 2
    dp_size roundings on its way into the sum, in either order. Each rounding is at most u times the sum so far; two
    sums double the bound. One process adds the two uses of a micro-batch in half, whatever dtype it adds micro-batches
    in. Roundings within a part are the same in both orders.
    """
    sums = torch.zeros(())
    for dp_rank in range(dp_size):
        torch.manual_seed(5)
        model = Transformer(case.config()).to(case.dtype)
        model.head.weight = torch.nn.Parameter(model.embedding.weight.detach().clone())
        for batch in batches(case, 0, dp_rank):
            (model(*batch.inputs) * 2.0**8).backward()
            for weight in (model.embedding.weight, model.head.weight):
                sums = sums + weight.grad.double().abs()
                weight.grad = None
    unit = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}[case.dtype]
    smallest = 2.0**-24 if case.dtype == FP16 else 0.0
    roundings = 2 * (2 * case.micro_batches + 2 * dp_size)
    return (roundings * (unit * sums + smallest)).flatten()


def _tied(case):
    topology = Topology.connect(pp=case.pp_size)
    engine, pipeline = make_pipeline(case, topology)
    whole = make_whole(case, topology)
    wrong = []
    pipeline.forward_backward(micro_batches(case, 0, topology.dp.rank))
    MicroBatchRunner(whole).forward_backward(micro_batches(case, 0, topology.dp.rank))
    engine.step(), whole.step()
    grads, expected = _summed(engine), _summed(whole)
    for name, grad in grads.items():
        if name == "embedding.weight":
            if ((grad - expected[name]).abs() > _table_bound(case, topology.dp.size)).any():
                wrong.append(f"{name} is {(grad - expected[name]).abs().max()} off")
        elif not torch.equal(grad, expected[name]):
            wrong.append(name)
    for step in range(1, STEPS):
        pipeline.forward_backward(micro_batches(case, step, topology.dp.rank))
        engine.step()
    engine.wait()
    own = state_of(engine).get("embedding.weight", [torch.zeros(0)])[-1]
    texts = engine.world.table(torch.tensor([own.double().sum(), float(own.numel() > 0)]))
    held = texts[texts[:, 1] > 0]
    if not (held == held[0]).all():
        wrong.append("the copies of the table differ")
    return wrong


def _summed(engine):
    """Return the reduced gradients of the last step by name, loss scale included."""
    return by_name(engine, lambda bucket: bucket.grad_sum.double())


def _all_tied(cases):
    return [f"{case}: {line}" for case in cases for line in _tied(case)]


@pytest.mark.uncounted
def test_a_tied_table_is_summed_over_both_ends_and_stays_equal(run_ranks):
    cases = [
        Case(schedule=schedule, dtype=dtype, grad_dtype=grad_dtype, model=model, rounds=rounds, tied=True)
        for (schedule, (dtype, grad_dtype)), (model, rounds) in zip(
            zip(SCHEDULES, DTYPES, strict=False), itertools.product(("gpt", "llama"), (1, 2)), strict=False
        )
    ]
    assert run_ranks(_all_tied, 2, cases) == [[], []]
    assert run_ranks(_all_tied, 4, cases[-2:-1]) == [[]] * 4


def _order(schedule):
    """Return this rank's calls in one step on the group of both ends: messages between stages, and the table's sum."""
    issued = []
    case = Case(schedule=schedule, tied=True, rounds=2)
    engine, pipeline = make_pipeline(case, Topology.connect(pp=2))
    ends = next(bucket.owners for bucket in engine.buckets if bucket.owners.axis.size > 1)
    send_and_receive, reduce_scatter = schedules._batch_p2p, ends.reduce_scatter

    def sent(ops, desc=None):
        issued.extend("message" for _ in ops)
        return send_and_receive(ops, desc)

    def summed(*args):
        issued.append("sum")
        return reduce_scatter(*args)

    with mock.patch.object(schedules, "_batch_p2p", sent), mock.patch.object(ends, "reduce_scatter", summed):
        pipeline.forward_backward(micro_batches(case, 0, 0))
        engine.step()
    return issued


def test_the_sum_of_a_tied_table_begins_when_all_messages_of_a_step_are_out(run_ranks):
    # With NCCL messages and sums are matched by their order, so ranks that differ in it would wait for ever.
    for schedule in ("1f1b", "interleaved_1f1b"):
        for issued in run_ranks(_order, 2, schedule):
            assert "message" in issued
            assert issued[issued.index("sum") :] == ["sum"]


# Together with every other way of dividing a model.


class _Trained(NamedTuple):
    """One rank's results of two steps and an evaluation."""

    losses_and_norms: list[float]
    valid_loss: float
    weights: dict[str, Any]  # arrays: each tensor would travel in a file of its own


def _on_a_full_mesh(cases):
    topology = Topology.connect(pp=2, tp=2)
    trained = []
    for number, case in enumerate(cases):
        engine, pipeline = make_pipeline(case, topology, sequence=number % 2 == 0)
        steps = []
        for step in range(2):
            pipeline.forward_backward(micro_batches(case, step, topology.dp.rank))
            steps.append(engine.step())
        loss, weight = engine.world.table(pipeline.evaluate(batches(case, 9, topology.dp.rank))).sum(0).tolist()
        trained.append(_Trained(_told(steps), loss / weight, _arrays(engine)))
    return trained


def _by_one_process(case):
    """Train in one process, which takes the micro-batches of both data-parallel ranks."""
    torch.manual_seed(5)
    whole, steps = pipeline_engine(case, Transformer(case.config()), Topology(), copies=2), []
    for step in range(2):
        MicroBatchRunner(whole).forward_backward(
            batch for dp_rank in range(2) for batch in micro_batches(case, step, dp_rank)
        )
        steps.append(whole.step())
    loss, weight = sum(MicroBatchRunner(whole).evaluate(batches(case, 9, dp_rank)) for dp_rank in range(2)).tolist()
    return _Trained(_told(steps), loss / weight, _arrays(whole))


def _arrays(engine):
    return {name: weight.numpy() for name, weight in engine.full_weights().items()}


def _told(steps):
    return [float(value) for step in steps for value in (step.loss, step.grad_norm)]


@pytest.mark.uncounted
def test_two_of_each_on_eight_ranks_are_one_process_within_rounding(run_ranks):
    cases = [Case(tied=True, model="gpt"), Case(schedule=SCHEDULES[-1])]
    cases += [Case(schedule="interleaved_1f1b", tied=True)] if FULL else []
    by_rank = run_ranks(_on_a_full_mesh, 8, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        want = _by_one_process(case)
        # Sums over tensor-parallel ranks, over data-parallel ranks and of a tied table have other orders.
        bound = 64 * 2.0**-24
        largest = max(abs(weight).max() for weight in want.weights.values())
        for got in ranks:
            assert got.losses_and_norms == pytest.approx(want.losses_and_norms, rel=bound), case
            assert got.valid_loss == pytest.approx(want.valid_loss, abs=1e-5), case
            assert got.weights.keys() == want.weights.keys()
            for name, weight in want.weights.items():
                assert abs(got.weights[name] - weight).max() <= bound * largest, f"{case}: {name}"


# Checkpoints.


def _move(source, target, folder):
    """Return the values that the target has not taken over bit for bit, among those that this rank trains in both."""
    all_or_none = AllOrNone(source.world, rank_device())
    checkpoint = read_on_all(save(folder, take_snapshot(source, RunRecord()), all_or_none), all_or_none)
    load(checkpoint, target, all_or_none)
    target.wait()
    one, other = state_of(source), state_of(target)
    common = one.keys() & other.keys()
    equal = all(torch.equal(a, b) for name in common for a, b in zip(one[name], other[name], strict=True))
    return [] if equal and common else [f"{len(common)} parameters, equal: {equal}"]


def _moves(folder):
    """Move from a pipeline to data-parallel ranks, take a step there, and move on to a pipeline of another schedule."""
    case, topology = Case(dtype=FP16, tied=True), Topology.connect(pp=2)
    first, pipeline = make_pipeline(case, topology)
    for step in range(2):
        pipeline.forward_backward(micro_batches(case, step, 0))
        first.step()
    torch.manual_seed(6)
    second = pipeline_engine(case, Transformer(case.config()), Topology.current())
    wrong = _move(first, second, folder / "first")
    MicroBatchRunner(second).forward_backward(micro_batches(case, 3, topology.pp.rank))
    second.step()
    third, _ = make_pipeline(Case(dtype=FP16, tied=True, schedule="zbv_zero_bubble"), topology)
    return wrong + _move(second, third, folder / "second")


def test_a_checkpoint_goes_from_a_pipeline_to_data_parallel_ranks_and_back(run_ranks, tmp_path):
    assert run_ranks(_moves, 2, tmp_path) == [[], []]


# Overflow on any stage.


class _Poison(torch.autograd.Function):
    """Identity whose gradient becomes inf."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def _overflows(schedule):
    """Return the failures of steps in which one stage alone overflows, or that stage and those before it."""
    topology = Topology.connect(pp=2)
    case = Case(schedule=schedule, dtype=FP16, tied=True, rounds=2)
    engine, pipeline = make_pipeline(case, topology)
    wrong = []
    for step, layer in enumerate((0, 2, 4)):
        before = [tensor for kinds in state_of(engine).values() for tensor in kinds]
        block, handles = engine.module.blocks[layer], []
        if isinstance(block, Block) and schedule == "1f1b":
            handles.append(block.attention.out.weight.register_hook(lambda grad: grad * float("inf")))
        elif isinstance(block, Block):  # a split backward fires no such hook
            handles.append(block.attention.out.register_forward_pre_hook(lambda _, args: (_Poison.apply(args[0]),)))
        pipeline.forward_backward(micro_batches(case, step, topology.dp.rank))
        for handle in handles:
            handle.remove()
        if not engine.step().found_inf:
            wrong.append(f"layer {layer}: nobody told this rank")
        after = [tensor for kinds in state_of(engine).values() for tensor in kinds]
        if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
            wrong.append(f"layer {layer}: something changed")
        if float(engine.loss_scale.loss_scale) != 2.0 ** (7 - step):
            wrong.append(f"layer {layer}: the scale is {float(engine.loss_scale.loss_scale)}")
    pipeline.forward_backward(micro_batches(case, 5, topology.dp.rank))
    if engine.step().found_inf:
        wrong.append("the step after")
    return wrong


def test_an_overflow_on_any_stage_changes_nothing_on_any(run_ranks):
    assert run_ranks(_overflows, 2, "1f1b") == [[], []]
    assert run_ranks(_overflows, 4, SCHEDULES[-1]) == [[]] * 4
