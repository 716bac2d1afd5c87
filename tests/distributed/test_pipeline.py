"""Every schedule of a pipeline trains the bits of one process, with recompute, packing and data-parallel ranks as well;
a tied table stays within a derived bound, and its sum begins when all messages of a step are out.
"""

import itertools
import random
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining import schedules

from megamix.comm.topology import Topology
from megamix.model.transformer import Transformer
from megamix.parallel.micro_batch_runner import MicroBatchRunner
from tests.conftest import FULL
from tests.distributed.pipelines import (
    SCHEDULES,
    Case,
    batches,
    by_name,
    make_pipeline,
    make_whole,
    micro_batches,
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
        shows = {case.schedule, (case.dtype, case.grad_dtype), (case.model, case.rounds)}
        if shows - seen:
            seen |= shows
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
        with mock.patch.object(pipeline, "_run", side_effect=pipeline._run) as calls:
            wrong += _evaluation_differences(case, pipeline, plain, topology.dp.rank)
        if calls.call_count != 2:
            wrong.append(f"{case}: {calls.call_count} parts")
    return wrong


def _all_differences(cases):
    topology = Topology.connect(pp=cases[0].pp_size)
    return [f"{case}: {line}" for case in cases for line in _differences(case, topology)[:3]]


HALVES = [case for case in _picks(1000) if case.dtype != FP32 or FULL]
PACKED = [
    Case(schedule=schedule, dtype=FP16, packed=True, more=(("recompute", recompute),), rounds=2)
    for schedule, recompute in (("1f1b", "full"), ("zbv_zero_bubble", "full"), ("interleaved_1f1b", "selective"))
    if schedule in SCHEDULES
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, _picks(1000 if FULL else 0), id="every schedule"),
        pytest.param(4, HALVES[: None if FULL else 2], id="pipelines side by side"),
        pytest.param(2, PACKED, id="recompute, packed documents and their weights"),
        pytest.param(4, _picks(1000, pp_size=4)[: None if FULL else 2], id="four stages and eight"),
    ],
)
def test_every_schedule_equals_one_process(run_ranks, ranks, cases):
    assert run_ranks(_all_differences, ranks, cases, deadline_s=DEADLINE_S) == [[]] * ranks


def test_an_evaluation_in_two_parts_equals_one_process(run_ranks):
    cases = [
        Case(schedule=schedule, dtype=FP16, packed=True, rounds=8) for schedule in [*SCHEDULES][:: 1 if FULL else 2]
    ]
    assert run_ranks(_differences_in_parts, 2, cases) == [[], []]


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
    # The reduced gradients by name, loss scale included.
    grads, expected = (by_name(one, lambda bucket: bucket.grad_sum.double()) for one in (engine, whole))
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


def _all_tied(cases):
    return [f"{case}: {line}" for case in cases for line in _tied(case)]


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
