"""Muon beside AdamW: cost of a step by batch size, and division of the optimizer's part over ranks.

The rate of Muon's iteration is compared with that of its own products.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megamix.mixed_precision.muon import Muon, orthogonalised
from megamix.tools.bench.ranks import Settings, Side, seconds_of, start_ranks
from megamix.tools.bench.report import Goal, Result, paired_ratio, progress
from megamix.tools.bench.sides import Ours, Work, make_model, product_dtype
from megamix.tools.bench.train_bench import exposed, measure, result, speed_up

LARGE_BATCH = 16  # sequences, in addition to the batch of `settings`


def muon(settings: Settings) -> Result:
    """Compare Muon with AdamW in BF16, with the settings' micro-batches and larger ones, and two ranks with one."""
    adamw, ours = Side("adamw", Ours), Side("muon", partial(Ours, optimizer=Muon))
    small = measure([adamw, ours], settings)
    large = measure([adamw, ours], replace(settings, work=replace(settings.work, micro_batch_size=LARGE_BATCH)))
    alone = measure([ours], replace(settings, ranks=1))
    shares = paired_ratio(small["muon"].optimizer_ms, alone["muon"].optimizer_ms)
    progress("the iteration and its products")
    with start_ranks("the iteration", partial(Iteration, settings.work)) as ranks:
        rounds = [ranks.call(Iteration.turn)[0] for _ in range(settings.rounds)]
    own, products = zip(*rounds, strict=True)
    size = settings.work.micro_batch_size
    goals = [
        Goal(f"tokens/s over AdamW's, {size} sequences", speed_up(small["muon"], small["adamw"]), 0.72),
        Goal(f"tokens/s over AdamW's, {LARGE_BATCH} sequences", speed_up(large["muon"], large["adamw"]), 0.88),
        Goal(f"optimizer's part on {settings.ranks} ranks over one's", shares, 0.62, at_least=False),
        Goal("time of the iteration's products over its own", paired_ratio(products, own), 0.6),
    ]
    return result("muon", settings, small, goals, exposed(small))


class Iteration:
    """Directions of a model's matrices on one rank, in BF16, and their products alone."""

    def __init__(self, work: Work):
        self._optimizer = Muon(lr=1.0)
        shapes = Counter(
            tuple(param.shape)
            for name, param in make_model(work).named_parameters()
            if self._optimizer.matrices(name, tuple(param.shape))
        )
        self._shapes = [(torch.randn(shape).bfloat16(), number) for shape, number in shapes.items()]
        self._dtype = product_dtype(torch.bfloat16, work.device)

    def turn(self) -> tuple[float, float]:
        """Return the seconds of all directions, and of their products, taking turns shape by shape."""
        both = 0.0, 0.0
        for matrix, number in self._shapes:
            own, products = (seconds_of(partial(work, matrix)) for work in (self._direction, self._products))
            both = both[0] + number * own, both[1] + number * products
        return both

    def _direction(self, matrix: Tensor) -> None:
        orthogonalised(matrix, self._optimizer)

    def _products(self, matrix: Tensor) -> None:
        x = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT.contiguous()).to(self._dtype)
        for _ in range(self._optimizer.ns_steps):
            gram = x @ x.mT
            _ = gram @ gram @ x
