"""Tensor and sequence parallel ranks have the loss, gradients, norm, weights and moments of one process, and give the
logits of any prompt; planted bugs are named; an overflow on any rank changes nothing.
"""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megamix.comm.topology import Topology
from megamix.inspect.culprits import gather_peaks
from megamix.mixed_precision import engine as engine_module
from megamix.parallel import tensor_parallel
from megamix.parallel.borders import Border
from tests.conftest import FULL
from tests.parallel.layouts import (
    SEQ_LEN,
    VOCAB,
    Case,
    are_equal,
    backward,
    contents,
    first_difference,
    run,
    same_everywhere,
    train,
    with_one_inf,
    world_rank,
)
from tests.parallel.layouts import build as build_case

HALVES = (torch.float16, torch.bfloat16)
CASES = [
    Case(tp_size=2),
    Case(tp_size=2, sequence_parallel=False, tied=False, grad_accum_steps=2, dtype=torch.float16),
    Case(model="llama", tp_size=2, tied=False, dtype=torch.bfloat16, reduce_dtype="half_fp32_sum"),
    Case(model="llama", tp_size=2, sequence_parallel=False, grad_accum_steps=2),
    Case(tp_size=2, dropout=0.2),
    Case(model="llama", tp_size=2, recompute="full", dropout=0.2, dtype=torch.float16),
    Case(model="llama", tp_size=2, recompute="selective"),
    Case(tp_size=4, dtype=torch.bfloat16, bucket_size=None),
    Case(tp_size=4, sequence_parallel=False, tied=False, dropout=0.1),
    Case(model="llama", dp_size=2, tp_size=2, dtype=torch.float16, grad_accum_steps=2),
    Case(dp_size=2, tp_size=2, sequence_parallel=False, reduce_dtype="half_fp32_sum", dtype=torch.bfloat16),
    Case(dp_size=2, tp_size=2, tied=False, grad_accum_steps=2, bucket_size=1),
]
ALL = [
    Case(
        model=model, tied=tied, dtype=dtype, dp_size=dp, tp_size=tp, sequence_parallel=sequence, grad_accum_steps=steps
    )
    for model in ("gpt", "llama")
    for tied in (True, False)
    for dtype in (torch.float32, *HALVES)
    for dp, tp in ((1, 2), (1, 4), (2, 2))
    for sequence in (True, False)
    for steps in (1, 2)
    if (model, tp) != ("llama", 4)  # two key and value heads do not divide by 4
]


@pytest.mark.uncounted
@pytest.mark.parametrize("case", ALL if FULL else CASES, ids=str)
def test_losses_gradients_norms_weights_and_moments_are_those_of_one_process(run_ranks, case):
    outcomes = run(case, run_ranks)
    assert same_everywhere(outcomes)
    assert first_difference(case, outcomes, train(case.alone)) is None


@pytest.mark.uncounted
def test_dividing_the_positions_changes_no_bit_of_the_loss(run_ranks):
    # The sums over ranks are the same ones, whether a rank gets a part of their elements or all.
    (divided, _), (whole, _) = (
        run(Case(tp_size=2, dtype=torch.float16, sequence_parallel=sequence), run_ranks) for sequence in (True, False)
    )
    assert divided.losses[0] == whole.losses[0]


# Planted bugs: each must be found, and by the name of what it breaks.


def _placed(change):
    place = tensor_parallel._place
    return mock.patch.object(tensor_parallel, "_place", lambda *args: change(place(*args), args[2]))


def _norm_counted_by_every_rank():
    agree = engine_module.agree
    return mock.patch.object(engine_module, "agree", lambda by_piece, *rest: agree(by_piece * SQUARED, *rest))


SQUARED = torch.tensor([[2.0], [1.0]], dtype=torch.float64)  # factors of sums of squares and of largest magnitudes

