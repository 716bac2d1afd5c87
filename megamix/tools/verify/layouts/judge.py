"""Judge of a layout: every step against one rank's, and whether as many were applied as had to be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megamix.config import Config
from megamix.tools.verify.core.judge_routing import tallies
from megamix.tools.verify.core.judge_steps import judge_attempts
from megamix.tools.verify.core.observed_step import ObservedStep
from megamix.tools.verify.core.reference import Reference
from megamix.tools.verify.core.verdict import Verdict
from megamix.tools.verify.layouts.observe import batches, set_biases


def judge(
    config: Config, ranks: Sequence[list[ObservedStep]], device: torch.device, updates: int, overflow_at: int | None
) -> Verdict:
    """Compare a layout's run with one rank's, step by step.

    `config`: the layout's. `ranks`: steps that each rank observed, in rank order. `updates`: number of steps that had
    to be applied. `overflow_at`: the attempt in which one rank's gradient was made infinite.
    """
    reference = Reference.of_config(config, device)
    initial = {name: param.detach() for name, param in reference.native.named_parameters()}
    set_biases(config, reference.native)
    initial |= {name: tally.value for name, tally in tallies(reference.native).items()}
    verdict = judge_attempts(config, reference, ranks, initial, [overflow_at], partial(batches, config))
    # A step that overflows has nothing to compare: if all of them do, every check above has passed.
    applied = verdict.attempts - verdict.skipped
    missing = float(max(0, updates - applied))
    verdict.note(verdict.attempts, "applied updates", f"the run, {applied} of {updates},", missing, 0.0)
    return verdict
