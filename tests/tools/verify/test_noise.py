"""Noise hides no mistake: `verify` names a model whose loss, when given targets, is not that of its logits, a step that
rounding alone moves far from FP64, and a gradient that is a twentieth too large, also that of one matrix of a stack.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megamix.model.layers import Head, ParamRule
from megamix.model.transformer import FeedForward
from megamix.tools.verify.layouts.judge_steps import judge
from megamix.tools.verify.layouts.observe import observe
from tests.tools.verify.catalogue.foreign import ByHand
from tests.tools.verify.catalogue.run import judged
from tests.tools.verify.engine_bugs import GradientTimes, wrong
from tests.tools.verify.jobs import UPDATES, make_config

CONFIG = make_config("dp1", dtype="bf16")


@wrong(Head, "forward")
def _loss_of_other_logits(right, self, x, targets=None, *others):
    """With targets, the head takes hidden states that are a tenth larger."""
    return right(self, x if targets is None else 1.1 * x, targets, *others)


def _observed(bug, *settings):
    with bug(*settings):
        return observe(CONFIG, UPDATES, None)


def test_a_family_whose_loss_is_not_that_of_its_logits_is_named(run_ranks):
    ranks = run_ranks(_observed, 1, _loss_of_other_logits)
    with _loss_of_other_logits():
        first = judge(CONFIG, ranks, torch.device("cpu"), UPDATES, None).differences[0]
    assert (first.attempt, first.check) == (0, "loss path")
    assert first.looks_like.startswith("a model whose loss, given targets, is not the cross entropy of the logits")


class ByDtype(ByHand):
    """Training whose loss has a temperature, which nobody meant, in FP32."""

    def loss(self, model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits * (1.05 if logits.dtype == torch.float32 else 1.0), batch[1])


class HalfInside(ByHand):
    """Training with one product in BF16, by no autocast."""

    def loss(self, model, batch):
        x = model.embed(batch[0])
        up = F.linear(x.bfloat16(), model.up.weight.bfloat16()).to(x) + model.up.bias
        return F.cross_entropy(model.head(x + model.down(model.norm(F.gelu(up)))), batch[1])


def test_what_rounding_cannot_have_done_is_a_difference_and_what_it_does_is_none(run_ranks):
    tempered, right = judged(run_ranks, 1, [f"{__file__}:{name}" for name in ("ByDtype", "HalfInside")], 2)
    first = tempered.differences[0]
    assert (first.attempt, first.check) == (0, "noise")
    assert first.looks_like.startswith("a model or a loss that is not the same in FP64")
    assert right.differences == []
    assert right.worst["noise"] < 0.5


class _Stack(nn.Module):
    """Two matrices in one parameter; the second has a fiftieth of the effect. Some of its gradient is multiplied."""

    factors = torch.tensor([1.0, 0.02])

    def __init__(self, size, wrong):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, size, size))
        self.rules, self.wrong = {"weight": ParamRule("normal", 0.2)}, wrong

    def forward(self, x):
        weight = GradientTimes.apply(torch.tensor(self.wrong, dtype=x.dtype)[:, None, None], self.weight)
        return torch.einsum("e,eoi,...i->...o", self.factors.to(x.dtype), weight, x)


@contextmanager
def _stacks(wrong=(1.0, 1.0)):
    """Put a stack in front of each feed-forward part."""
    build, right = FeedForward.__init__, FeedForward.forward

    def init(self, config, *others):
        build(self, config, *others)
        self.stack = _Stack(config.hidden_size, wrong)

    with (
        mock.patch.object(FeedForward, "__init__", init),
        mock.patch.object(FeedForward, "forward", lambda self, x: right(self, x + self.stack(x))),
    ):
        yield


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.05, 1.0), (1.0, 1.05)])
def test_a_gradient_that_is_a_twentieth_too_large_is_named_with_its_matrix(run_ranks, factors):
    ranks = run_ranks(_observed, 1, _stacks, factors)
    with _stacks():
        verdict = judge(CONFIG, ranks, torch.device("cpu"), UPDATES, None)
    stack, large = "feed_forward.stack.weight", [at for at in (0, 1) if factors[at] > 1]
    named = {one.where for one in verdict.differences if one.attempt == 0}
    assert named == {f"blocks.{layer}.{stack}[{at}]" for layer in (0, 1) for at in large}
    if large:
        assert verdict.differences[0].check == "factor of the gradient"
        assert verdict.differences[0].looks_like.endswith("times the right one, as a whole")
