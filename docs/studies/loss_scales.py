"""Count the batches that overflow under each loss-scale rule, in simulations with a known limit.

`python docs/studies/loss_scales.py [--small]`. A step overflows exactly if its scale is above the limit of its batch,
which lies about 2**15: fixed, drifting by two octaves up and down once in the whole run, or drifting with each batch
off by 0.35 octaves times Student's t with 4 degrees of freedom. So did the largest gradients of a GPT with 0.24 M
parameters spread over 2,000 steps: by 0.4 octaves (standard deviation), the farthest 2.7 above the median. The batch
of a step that overflowed is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import study
import torch
from torch import Tensor

from megamix import (
    DeepSpeedLossScale,
    DynamicLossScale,
    HeadroomLossScale,
    MegatronLossScale,
    TorchLossScale,
)
from megamix.mixed_precision.headroom import FP16_MAX
from megamix.mixed_precision.loss_scale import LossScale

STEPS = 20_000
NOISY = "drift and noise"  # the last of the worlds


class MXNetLossScale(LossScale):
    """MXNet's LossScaler: an overflow halves, 2000 clean steps double up to 2**24, and each change comes into force
    only after the next step.

    Source: python/mxnet/contrib/amp/loss_scaler.py at 22d69ef.
    """

    def __init__(self) -> None:
        super().__init__(2.0**16, 2.0**-126, 2.0**24)
        self.following, self.clean_steps = 2.0**16, 0

    def update_(self, found_inf: Tensor, max_abs: Tensor, scale_used: Tensor) -> None:
        scale = self.following
        self.loss_scale.fill_(scale)
        self.clean_steps = 0 if found_inf else self.clean_steps + 1
        if found_inf:
            self.following = scale / 2
        elif self.clean_steps == 2000:
            self.clean_steps, self.following = 0, min(2.0**24, scale * 2)


RULES: dict[str, Callable[[], LossScale]] = {
    "headroom": HeadroomLossScale,
    "dynamic": DynamicLossScale,
    "torch": TorchLossScale,
    "MXNet": MXNetLossScale,
    "deepspeed": DeepSpeedLossScale,
    "deepspeed, consecutive": lambda: DeepSpeedLossScale(consecutive_hysteresis=True),
    "megatron": MegatronLossScale,
}


class Outcome(NamedTuple):
    """Of one rule in one world."""

    search: int  # overflows before the first clean step
    share: float  # of all steps that overflowed
    octaves_below: float  # log2 of limit over scale, mean over the clean steps


class Findings(NamedTuple):
    by_rule: dict[str, dict[str, Outcome]]  # rule -> world -> outcome
    by_seed: list[Outcome]  # of headroom, where each seed has a noise of its own


def worlds(steps: int, seed: int = 0) -> dict[str, Tensor]:
    """The largest scale that does not overflow, of each step: FP64 (steps,)."""
    torch.manual_seed(seed)
    drift = 15 + 2 * torch.sin(2 * math.pi * torch.arange(steps, dtype=torch.float64) / steps)
    noise = 0.35 * torch.distributions.StudentT(4.0).sample((steps,)).double()
    return {"fixed": torch.full_like(drift, 2.0**15), "drift": 2**drift, NOISY: 2 ** (drift - noise)}


def run(scale: LossScale, limits: Tensor) -> Outcome:
    search, octaves_below = 0, []
    for limit in limits.tolist():
        used = scale.loss_scale.clone()
        ratio = used.item() / limit
        found_inf = ratio > 1
        max_abs = math.inf if found_inf else FP16_MAX * ratio
        scale.update_(torch.tensor(found_inf), torch.tensor(max_abs, dtype=torch.float64), used)
        if not found_inf:
            octaves_below.append(-math.log2(ratio))
        elif not octaves_below:
            search += 1
    clean = len(octaves_below)
    return Outcome(search, 1 - clean / len(limits), sum(octaves_below) / clean)


def measure(small: bool = False) -> Findings:
    # Small: headroom at full length all the same where limits move, since its promise is of 20,000 steps.
    by_rule = {
        rule: {
            world: run(new_scale(), limits[:300] if small and world == "fixed" else limits)
            for world, limits in worlds(300 if small and rule != "headroom" else STEPS).items()
        }
        for rule, new_scale in RULES.items()
    }
    others = [run(HeadroomLossScale(), worlds(STEPS, seed)[NOISY]) for seed in range(1, 2 if small else 12)]
    return Findings(by_rule, [by_rule["headroom"][NOISY], *others])


def text(findings: Findings) -> str:
    rows = [
        [
            rule,
            f"{by_world['fixed'].search}",
            *(f"{100 * outcome.share:.3f} %" for outcome in by_world.values()),
            *(f"{outcome.octaves_below:.1f}" for outcome in by_world.values()),
        ]
        for rule, by_world in findings.by_rule.items()
    ]
    by_world = findings.by_rule["headroom"]
    columns = ["rule", "search", *(f"{of}, {world}" for of in ("overflow", "octaves below") for world in by_world)]
    shares = [outcome.share for outcome in findings.by_seed]
    seeds = (
        f"Headroom with {NOISY}, {len(shares)} seeds: {100 * sum(shares) / len(shares):.3f} % overflow on average, "
        f"{100 * max(shares):.3f} % at worst."
    )
    return f"{STEPS:,} steps.\n\n{study.table(columns, rows)}\n\n{seeds}"


if __name__ == "__main__":
    study.main(__file__, measure, text)
