"""Ranks that divide matrices or positions have the loss, gradients, norm, weights and moments of one process, with its
dropout, and give the logits of any prompt.
"""

import pytest
import torch

from tests.parallel.layouts import SEQ_LEN, VOCAB, Case, first_difference, same_everywhere, train
from tests.parallel.layouts import build as build_case

CASES = [
    Case(model="llama", tp_size=2, tied=False, dtype=torch.bfloat16, reduce_dtype="half_fp32_sum"),
    Case(tp_size=2, dropout=0.2),
    Case(model="llama", tp_size=2, recompute="full", dropout=0.2, dtype=torch.float16),
    Case(tp_size=4, sequence_parallel=False, tied=False, dropout=0.1),
    Case(cp_size=2, dropout=0.1),
    Case(cp_size=2, tp_size=2, dropout=0.1, model="llama", recompute="full"),
    Case(cp_size=2, tp_size=2, dropout=0.1, sequence_parallel=False, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_norms_weights_and_moments_are_those_of_one_process(run_ranks, case):
    outcomes = run_ranks(train, case.world_size, case)
    assert same_everywhere(outcomes)
    assert first_difference(case, outcomes, train(case.alone)) is None


def test_dividing_the_positions_changes_no_bit_of_the_loss(run_ranks):
    # The sums over ranks are the same ones, whether a rank gets a part of their elements or all.
    (divided, _), (whole, _) = (
        run_ranks(train, 2, Case(tp_size=2, dtype=torch.float16, sequence_parallel=sequence))
        for sequence in (True, False)
    )
    assert divided.losses[0] == whole.losses[0]


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
