"""Every overflow names its parameters, and the expert whose matrix it is; in an examined step also rank and
micro-batch, and inf or NaN. Finite gradients are never named.
"""

import dataclasses
import math
import random

import pytest
import torch
import torch.distributed as dist

from megamix import Precision, StaticLossScale
from megamix.builders.objects import build_training
from megamix.inspect.culprits import (
    Origin,
    Origins,
    ParamPeak,
    experts_by_param,
    gather_origins,
    gather_peaks,
    headroom,
    merge_peaks,
    origins_of,
)
from megamix.mixed_precision.flat_layout import ParamSpec, Piece
from megamix.tools.verify.layouts.observe import take_step
from tests.builders import loss_of, make_batch, make_engine, make_model
from tests.conftest import FULL
from tests.distributed.test_overflow import Injector
from tests.parallel.test_expert_parallel import experts_job

ACCUM, TRIALS = 2, 20
INF, NAN = math.inf, math.nan


def _build(dtype=torch.float16):
    model = make_model()
    injector = Injector(model)
    precision = Precision(dtype, loss_scale=StaticLossScale(2.0**8))
    return make_engine(model, precision=precision, shard="states", bucket_size=1500, grad_accum_steps=ACCUM), injector


def _attempt(engine, injector, step):
    for micro_batch in range(ACCUM):
        injector.micro_batch = micro_batch
        engine.backward(loss_of(engine.module, make_batch(step, dist.get_rank(), micro_batch)))
    return engine.step()


def _faults(engine, result):
    return [(peak.name, peak.fault) for peak in gather_peaks(engine, result.by_piece, result.peak_rows) if peak.fault]


def _random_injections(trials):
    """Return the failures: each trial injects one fault, and both ways of naming must name exactly that."""
    engine, injector = _build()
    wrong = []
    for trial in range(trials):
        draw = random.Random(trial)
        name, rank, micro_batch = draw.choice(engine.plan.param_names), draw.randrange(2), draw.randrange(ACCUM)
        value = draw.choice([INF, -INF, NAN])
        injector.target = (name, micro_batch, value) if dist.get_rank() == rank else None
        engine.examine_next_step()
        result = _attempt(engine, injector, trial)
        fault = "NaN" if math.isnan(value) else "inf"
        origins = gather_origins(engine, result.examination)
        if not result.found_inf or _faults(engine, result) != [(name, fault)]:
            wrong.append(f"trial {trial}: {_faults(engine, result)} instead of {name} ({fault})")
        if origins != Origins([Origin(name, rank, micro_batch, fault)], 0):
            wrong.append(f"trial {trial}: {origins} instead of rank {rank}, micro-batch {micro_batch}")
    return wrong


@pytest.mark.uncounted
def test_random_injections_are_named_by_parameter_rank_and_micro_batch(run_ranks):
    assert run_ranks(_random_injections, 2, 200 if FULL else TRIALS) == [[], []]


def _clean_runs(runs):
    wrong = []
    for run in range(runs):
        engine, injector = _build()
        for step in range(3):
            engine.examine_next_step()
            result = _attempt(engine, injector, 100 * run + step)
            if _faults(engine, result) or gather_origins(engine, result.examination) != Origins([], 0):
                wrong.append(f"run {run}, step {step}")
    return wrong


@pytest.mark.uncounted
def test_clean_runs_name_nobody(run_ranks):
    assert run_ranks(_clean_runs, 2, TRIALS) == [[], []]


def _named(dtype, name, micro_batch, values):
    """Return (faults, origins) if each rank injects a value of its own."""
    engine, injector = _build(dtype)
    injector.target = (name, micro_batch, values[dist.get_rank()])
    engine.examine_next_step()
    result = _attempt(engine, injector, 0)
    return _faults(engine, result), gather_origins(engine, result.examination)


def test_a_sum_that_overflows_alone_names_the_parameter_and_no_rank(run_ranks):
    answer = ([("blocks.1.up.weight", "inf")], Origins([], 0))
    assert run_ranks(_named, 2, torch.float16, "blocks.1.up.weight", 0, [40_000.0, 40_000.0]) == [answer, answer]


def test_finite_but_too_large_to_square_is_told_apart(run_ranks):
    origin = Origin("norm.weight", 1, 1, "too large to square")
    answer = ([("norm.weight", "too large to square")], Origins([origin], 0))
    assert run_ranks(_named, 2, torch.bfloat16, "norm.weight", 1, [1.0, 2.0**64]) == [answer, answer]
    answer = ([], Origins([], 0))
    assert run_ranks(_named, 2, torch.bfloat16, "norm.weight", 1, [1.0, 2.0**63]) == [answer, answer]


