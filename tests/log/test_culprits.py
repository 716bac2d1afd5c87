"""Every overflow names its parameters, and the expert whose matrix it is; in an examined step also rank and
micro-batch, and inf or NaN. Finite gradients are never named.
"""

import dataclasses
import math
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megamix import Precision, StaticLossScale
from megamix.log.culprits import (
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
from megamix.train.engine import build_training
from tests.builders import loss_of, make_batch, make_engine, make_model
from tests.conftest import FULL
from tests.distributed.test_overflow import Injector
from tests.parallel.test_expert_parallel import experts_job

ACCUM, TRIALS = 2, 20
NOBODY = [], Origins([], 0)
INF, NAN = math.inf, math.nan
SQUARE = "too large to square"
AT_NORM = Origin("norm.weight", 1, 1, SQUARE)


def _build(dtype=torch.float16):
    injector = Injector(model := make_model())
    precision = Precision(dtype, loss_scale=StaticLossScale(2.0**8))
    return make_engine(model, precision=precision, shard="states", bucket_size=1500, grad_accum_steps=ACCUM), injector


def _examined(engine, injector, step):
    """Return (faults, origins) of an examined step."""
    engine.examine_next_step()
    for micro_batch in range(ACCUM):
        injector.micro_batch = micro_batch
        engine.backward(loss_of(engine.module, make_batch(step, dist.get_rank(), micro_batch)))
    result = engine.step()
    peaks = gather_peaks(engine, result.by_piece, result.peak_rows)
    faults = [(peak.name, peak.fault) for peak in peaks if peak.fault]
    assert bool(result.found_inf) == bool(faults)
    return faults, gather_origins(engine, result.examination)


def _random_injections(trials):
    """Return the failures: each trial injects one fault, and both ways of naming must name exactly that, and nobody in
    the steps behind it.
    """
    engine, injector = _build()
    wrong = []
    for trial in range(trials):
        draw = random.Random(trial)
        name, rank, micro_batch = draw.choice(engine.plan.param_names), draw.randrange(2), draw.randrange(ACCUM)
        value = draw.choice([INF, -INF, NAN])
        injector.target = (name, micro_batch, value) if dist.get_rank() == rank else None
        fault = "NaN" if math.isnan(value) else "inf"
        want = [(name, fault)], Origins([Origin(name, rank, micro_batch, fault)], 0)
        if (found := _examined(engine, injector, trial)) != want:
            wrong.append(f"trial {trial}: {found} instead of {want}")
        injector.target = None
        wrong += [found for step in range(3) if (found := _examined(engine, injector, 100 * trial + step)) != NOBODY]
    return wrong


def test_random_injections_are_named_by_parameter_rank_and_micro_batch_and_clean_steps_name_nobody(run_ranks):
    assert run_ranks(_random_injections, 2, 200 if FULL else TRIALS) == [[], []]


def _named(dtype, name, values):
    """Return (faults, origins) if each rank injects a value of its own."""
    engine, injector = _build(dtype)
    injector.target = (name, 1, values[dist.get_rank()])
    return _examined(engine, injector, 0)


@pytest.mark.parametrize(
    ("dtype", "name", "values", "answer"),
    [
        (torch.float16, "blocks.1.up.weight", [4e4, 4e4], ([("blocks.1.up.weight", "inf")], Origins([], 0))),
        (torch.bfloat16, "norm.weight", [1.0, 2.0**64], ([("norm.weight", SQUARE)], Origins([AT_NORM], 0))),
        (torch.bfloat16, "norm.weight", [1.0, 2.0**63], NOBODY),
    ],
    ids=["a sum that overflows alone has no rank", "finite but too large to square", "the largest with a square"],
)
def test_a_value_on_each_rank_is_named_by_what_it_does(run_ranks, dtype, name, values, answer):
    assert run_ranks(_named, 2, dtype, name, values) == [answer, answer]


def test_headroom_is_octaves_to_the_end_of_fp16():
    assert [*map(headroom, (65504.0, 65504 / 4, INF, 0.0, 131008.0))] == [0.0, 2.0, -INF, INF, -1]
    assert math.isnan(headroom(NAN))


def test_a_parameter_in_pieces_is_one_whose_worst_piece_counts():
    table = torch.tensor([[[1.0, 1.0], [4.0, 2.0]], [[2.0, 3.0], [INF, 2.0**70]], [[NAN, NAN], [INF, INF]]])
    table = torch.cat([table, torch.zeros_like(table)], 2)
    first, second = merge_peaks(table[:2], ["a", "b"])
    assert (first, first.fault) == (ParamPeak("a", 3.0, 3.0), None)
    assert (second, second.fault) == (ParamPeak("b", INF, 2.0**70), "too large to square")
    assert [peak.fault for peak in merge_peaks(table, ["a", "b"])] == ["NaN", "inf"]


UP = "blocks.1.feed_forward.up.weight"


def _places(layout, ep_size, shard, wrongs):
    """Return what overflows in steps in which the gradients of some experts, by their numbers in the model, get a value
    each.
    """
    config = experts_job(layout, ep_size, "bf16", shard)
    runner = build_training(config, torch.device("cpu"))
    engine, ep, told = runner.engine, runner.engine.topology.along("ep"), []

    def plant(grad, wrong):
        grad, first = grad.clone(), ep.rank * len(grad)
        for expert in range(first, first + len(grad)):
            if expert in wrong:
                grad[expert - first, 3, 5] = wrong[expert]
        return grad

    for wrong in wrongs:
        hook = dict(engine.module.named_parameters())[UP].register_hook(partial(plant, wrong=wrong))
        result = take_step(config, runner, 0)
        hook.remove()
        peaks = gather_peaks(engine, result.by_piece, result.peak_rows)
        told.append([f"{peak.place} ({peak.fault})" for peak in peaks if peak.fault])
    return told


@pytest.mark.parametrize(("layout", "ep_size", "shard"), [("dp2", 2, "states"), ("dp2", 1, "gradients")])
def test_an_overflow_names_the_expert(run_ranks, layout, ep_size, shard):
    wrongs = {5: INF}, {0: 2.0**64}, {7: -INF, 2: NAN}, {1: INF, 3: INF}
    told = "expert 5 (inf)", "expert 0 (too large to square)", "experts 2 to 7 (NaN)", "experts 1 to 3 (inf)"
    assert run_ranks(_places, 2, layout, ep_size, shard, wrongs) == [[[f"{UP}, {one}"] for one in told]] * 2


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
    places = ("7", 0, "NaN"), ("9", 1, "inf"), ("5", 1, "inf and NaN")
    assert found == [Origin(name, 1, micro_batch, fault) for name, micro_batch, fault in places]
    assert left_out == 0
    local[..., 0] = 1
    found, left_out = origins_of(local, names, 0)
    assert len(found) + left_out == 3 * 40
    assert [origin.param for origin in found[:41]] == [*reversed(names), "39"]
