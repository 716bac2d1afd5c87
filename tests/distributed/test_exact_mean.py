"""Loss and gradient are the exact mean over all targets that count, on all ranks, and not a mean of means."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megamix.data.loader import IGNORE
from megamix.mixed_precision.loss_scale import DynamicLossScale
from megamix.mixed_precision.optim.adamw import AdamW
from megamix.mixed_precision.settings import Precision
from tests.builders import make_engine

VOCAB, TARGETS, RANKS, MICRO_BATCHES, STEPS = 40, 16, 2, 2, 4


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 24), nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, VOCAB))


def make_batch(step, rank, micro_batch):
    """Return tokens and targets. The number of targets that count differs for every rank, micro-batch and step: 0 to
    all.
    """
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro_batch)
    tokens = torch.randint(VOCAB, (TARGETS,), generator=generator)
    targets = (tokens * 7 + 3) % VOCAB
    counted = [0, TARGETS, 1, 5, 11, 3, 16, 2, 7, 13][(3 * step + 5 * rank + 2 * micro_batch) % 10]
    targets[counted:] = IGNORE
    return tokens, targets


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).float(), targets, reduction="sum") / TARGETS


def _trained(dtype):
    model = make_model()
    scale = DynamicLossScale(init_scale=2.0**10) if dtype == torch.float16 else None
    precision, settings = Precision(dtype, loss_scale=scale), {"clip_grad": 1.0, "grad_accum_steps": MICRO_BATCHES}
    engine = make_engine(model, AdamW(lr=0.02, eps=1e-3), precision, **settings)
    rank, losses = engine.topology.dp.rank, []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            tokens, targets = make_batch(step, rank, micro_batch)
            engine.backward(loss_of(model, tokens, targets), int((targets != IGNORE).sum()) / TARGETS)
        losses.append(float(engine.step().loss))
    return losses, engine.full_weights()


def reference():
    """Train in one process with all targets of a step in one loss."""
    model, losses = make_model(), []
    decay = [{"params": [p for p in model.parameters() if p.dim() == d], "weight_decay": 0.1 * (d > 1)} for d in (1, 2)]
    optimizer = torch.optim.AdamW(decay, lr=0.02, betas=(0.9, 0.95), eps=1e-3)
    for step in range(STEPS):
        parts = [make_batch(step, rank, part) for rank in range(RANKS) for part in range(MICRO_BATCHES)]
        tokens, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        loss = F.cross_entropy(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def distance(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# In FP32 only the order of sums differs. In FP16 weights and gradients are rounded, to 2^-11 of a step of 0.02 or so.
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
def test_two_ranks_with_different_counts_equal_one_process_over_all_targets(run_ranks, dtype, close):
    want_losses, want = reference()
    for losses, weights in run_ranks(_trained, RANKS, dtype):
        assert losses == pytest.approx(want_losses, abs=close)
        assert distance(weights, want) < close


def _without_targets():
    precision = Precision(torch.float16, loss_scale=DynamicLossScale())
    engine = make_engine(make_model(), AdamW(lr=0.02, weight_decay=0.0), precision)
    before = engine.full_weights()
    engine.backward(loss_of(engine.module, torch.arange(TARGETS), torch.full((TARGETS,), IGNORE)), 0.0)
    result = engine.step()
    assert (float(result.loss), float(result.grad_norm), bool(result.found_inf)) == (0.0, 0.0, False)
    assert distance(before, engine.full_weights()) == 0


def test_a_step_in_which_no_target_counts_applies_a_zero_gradient(run_ranks):
    run_ranks(_without_targets, 2)


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight):
    model = make_model()
    engine = make_engine(model, AdamW(lr=0.1))
    with pytest.raises(ValueError, match="takes a weight of 0 or more, got"):
        engine.backward(loss_of(model, *make_batch(0, 0, 0)), weight)