def test_a_parameter_in_pieces_is_one_whose_worst_piece_counts():
    table = torch.tensor([[[1.0, 1.0], [4.0, 2.0]], [[2.0, 3.0], [INF, 2.0**70]], [[NAN, NAN], [INF, INF]]])
    table = torch.cat([table, torch.zeros_like(table)], 2)
    first, second = merge_peaks(table[:2], ["a", "b"])
    assert (first, first.fault) == (ParamPeak("a", 3.0, 3.0), None)
    assert (second, second.fault) == (ParamPeak("b", INF, 2.0**70), "too large to square")
    assert [peak.fault for peak in merge_peaks(table, ["a", "b"])] == ["NaN", "inf"]


UP = "blocks.1.feed_forward.up.weight"


def _places(layout, ep_size, shard, wrong):
    """Return what overflows if the gradients of some experts, by their numbers in the model, get a value each."""
    config = experts_job(layout, ep_size, "bf16", shard)
    runner = build_training(config, torch.device("cpu"))
    engine, ep = runner.engine, runner.engine.topology.along("ep")

    def plant(grad):
        grad, first = grad.clone(), ep.rank * len(grad)
        for expert in range(first, first + len(grad)):
            if expert in wrong:
                grad[expert - first, 3, 5] = wrong[expert]
        return grad

    dict(engine.module.named_parameters())[UP].register_hook(plant)
    result = take_step(config, runner, 0)
    peaks = gather_peaks(engine, result.by_piece, result.peak_rows)
    return [f"{peak.place} ({peak.fault})" for peak in peaks if peak.fault]


@pytest.mark.parametrize(("layout", "ep_size", "shard"), [("dp2", 2, "states"), ("dp2", 1, "gradients")])
def test_an_overflow_names_the_expert(run_ranks, layout, ep_size, shard):
    for wrong, told in (
        ({5: INF}, f"{UP}, expert 5 (inf)"),
        ({0: 2.0**64}, f"{UP}, expert 0 (too large to square)"),
        ({7: -INF, 2: NAN}, f"{UP}, experts 2 to 7 (NaN)"),
        ({1: INF, 3: INF}, f"{UP}, experts 1 to 3 (inf)"),
    ):
        assert run_ranks(_places, 2, layout, ep_size, shard, wrong) == [[told]] * 2


def test_rows_that_two_experts_share_name_both():
    spec = ParamSpec.whole("up", (4, 5, 10), 0)
    spec = dataclasses.replace(spec, full_shape=(8, 5, 10), offset=(4, 0, 0), along="ep")
    piece = Piece(spec, first=64, start=0, end=192, numel=136)
    for rows, experts in (((0, 0), (5, 7)), ((1, 1), (6, 8)), ((2, 2), (7, 8)), ((0, 2), (5, 8))):
        found = experts_by_param(torch.tensor(rows)[:, None], [piece], ["up"])
        assert found.tolist() == [[*map(float, experts)]]


def test_origins_come_in_the_order_of_backward_and_the_surplus_is_counted():
    local = torch.zeros(3, 40, 3, dtype=torch.float64)
    local[1, 5] = torch.tensor([2.0, 1.0, NAN])
    local[1, 9, 0] = 1
    local[0, 7] = torch.tensor([0.0, 3.0, NAN])
    names = [str(number) for number in range(40)]
    found, left_out = origins_of(local, names, 1)
    assert [(origin.micro_batch, origin.param, origin.fault) for origin in found] == [
        (0, "7", "NaN"),
        (1, "9", "inf"),
        (1, "5", "inf and NaN"),
    ]
    assert {origin.rank for origin in found} == {1}
    assert left_out == 0
    local[..., 0] = 1
    found, left_out = origins_of(local, names, 0)
    assert len(found) + left_out == 3 * 40
    assert [origin.param for origin in found[:41]] == [*reversed(names), "39"]


@pytest.mark.parametrize(
    ("max_abs", "want"), [(65504.0, 0.0), (65504 / 4, 2.0), (INF, -INF), (0.0, INF), (131008.0, -1)]
)
def test_headroom_is_octaves_to_the_end_of_fp16(max_abs, want):
    assert headroom(max_abs) == want
    assert math.isnan(headroom(NAN))
