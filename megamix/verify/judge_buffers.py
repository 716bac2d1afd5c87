"""Buffers of somebody's own training: what forward moves, and what a skipped step must leave."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megamix.verify.hypotheses import AskedStep, nearest
from megamix.verify.reference import MicroBatches
from megamix.verify.verdict import NOISE, U32, Tensors, Verdict
from megamix.verify.watch import SeenStep


def check_buffers(verdict: Verdict, number: int, asked: AskedStep, before: SeenStep, after: SeenStep) -> None:
    """Check rank 0's buffers: those that the plain model's forward moves, by it; others stay in a skipped step.

    A skipped step may leave what forward has moved, as torch's batch norm does, or put it back.
    """
    mine, shares = asked.by_rank[0], asked.shares[0]

    def moved_by(batches: MicroBatches, shares: Sequence[float], native: bool = False) -> Tensors:
        if native:
            asked.reference.native_step(asked.weights, batches, shares, 1.0)
        else:
            asked.reference.exact_step(asked.weights, batches, shares)
        model = asked.reference.native if native else asked.reference.exact
        return {name: buffer.double().cpu().clone() for name, buffer in model.named_buffers()}

    wanted = moved_by(mine, shares) if after.buffers else {}
    rounded = moved_by(mine, shares, native=True) if after.buffers else {}
    for name in filter(after.buffers.__contains__, wanted):
        want, was, got = wanted[name], before.buffers[name].double(), after.buffers[name].double()
        if not any(after.updates) and torch.equal(got, was):
            continue
        if torch.equal(want, was):
            if not any(after.updates):
                off = float((got - was).abs().max())
                verdict.note(number, "buffer after a skipped step", name, off, 0.0, "moved by a step that is none")
            continue
        bound = NOISE * float((rounded[name] - want).abs().max()) + 64 * U32 * float(want.abs().max())

        def explain(name: str = name, was: Tensor = was, got: Tensor = got, bound: float = bound) -> str:
            twice = moved_by([one for batch in mine for one in (batch, batch)], [*shares, *shares])
            kinds = [("never moved", was), ("moved twice by each micro-batch: its forward runs again", twice[name])]
            for rank in range(1, len(asked.by_rank)):
                text = f"moved by the samples of rank {rank}"
                kinds.append((text, moved_by(asked.by_rank[rank], asked.shares[rank])[name]))
            return nearest(got, wanted[name], bound, iter(kinds))

        verdict.note(number, "buffer", name, float((got - want).abs().max()), bound, explain)
