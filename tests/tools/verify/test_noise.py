"""Noise hides no mistake: `verify` names a model whose loss, when given targets, is not that of its logits, and a step
that rounding alone moves far from FP64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.nn import functional as F

from megamix.model.layers import Head
from megamix.tools.verify.core.observed_step import ObservedStep
from megamix.tools.verify.foreign.judge_trainer import judge_trainer
from megamix.tools.verify.foreign.trainer import load_trainer
from megamix.tools.verify.foreign.watch import watch_trainer
from megamix.tools.verify.layouts.judge import judge
from megamix.tools.verify.layouts.observe import observe
from tests.tools.verify.catalogue.foreign import ByHand
from tests.tools.verify.jobs import UPDATES, make_config

CONFIG = make_config("dp1", dtype="bf16")


@contextmanager
def _loss_of_other_logits() -> Iterator[None]:
    """With targets, the head takes hidden states that are a tenth larger."""
    right = Head.forward

    def forward(self, x, targets=None, *others):
        return right(self, x if targets is None else 1.1 * x, targets, *others)

    with mock.patch.object(Head, "forward", forward):
        yield


def _observe_wrong() -> list[ObservedStep]:
    with _loss_of_other_logits():
        return observe(CONFIG, UPDATES, None)


def test_a_family_whose_loss_is_not_that_of_its_logits_is_named(run_ranks) -> None:
    ranks = run_ranks(_observe_wrong, 1)
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
        hidden = model.down(
            model.norm(F.gelu(F.linear(x.bfloat16(), model.up.weight.bfloat16()).to(x) + model.up.bias))
        )
        return F.cross_entropy(model.head(x + hidden), batch[1])


def test_what_rounding_cannot_have_done_is_a_difference_and_what_it_does_is_none(run_ranks) -> None:
    wheres = [f"{__file__}:{name}" for name in ("ByDtype", "HalfInside")]
    wrong, right = (judge_trainer(load_trainer(where), run_ranks(watch_trainer, 1, where, 2)) for where in wheres)
    first = wrong.differences[0]
    assert (first.attempt, first.check) == (0, "noise")
    assert first.looks_like.startswith("a model or a loss that is not the same in FP64")
    assert right.differences == []
    assert right.worst["noise"] < 0.5