BUGS = {  # patch that breaks it, sequence_parallel, name told
    "replicated gradients are not summed": (
        lambda: _placed(lambda at, topology: replace(at, owners=topology.dp)),
        True,
        "gradient: not owned once: .*'norm.weight'",
    ),
    "equal gradients are counted by every rank": (
        lambda: _placed(lambda at, topology: replace(at, counts=True)),
        False,
        "gradient of position_embedding.weight",
    ),
    "norm counted by every rank": (_norm_counted_by_every_rank, True, "grad_norm of step 0"),
    "loss divided by the number of ranks": (
        lambda: mock.patch.object(Topology, "counts_loss", True),
        True,
        "grad_norm of step 0",
    ),
    "backward does not sum where a layer begins": (
        lambda: mock.patch.object(Border, "enter", lambda border, x: x),
        False,
        "gradient of ",
    ),
    "bias added before the sum": (
        lambda: mock.patch.object(
            tensor_parallel._Rows, "__call__", lambda rows, *given: rows._border.leave(rows._product(*given))
        ),
        True,
        "gradient of blocks.1.feed_forward.down.bias",  # not the loss: biases begin as zeros
    ),
}


def _train_broken(case, bug):
    with BUGS[bug][0]():
        return train(case)


@pytest.mark.uncounted
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_named(run_ranks, bug):
    _, sequence_parallel, told = BUGS[bug]
    case = Case(tp_size=2, sequence_parallel=sequence_parallel)
    difference = first_difference(case, run_ranks(_train_broken, 2, case, bug), train(case.alone))
    assert difference is not None
    assert re.match(told, difference), difference


# An overflow anywhere.


def _overflow_on(victim, case):
    """Return (whether the step was skipped, whether nothing changed, the new loss scale, the faults that are named)
    with one inf in the gradient of one parameter on one rank.
    """
    model, engine = build_case(case)
    backward(case, engine, 0)
    engine.step()
    before = contents(engine)
    if world_rank() == victim:
        params = [*model.parameters()]
        params[victim % len(params)].register_hook(with_one_inf)
    backward(case, engine, 1)
    result = engine.step()
    unchanged = are_equal(before, contents(engine))
    faults = [peak.fault for peak in gather_peaks(engine, result.by_piece, result.peak_rows) if peak.fault]
    return bool(result.found_inf), unchanged, float(engine.skipped_steps), faults


@pytest.mark.uncounted
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_an_overflow_on_any_rank_changes_nothing_anywhere(run_ranks, sequence_parallel):
    case = Case(dp_size=2, tp_size=2, dtype=torch.float16, sequence_parallel=sequence_parallel)
    for victim in range(4):
        assert run_ranks(_overflow_on, 4, victim, case) == [(True, True, 1.0, ["inf"])] * 4


# Logits of prompts of any length.


def _logits(case, lengths):
    model, engine = build_case(case)
    model.eval()
    with torch.no_grad():
        return [engine(torch.arange(length).view(1, -1) % VOCAB) for length in lengths]


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_logits_are_whole_on_every_rank_for_a_prompt_of_any_length(run_ranks, model):
    case, lengths = Case(model=model, tp_size=2), [1, 5, SEQ_LEN]
    one, other = run_ranks(_logits, 2, case, lengths)
    for mine, theirs, want in zip(one, other, _logits(case.alone, lengths), strict=True):
        assert torch.equal(mine, theirs), "all ranks sample the same token"
        assert mine.shape == want.shape
        assert (mine - want).abs().max() <= 1e-6 * want.abs().max()


def _train_on_an_odd_length(case):
    _, engine = build_case(case)
    with pytest.raises(ValueError, match="5 positions, which 2 tensor-parallel ranks cannot divide") as caught:
        engine(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64))
    return str(caught.value)


def test_training_on_a_length_that_ranks_cannot_divide_is_refused(run_ranks):
    assert len(run_ranks(_train_on_an_odd_length, 2, Case(tp_size=2))) == 2
